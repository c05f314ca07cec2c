"""Sessions that nobody reads: paused here, ended or left to be resumed where their gateway died."""

from __future__ import annotations

import dataclasses
import time

import pytest

from hedgerow.errors import Unavailable
from services.gateway.endings import Endings
from services.gateway.orphans import Orphans, Sweep
from services.gateway.session import Session
from services.gateway.types import Finish
from tests.unit.gateway_peers import CANCELLED, DEADLINE, ERROR, Bench, Clock, record, update
from tests.unit.shared_store import NOBODY, SharedStore

A, B = b"a" * 16, b"b" * 16
NONE = Finish.NONE


def orphans() -> tuple[Bench, Orphans, Session]:
    bench = Bench()
    return bench, Orphans(bench.table, 30, bench.clock), bench.begin()


def test_a_session_without_a_reader_goes_on_for_a_while_and_is_paused_then() -> None:
    bench, sweep, session = orphans()
    bench.table.leave(bench.read(session), detach=True)
    sweep.sweep()
    bench.clock.now += 29
    sweep.sweep()
    assert (session.pausing, len(sweep)) == (None, 1)
    bench.clock.now += 1
    bench.step(update(session, [1]))
    sweep.sweep()
    assert isinstance(session.pausing, Unavailable)
    assert bench.engine.cancels == [("s1", 1, 1)]
    assert bench.leases.released == [], "an append is on its way"
    bench.acknowledge()
    assert bench.leases.released == [("s1", 1)]
    assert bench.store.states["s1"].finish is NONE
    assert bench.store.tokens["s1"] == [1]
    sweep.sweep()
    assert len(sweep) == 0


def test_a_reader_that_comes_starts_the_time_anew() -> None:
    bench, sweep, session = orphans()
    for _ in range(4):
        sweep.sweep()
        bench.clock.now += 20
        reader = bench.read(session)
        sweep.sweep()
        bench.table.leave(reader, detach=True)
    assert session.pausing is None


def test_an_end_on_its_way_is_not_paused() -> None:
    bench, sweep, session = orphans()
    bench.table.cancel(session)
    bench.clock.now += 99
    sweep.sweep()
    assert (session.pausing, len(sweep)) == (None, 0)


async def sweeps(store: SharedStore, clock: Clock) -> Sweep:
    view = store.of(B)
    return Sweep(view, Endings(view, 9), 30, clock)


@pytest.mark.parametrize(
    ("change", "owner", "marked", "at_once", "later"),
    [
        ({"detach": True}, A, False, NONE, NONE),
        ({"detach": True}, NOBODY, False, NONE, NONE),
        ({"detach": True}, A, True, CANCELLED, CANCELLED),
        ({"detach": True, "deadline_unix_ms": 1}, A, False, DEADLINE, DEADLINE),
        ({"detach": True, "deadline_unix_ms": 1 << 50}, A, False, NONE, NONE),
        ({"detach": False}, A, False, NONE, CANCELLED),
        ({"detach": False}, NOBODY, False, NONE, CANCELLED),
        ({"detach": False}, B, True, NONE, NONE),
        ({"detach": False}, B, False, NONE, NONE),
    ],
)
async def test_what_no_gateway_runs_is_ended_or_left_to_be_resumed(
    change: dict[str, int], owner: bytes, marked: bool, at_once: Finish, later: Finish
) -> None:
    """B lives and sweeps: what it runs itself is none of the sweep's business."""
    store, clock = SharedStore(), Clock()
    kept = store.put(dataclasses.replace(record(), **change), owner, [1, 2], cancel_marked=marked)  # type: ignore[arg-type]
    sweep = await sweeps(store, clock)
    await sweep.sweep()
    assert kept.state.finish is at_once
    clock.now += 29
    await sweep.sweep()
    assert kept.state.finish is at_once
    clock.now += 1
    await sweep.sweep()
    assert kept.state.finish is later
    assert kept.tokens == [1, 2]
    assert kept.state.usage.completion_tokens == (2 if later else 0)


async def test_what_its_gateway_left_before_a_token_fails_and_leaves_its_key_usable() -> None:
    store, clock = SharedStore(), Clock()
    kept = store.put(dataclasses.replace(record(), detach=False), A)
    sweep = await sweeps(store, clock)
    await sweep.sweep()
    clock.now += 30
    await sweep.sweep()
    assert kept.state.finish is ERROR


async def test_a_client_that_comes_back_in_time_keeps_what_should_have_ended_with_its_call() -> None:
    store, clock = SharedStore(), Clock()
    kept = store.put(record(), A)
    sweep = await sweeps(store, clock)
    await sweep.sweep()
    clock.now += 29
    kept.state = kept.state._replace(owner=B)
    await sweep.sweep()
    kept.state = kept.state._replace(owner=NOBODY)
    clock.now += 1
    await sweep.sweep()
    assert not kept.state.finish, "its time began anew"


async def test_a_sweep_sees_every_page_and_bears_a_store_that_is_away() -> None:
    store, clock = SharedStore(), Clock()
    late = time.time_ns() // 1_000_000 - 5_000
    for i in range(7):
        store.put(dataclasses.replace(record(f"s{i}"), deadline_unix_ms=late), A)
    sweep = await sweeps(store, clock)
    store.away = True
    with pytest.raises(Unavailable):
        await sweep.sweep()
    store.away = False
    await sweep.sweep()
    assert [kept.state.finish for kept in store.kept.values()] == [DEADLINE] * 7
    assert sweep.ended == 7
