"""Clients that come back to a session: running here, ended, running elsewhere, or nobody's."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from hedgerow import digest
from hedgerow.errors import (
    InvalidRequest,
    LostSuffix,
    Overloaded,
    SessionFailed,
    SessionUnknown,
    Unavailable,
)
from services.gateway.following import Times
from services.gateway.messages import Append, Appended, AppendStatus
from services.gateway.position import START, Position
from services.gateway.reader import Reader
from services.gateway.resuming import Resuming
from services.gateway.session import Session
from services.gateway.takeover import TakeOver
from services.gateway.types import Finish, Record
from tests.polling import soon
from tests.unit.gateway_peers import CANCELLED, DEADLINE, ERROR, LENGTH, Bench, record, update
from tests.unit.shared_store import NOBODY, SharedStore, leases_of

A, B = b"a" * 16, b"b" * 16
LAW = list(range(100, 200))
PIECES = [bytes([i % 128]) for i in range(256)]
TIMES = Times(quiet=0.02, repair=0.1, forsaken=0.2, patience=0.3)
WRONG = b"w" * 16


class Side:
    """One gateway on the shared store; what its table appends is stored when the test says so."""

    def __init__(self, store: SharedStore, owner: bytes, most: int = 8) -> None:
        self.store, self.view, self.bench = store, store.of(owner), Bench()
        self.leases = leases_of(self.view)
        self.table = self.bench.table
        self.table._leases = self.leases
        self.takeover = TakeOver(self.table, self.view, self.leases, most=most, patience=0.3, clock=self.bench.clock)
        self.resuming = Resuming(self.table, self.view, self.takeover, PIECES, TIMES)

    async def find(self, at: Position = START, tenant: str = "") -> Session:
        def allow(there: Record) -> None:
            if there.tenant != tenant:
                raise SessionUnknown(there.session_id)

        return await self.resuming.find("s1", allow, at)

    def read(self, session: Session, offset: int = 0, claim: bytes = b"") -> Reader:
        return self.resuming.read(session, lambda: None, offset, claim)

    def append(self) -> None:
        """Store the oldest message of the table and answer it."""
        entries: list[Append] = list(self.bench.store.sent.popleft())
        results = []
        for entry in entries:
            kept = self.store.kept[entry.session_id]
            assert (entry.epoch, entry.offset) == (kept.state.epoch, kept.state.length)
            kept.grow(entry.tokens, **({"finish": entry.end.reason} if entry.end else {}))
            results.append(Appended(entry.session_id, AppendStatus.OK, kept.state))
        self.table.appended(results)

    def step(self, session: Session, *tokens: int, finish: Finish = Finish.NONE) -> None:
        self.bench.step(update(session, tokens, finish=finish))
        self.append()


@pytest.fixture
def store() -> SharedStore:
    return SharedStore()


@pytest_asyncio.fixture
async def b(store: SharedStore) -> AsyncIterator[Side]:
    """The gateway that clients come to; another one, A, ran the session."""
    side = Side(store, B)
    yield side
    side.resuming.close(Unavailable("gateway", "the test is over"))
    await soon(lambda: not len(side.resuming) and not len(side.leases) and not store.follows)


def at(offset: int) -> bytes:
    return digest.extend(digest.first("s1", record().prompt), LAW[:offset])


def taken(reader: Reader) -> list[int]:
    got: list[int] = []
    while (piece := reader.take()) is not None and not (piece.last and not piece.tokens):
        got += piece.tokens
        if piece.last:
            break
    return got


async def comes(reader: Reader, tokens: list[int]) -> None:
    got: list[int] = []

    def have() -> bool:
        got.extend(taken(reader))
        return got == tokens

    await soon(have, 30, f"{tokens}")


async def test_what_has_ended_is_read_from_the_log(store: SharedStore, b: Side) -> None:
    store.put(record(), A, LAW[:10], finish=LENGTH)
    session = await b.find(Position(4, at(4)))
    assert taken(b.read(session, 4, at(4))) == LAW[4:10]
    assert (session.end and session.end.reason, session.error) == (LENGTH, None)
    assert (b.view.acquired, b.table.sessions) == (0, {})


async def test_an_end_with_an_error_gives_the_tokens_and_then_that(store: SharedStore, b: Side) -> None:
    store.put(record(), A, LAW[:10], finish=ERROR)
    session = await b.find()
    assert taken(b.read(session)) == LAW[:10]
    assert isinstance(session.error, SessionFailed)
    assert session.error.retry_after is None


async def test_who_follows_what_fails_before_its_first_token_may_ask_again(store: SharedStore, b: Side) -> None:
    """It was told to use another key, while the owner's own client could come again with the same one."""
    kept = store.put(record(), A)
    store.alive.add(A)
    reader = b.read(await b.find())
    kept.grow([], finish=Finish.ERROR)
    await soon(lambda: reader.session.done)
    assert isinstance(reader.session.error, Unavailable)


async def test_what_runs_elsewhere_is_followed_once_for_all_who_read_it(store: SharedStore, b: Side) -> None:
    kept = store.put(record(), A, LAW[:5])
    store.alive.add(A)
    first, second = await asyncio.gather(b.find(), b.find(Position(3, at(3))))
    assert first is second
    readers = b.read(first), b.read(second, 3, at(3))
    assert [taken(reader) for reader in readers] == [LAW[:5], LAW[3:5]]
    await soon(lambda: store.follows == 1)
    kept.grow(LAW[5:9])
    await comes(readers[0], LAW[5:9])
    kept.grow(LAW[9:12], finish=LENGTH)
    await comes(readers[1], LAW[5:12])
    assert (first.done, first.end and first.end.reason, first.error) == (True, LENGTH, None)
    assert (kept.state.owner, b.view.acquired) == (A, 0)
    await soon(lambda: len(b.resuming) == 0)


async def test_an_owner_that_dies_under_a_follower_is_replaced_and_readers_do_not_notice(
    store: SharedStore, b: Side
) -> None:
    kept = store.put(record(), A, LAW[:5])
    store.alive.add(A)
    followed = await b.find()
    reader = b.read(followed)
    assert taken(reader) == LAW[:5]
    kept.grow(LAW[5:7])
    store.alive.remove(A)
    await soon(lambda: "s1" in b.table.sessions)
    await soon(lambda: reader.session is not followed)
    session = b.table.sessions["s1"]
    assert reader.session is session
    assert (kept.state.owner, kept.state.epoch, session.epoch) == (B, 2, 2)
    assert taken(reader) == LAW[5:7]
    b.step(session, *LAW[7:9])
    assert taken(reader) == LAW[7:9]
    b.step(session, LAW[9], finish=LENGTH)
    piece = reader.take()
    assert piece is not None
    assert (list(piece.tokens), piece.last, piece.digest) == ([LAW[9]], True, at(10))
    assert kept.tokens == LAW[:10]


async def test_nobodys_session_is_taken_over_at_once_and_once(store: SharedStore, b: Side) -> None:
    kept = store.put(record(), NOBODY, LAW[:5])
    sessions = await asyncio.gather(*(b.find(Position(i, at(i))) for i in range(4)))
    assert all(session is b.table.sessions["s1"] for session in sessions)
    assert (b.view.acquired, kept.state.owner) == (1, B)
    reader = b.read(sessions[2], 2, at(2))
    b.step(sessions[2], LAW[5])
    assert taken(reader) == LAW[2:6]
    start = b.bench.engine.starts[0]
    assert (start.epoch, list(start.committed), start.digest) == (2, LAW[:5], at(5))


async def test_options_come_from_the_record(store: SharedStore, b: Side) -> None:
    late = time.time_ns() // 1_000_000 + 5_000
    new = dataclasses.replace(record(), priority=7, return_steps=True, return_trees=True, deadline_unix_ms=late)
    store.put(new, NOBODY, LAW[:5])
    options = (await b.find()).options
    assert (options.priority, options.return_steps, options.return_trees) == (7, True, True)
    assert options.deadline is not None
    assert 4 < options.deadline - b.bench.clock() <= 5


@pytest.mark.parametrize(
    ("change", "mark", "reason"),
    [({"deadline_unix_ms": 1}, False, DEADLINE), ({}, True, CANCELLED)],
)
async def test_what_should_have_ended_ends_at_its_take_over(
    store: SharedStore, b: Side, change: dict[str, int], mark: bool, reason: Finish
) -> None:
    kept = store.put(dataclasses.replace(record(), **change), NOBODY, LAW[:5], cancel_marked=mark)  # type: ignore[arg-type]
    session = await b.find()
    b.append()
    assert kept.state.finish is reason
    assert taken(b.read(session)) == LAW[:5]


@pytest.mark.parametrize(
    "at_",
    [
        Position(3, WRONG), Position(0, WRONG), Position(6), Position(text=6), Position(5, at(4)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("owner", [A, NOBODY])
async def test_what_the_log_does_not_have_is_refused_and_nothing_is_changed(
    store: SharedStore, b: Side, at_: Position, owner: bytes
) -> None:
    kept = store.put(record(), owner, LAW[:5])
    store.alive.add(A)
    before = kept.state
    with pytest.raises(LostSuffix):
        await b.find(at_)
    assert (kept.state, kept.tokens, b.view.acquired, len(b.resuming)) == (before, LAW[:5], 0, 0)


async def test_an_offset_that_no_run_of_the_session_could_reach_is_refused(store: SharedStore, b: Side) -> None:
    store.put(record(max_tokens=20), NOBODY, LAW[:5])
    with pytest.raises(InvalidRequest, match=r"token_offset: 21 is not allowed: at most 20, the session's max_tokens"):
        await b.find(Position(21, at(21)))
    assert b.view.acquired == 0


@pytest.mark.parametrize("where", ["ended", "elsewhere", "nobody", "here", "being paused here"])
async def test_another_tenants_session_is_unknown_wherever_it_is(store: SharedStore, b: Side, where: str) -> None:
    new = dataclasses.replace(record(), tenant="t")
    kept = store.put(new, A, LAW[:5], **({"finish": LENGTH} if where == "ended" else {}))
    store.alive.update([A] if where == "elsewhere" else [])
    if where.endswith("here"):
        session = await b.find(tenant="t")
        if where == "being paused here":
            b.bench.step(update(session, [LAW[5]]))
            b.table.pause(session)
    before = kept.state
    for tenant in ("", "u"):
        with pytest.raises(SessionUnknown):
            await b.find(Position(2, at(2)), tenant)
    assert kept.state == before


async def test_an_end_before_the_clients_offset_is_told_with_both_values(store: SharedStore, b: Side) -> None:
    store.put(record(), A, LAW[:5], finish=LENGTH)
    with pytest.raises(LostSuffix) as raised:
        await b.find(Position(7, at(7)))
    assert raised.value.metadata == {
        "token_offset": "7", "digest": at(7).hex(), "stored_offset": "5", "stored_digest": at(5).hex(),
    }  # fmt: skip


async def test_tokens_that_nobodys_log_lost_are_made_again_before_any_is_released(store: SharedStore, b: Side) -> None:
    store.put(record(), NOBODY, LAW[:5])
    session = await b.find(Position(8, at(8)))
    reader = b.read(session, 8, at(8))
    assert reader.take() is None
    b.step(session, *LAW[5:8])
    b.step(session, *LAW[8:10])
    assert taken(reader) == LAW[8:10]


async def test_a_shorter_log_is_waited_for_while_its_owner_repairs_it(store: SharedStore, b: Side) -> None:
    kept = store.put(record(), A, LAW[:5])
    store.alive.add(A)
    session = await b.find(Position(8, at(8)))
    reader = b.read(session, 8, at(8))
    assert reader.take() is None
    kept.grow(LAW[5:9])
    await comes(reader, LAW[8:9])
    assert b.view.acquired == 0


async def test_an_owner_that_does_not_repair_is_not_waited_for_long(store: SharedStore, b: Side) -> None:
    kept = store.put(record(), A, LAW[:5])
    store.alive.add(A)
    session = await b.find(Position(8, at(8)))
    reader, other = b.read(session, 8, at(8)), b.read(session)
    assert taken(other) == LAW[:5]
    await soon(lambda: "s1" in b.table.sessions)
    assert (kept.state.owner, kept.state.epoch) == (B, 2)
    b.step(b.table.sessions["s1"], *LAW[5:9])
    await comes(reader, LAW[8:9])
    await comes(other, LAW[5:9])


async def test_a_session_that_its_living_owner_does_not_run_is_taken_when_it_stays_silent(
    store: SharedStore, b: Side
) -> None:
    """Its owner had ended it, the store forgot the end, and its reader here waited for ever."""
    kept = store.put(record(), A, LAW[:5])
    store.alive.add(A)
    reader = b.read(await b.find())
    assert taken(reader) == LAW[:5]
    kept.grow(LAW[5:6])
    await comes(reader, LAW[5:6])
    await soon(lambda: "s1" in b.table.sessions)
    assert (kept.state.owner, kept.state.epoch) == (B, 2)
    b.step(b.table.sessions["s1"], LAW[6], finish=LENGTH)
    await comes(reader, LAW[6:7])
    assert kept.tokens == LAW[:7]


async def test_a_lease_that_is_just_being_given_up_is_taken_soon(store: SharedStore, b: Side) -> None:
    """A client that a draining gateway sends away may be here before the lease is given up."""
    kept = store.put(record(), A, LAW[:5])
    store.alive.add(A)
    b.resuming._times = TIMES._replace(quiet=30.0, repair=60.0, forsaken=60.0)
    reader = b.read(await b.find())
    assert taken(reader) == LAW[:5]
    await soon(lambda: store.follows == 1)
    kept.state = kept.state._replace(owner=NOBODY)
    began = time.monotonic()
    await soon(lambda: "s1" in b.table.sessions)
    assert time.monotonic() - began < 15
    assert kept.state.owner == B


async def test_a_log_that_lost_what_was_followed_is_made_again_here(store: SharedStore, b: Side) -> None:
    kept = store.put(record(), A, LAW[:5])
    store.alive.add(A)
    reader = b.read(await b.find())
    kept.grow(LAW[5:9])
    await comes(reader, LAW[:9])
    store.alive.remove(A)
    kept.lose(6)
    await soon(lambda: "s1" in b.table.sessions)
    session = b.table.sessions["s1"]
    assert list(session.tokens) == LAW[:6]
    await soon(lambda: reader.session is session)
    assert reader.take() is None
    b.step(session, *LAW[6:11])
    assert taken(reader) == LAW[9:11]


async def test_a_log_that_was_forked_under_a_follower_is_told(store: SharedStore, b: Side) -> None:
    kept = store.put(record(), A, LAW[:5])
    store.alive.add(A)
    reader = b.read(await b.find())
    assert taken(reader) == LAW[:5]
    await soon(lambda: store.follows == 1)
    kept.lose(3)
    kept.grow([9, 9, 9])
    await soon(lambda: reader.session.done)
    assert isinstance(reader.session.error, LostSuffix)


async def test_a_session_that_the_store_lost_is_written_again_by_its_owner(store: SharedStore, b: Side) -> None:
    kept = store.put(record(), A, LAW[:5])
    store.alive.add(A)
    b.resuming._times = TIMES._replace(repair=30.0, forsaken=60.0)
    reader = b.read(await b.find())
    assert taken(reader) == LAW[:5]
    del store.kept["s1"]
    kept.wake()
    await asyncio.sleep(0.03)
    store.kept["s1"] = kept
    kept.grow(LAW[5:7])
    await comes(reader, LAW[5:7])
    assert b.view.acquired == 0


async def test_a_session_that_the_store_and_its_owner_lost_is_made_again_here(store: SharedStore, b: Side) -> None:
    """It was lost to those who followed it, though its record was here."""
    kept = store.put(record(), A, LAW[:5], epoch=3)
    store.alive.add(A)
    reader = b.read(await b.find())
    assert taken(reader) == LAW[:5]
    del store.kept["s1"]
    kept.wake()
    await soon(lambda: "s1" in b.table.sessions)
    again = b.table.sessions["s1"]
    assert (again.epoch, again.record.birth, list(again.tokens)) == (4, record().birth, [])
    b.step(again, *LAW[:4])
    assert taken(reader) == []
    b.step(again, *LAW[4:7])
    await comes(reader, LAW[5:7])


async def test_tokens_of_a_session_that_nobody_writes_again_are_told_as_lost(store: SharedStore, b: Side) -> None:
    """It was SESSION_UNKNOWN, as if the client had made the session up."""
    with pytest.raises(LostSuffix) as raised:
        await b.find(Position(3, at(3)))
    values = {"token_offset": "3", "digest": at(3).hex(), "stored_offset": "0", "stored_digest": ""}
    assert {name: raised.value.metadata[name] for name in values} == values
    for position in (Position(3), Position(0, at(0))):
        with pytest.raises(SessionUnknown):
            await b.find(position)


async def test_a_client_with_tokens_waits_for_a_session_that_its_owner_writes_again(
    store: SharedStore, b: Side
) -> None:
    kept = store.put(record(), A, LAW[:5])
    store.alive.add(A)
    del store.kept["s1"]
    with pytest.raises(SessionUnknown):
        await b.find(Position(3))
    b.resuming._times = TIMES._replace(repair=30.0)
    finding = asyncio.create_task(b.find(Position(3, at(3))))
    await asyncio.sleep(0.02)
    store.kept["s1"] = kept
    assert taken(b.read(await finding, 3, at(3))) == LAW[3:5]


async def test_a_store_that_is_away_for_a_while_does_not_end_what_is_followed(store: SharedStore, b: Side) -> None:
    kept = store.put(record(), A, LAW[:5])
    store.alive.add(A)
    b.resuming._times = TIMES._replace(patience=1.5)
    reader = b.read(await b.find())
    assert taken(reader) == LAW[:5]
    store.away = True
    kept.wake()
    await asyncio.sleep(0.1)
    store.away = False
    kept.grow(LAW[5:8])
    await comes(reader, LAW[5:8])
    store.away = True
    kept.wake()
    await soon(lambda: reader.session.done)
    assert isinstance(reader.session.error, Unavailable)
    store.away = False


async def test_a_grant_whose_answer_was_lost_is_given_back(store: SharedStore, b: Side) -> None:
    """Else the session would be nobody's and yet held, for as long as this gateway lives."""
    kept = store.put(record(), NOBODY, LAW[:5])
    store.grants_unheard = True
    with pytest.raises(Unavailable):
        await b.find()
    assert kept.state.owner == B
    await b.takeover.settle()
    await soon(lambda: kept.state.owner == NOBODY)
    await b.takeover.settle()
    store.grants_unheard = True
    with pytest.raises(Unavailable):
        await b.find()
    session = await b.find()
    assert (session.epoch, b.table.sessions) == (kept.state.epoch, {"s1": session})
    await b.takeover.settle()
    assert kept.state.owner == B


async def test_a_session_of_this_gateway_that_it_dropped_is_taken_again(store: SharedStore, b: Side) -> None:
    kept = store.put(record(), B, LAW[:5])
    session = await b.find()
    assert (session.epoch, kept.state.owner) == (2, B)


async def test_a_full_gateway_takes_nothing_over(store: SharedStore) -> None:
    kept = store.put(record(), NOBODY, LAW[:5])
    with pytest.raises(Overloaded):
        await Side(store, B, most=0).find()
    assert kept.state.owner == NOBODY


async def test_a_draining_gateway_takes_nothing_over(store: SharedStore, b: Side) -> None:
    kept = store.put(record(), NOBODY, LAW[:5])
    b.resuming.close(Unavailable("gateway", "it drains"))
    with pytest.raises(Unavailable, match="it drains"):
        await b.find()
    assert kept.state.owner == NOBODY


async def test_a_session_that_is_being_paused_is_not_joined_but_taken_again_after_it(
    store: SharedStore, b: Side
) -> None:
    kept = store.put(record(), NOBODY, LAW[:5])
    session = await b.find()
    b.bench.step(update(session, [LAW[5]]))
    b.table.pause(session)
    with pytest.raises(Unavailable, match="being paused"):
        await b.find()
    b.append()
    assert await b.find() is not session
    assert (kept.state.epoch, kept.state.owner) == (3, B)
    assert list(b.table.sessions["s1"].tokens) == LAW[:6]


@pytest.mark.parametrize("detach", [True, False])
async def test_the_last_reader_of_what_runs_elsewhere_leaves_it_or_cancels_it(
    store: SharedStore, b: Side, detach: bool
) -> None:
    kept = store.put(record(), A, LAW[:5])
    store.alive.add(A)
    session = await b.find()
    first, second = b.read(session), b.read(session)
    b.resuming.leave(first, detach=False)
    assert len(b.resuming) == 1
    b.resuming.leave(second, detach=detach)
    await soon(lambda: len(b.resuming) == 0)
    assert kept.state.cancel_marked is not detach
    again = await b.find()
    assert (again is session, again.done) == (False, False)


@pytest.mark.parametrize("grows", [True, False])
async def test_what_nobody_reads_is_not_followed_for_long(store: SharedStore, b: Side, grows: bool) -> None:
    """Its client went away while it was looked for; it was followed to its end, and even taken over."""
    kept = store.put(record(), A, LAW[:5])
    store.alive.add(A)
    await b.find()

    def left() -> bool:
        if grows:
            kept.grow(LAW[len(kept.tokens) : len(kept.tokens) + 1])
        return len(b.resuming) == 0

    await soon(left)
    assert store.follows == 0


async def test_a_client_that_leaves_does_not_stop_what_others_wait_for(store: SharedStore, b: Side) -> None:
    store.put(record(), NOBODY, LAW[:5])
    first, second = asyncio.create_task(b.find()), asyncio.create_task(b.find())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    first.cancel()
    assert await second is b.table.sessions["s1"]


async def test_two_gateways_that_take_at_once_give_it_to_one(store: SharedStore, b: Side) -> None:
    kept = store.put(record(), NOBODY, LAW[:5])
    a = Side(store, A)
    mine, theirs = await asyncio.gather(a.find(), b.find())
    owners = ["s1" in side.table.sessions for side in (a, b)]
    assert sorted(owners) == [False, True]
    reader = b.read(theirs)
    runs: Side = a if owners[0] else b
    runs.step(runs.table.sessions["s1"], *LAW[5:7], finish=LENGTH)
    await comes(reader, LAW[:7])
    assert kept.tokens == LAW[:7]
    assert mine.id == theirs.id
    a.resuming.close(Unavailable("gateway", "over"))
    await soon(lambda: not len(a.resuming))
