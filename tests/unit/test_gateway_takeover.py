"""Sessions that change hands: taken over with their tokens, paused, and the lease calls that go with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from hedgerow import digest
from hedgerow.errors import Fenced, HedgerowError, SessionDeleted, SessionUnknown, Unavailable
from services.gateway.leases import Leases
from services.gateway.messages import Granted, State, Stored
from services.gateway.session import Options
from services.gateway.types import Record
from tests.unit.gateway_peers import LENGTH, OWNER, Bench, record, update

OTHER = b"x" * 16


def stored(bench: Bench, tokens: list[int], epoch: int) -> Stored:
    """As a gateway that died left it."""
    new = record()
    bench.store.create(new)
    first = digest.first(new.session_id, new.prompt)
    bench.store.tokens["s1"] = list(tokens)
    bench.store.digests["s1"] = [digest.extend(first, tokens[:i]) for i in range(len(tokens) + 1)]
    state = bench.store.states["s1"]._replace(epoch=epoch, length=len(tokens), digest=bench.store.digests["s1"][-1])
    bench.store.states["s1"] = state
    return Stored(new, state, tokens)


def test_a_session_taken_over_goes_on_from_its_committed_tokens() -> None:
    bench = Bench()
    session = bench.table.take_over(stored(bench, [1, 2, 3], epoch=4), 4, Options())
    start = bench.engine.starts[0]
    assert (start.epoch, start.attempt, start.committed) == (4, 1, [1, 2, 3])
    assert start.digest == digest.extend(session.first_digest, [1, 2, 3])
    reader = bench.read(session)
    bench.step(update(session, [2, 3, 4], offset=1))  # it holds the sequence still, and tells what it emitted
    bench.step(update(session, [5], finish=LENGTH))
    bench.acknowledge()
    bench.acknowledge()
    assert bench.store.tokens["s1"] == [1, 2, 3, 4, 5]
    piece = reader.take()
    assert piece is not None
    assert (list(piece.tokens), piece.offset, piece.last) == ([1, 2, 3, 4, 5], 0, True)
    assert bench.store.states["s1"].finish is LENGTH


def test_a_reader_of_a_session_taken_over_starts_where_its_client_is() -> None:
    bench = Bench()
    session = bench.table.take_over(stored(bench, [1, 2, 3], epoch=2), 2, Options())
    reader = bench.table.read(session, lambda: None, 2, digest.extend(session.first_digest, [1, 2]))
    piece = reader.take()
    assert piece is not None
    assert (list(piece.tokens), piece.offset, piece.digest) == ([3], 2, session.digest)


def test_a_pause_waits_for_what_is_on_its_way_and_then_gives_the_lease_up() -> None:
    bench = Bench()
    session = bench.begin()
    reader = bench.read(session)
    bench.step(update(session, [1, 2]))
    bench.table.pause(session)
    assert bench.engine.cancels == [("s1", 1, 1)]
    assert bench.leases.released == []
    bench.step(update(session, [3]))  # too late: the verifier had not seen the cancel
    assert bench.store.messages == 1
    bench.acknowledge()
    assert bench.leases.released == [("s1", 1)]
    assert bench.table.sessions == {}
    piece = reader.take()
    assert piece is not None
    assert (list(piece.tokens), piece.last) == ([1, 2], True)
    assert isinstance(session.error, Unavailable)
    assert session.error.retry_after
    assert not bench.store.states["s1"].finish, "it can be resumed"


def test_a_pause_with_nothing_on_its_way_is_at_once_and_an_end_is_not_paused() -> None:
    bench = Bench()
    session, other = bench.begin(), bench.begin(record("s2"))
    bench.table.pause(session)
    assert bench.leases.released == [("s1", 1)]
    bench.table.cancel(other)
    bench.table.pause(other)
    bench.acknowledge()
    assert bench.leases.released == [("s1", 1)]
    assert bench.store.states["s2"].finish


def test_a_session_that_is_cancelled_while_it_is_to_be_paused_ends() -> None:
    bench = Bench()
    session = bench.begin()
    bench.step(update(session, [1]))
    bench.table.pause(session)
    assert bench.table.cancel(session)
    bench.acknowledge()
    bench.acknowledge()
    assert bench.store.states["s1"].finish
    assert bench.leases.released == []


class LeaseStore:
    """One session as a store has it, which may be away or have forgotten it."""

    def __init__(self) -> None:
        self.owner = OWNER
        self.state: State | None = State(1, OWNER)
        self.refuses: HedgerowError | None = None
        self.away = 0  # calls that are not answered
        self.calls: list[tuple[Any, ...]] = []

    async def get(self, session_id: str, from_offset: int = 0) -> Stored:
        self._check()
        if self.state is None:
            raise SessionUnknown(session_id)
        return Stored(record(session_id), self.state, ())

    async def acquire(self, record: Record, *, floor: int, repair: bool, only_expired: bool) -> Granted:
        self._check()
        self.calls.append(("acquire", floor, repair, only_expired))
        epoch = max(floor, self.state.epoch if self.state else 0) + 1
        self.state = State(epoch, OWNER)
        return Granted(epoch, self.state)

    async def release(self, record: Record, epoch: int) -> State:
        self._check()
        self.calls.append(("release", epoch))
        return State(epoch)

    def _check(self) -> None:
        if self.away:
            self.away -= 1
            raise Unavailable("kvstore", "away")
        if self.refuses:
            raise self.refuses


@pytest.fixture
async def leased() -> tuple[Leases, LeaseStore, Callable[[], Any]]:
    store = LeaseStore()
    leases = Leases(store, 5.0)

    async def idle() -> None:
        async with asyncio.timeout(5):
            while len(leases):
                await leases.released("s1")

    return leases, store, idle


async def test_a_release_is_tried_until_the_store_is_back(leased: tuple[Leases, LeaseStore, Any]) -> None:
    leases, store, idle = leased
    store.away = 2
    leases.release(record(), 3)
    await idle()
    assert store.calls == [("release", 3)]
    store.refuses = Fenced("s1", 3, 4)
    leases.release(record(), 3)
    await idle()
    assert len(leases) == 0


@pytest.mark.parametrize(
    ("state", "floor", "granted"),
    [(None, 3, 4), (State(1, OWNER), 3, 4), (State(3, OWNER), 9, 10)],
    ids=["record lost", "epoch went backwards", "a verifier saw a higher one"],
)
async def test_a_repair_takes_the_session_above_every_epoch_that_was_seen(
    leased: tuple[Leases, LeaseStore, Any], state: State | None, floor: int, granted: int
) -> None:
    leases, store, idle = leased
    store.state, store.away = state, 1
    told: list[Any] = []
    leases.repair(record(), 3, floor, told.append)
    await idle()
    assert [answer.epoch for answer in told] == [granted]
    assert store.calls == [("acquire", floor, True, False)]


@pytest.mark.parametrize("state", [State(4, OTHER), State(3, OTHER)])
async def test_a_repair_takes_nothing_back_from_another_gateway(
    leased: tuple[Leases, LeaseStore, Any], state: State
) -> None:
    leases, store, idle = leased
    store.state = state
    told: list[Any] = []
    leases.repair(record(), 3, 3, told.append)
    await idle()
    assert [type(answer) for answer in told] == [Fenced]
    assert store.calls == []


async def test_a_repair_does_not_bring_a_deleted_session_back(leased: tuple[Leases, LeaseStore, Any]) -> None:
    leases, store, idle = leased
    store.refuses = SessionDeleted("s1")
    told: list[Any] = []
    leases.repair(record(), 3, 3, told.append)
    await idle()
    assert [type(answer) for answer in told] == [SessionDeleted]


def test_a_silent_session_is_appended_to_before_it_expires() -> None:
    bench = Bench()
    session = bench.begin()
    bench.step(update(session, [1]))
    bench.table.refresh(10)
    assert bench.store.messages == 1, "one is on its way"
    bench.acknowledge()
    bench.clock.now += 9
    bench.table.refresh(10)
    assert bench.store.messages == 1
    bench.clock.now += 1
    bench.table.refresh(10)
    assert bench.store.messages == 2
    bench.acknowledge()
    bench.step(update(session, [2], finish=LENGTH))
    bench.acknowledge()
    assert bench.store.tokens["s1"] == [1, 2]
    bench.clock.now += 99
    bench.table.refresh(10)
    assert bench.store.messages == 3


def test_a_detached_client_leaves_its_session_running() -> None:
    bench = Bench()
    session = bench.begin()
    bench.table.leave(bench.read(session), detach=True)
    assert bench.engine.cancels == []
    bench.step(update(session, [1]))
    bench.acknowledge()
    assert session.acked == 1


def test_a_session_that_is_handed_over_stays_at_its_verifier() -> None:
    """A drained gateway's sessions were prefilled and replayed again by the next one, for a second each."""
    bench = Bench()
    session = bench.begin()
    bench.step(update(session, [1, 2]))
    bench.table.pause(session, hand_over=True)
    bench.acknowledge()
    assert bench.leases.released == [("s1", 1)]
    assert bench.engine.cancels == []
    bench.step(update(session, [3]))
    assert bench.table.dropped == 1
    assert bench.store.tokens["s1"] == [1, 2]
