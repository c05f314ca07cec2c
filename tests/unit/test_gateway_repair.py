"""A store that forgets: its owner appends again what it had, and clients see nothing of it."""

from __future__ import annotations

import random

import pytest

from hedgerow import digest
from hedgerow.errors import (
    Fenced,
    HedgerowError,
    InvariantViolation,
    SessionDeleted,
    SessionExpired,
    Unavailable,
)
from services.gateway.messages import ENTRY_TOKENS, Appended, AppendStatus, Granted, State
from services.gateway.repairs import MAX_REPAIRS
from services.gateway.session import Options, Session
from tests.unit.gateway_peers import CANCELLED, OWNER, STOP, Bench, MemoryStore, record, update
from tests.unit.test_gateway_outbox import WiredBench


def committed(bench: WiredBench, tokens: list[int]) -> Session:
    session = bench.begin()
    bench.step(update(session, tokens))
    bench.settle()
    assert session.acked == len(tokens)
    return session


def grant(bench: Bench, epoch: int) -> None:
    """The store's answer to a repair."""
    store = bench.store
    if "s1" not in store.states:
        store.create(record())
    store.states["s1"] = store.states["s1"]._replace(epoch=epoch)
    bench.leases.waiting.popleft()(Granted(epoch, store.states["s1"]))


def test_a_log_that_lost_its_end_is_complete_again_before_anything_new_is_released() -> None:
    bench = WiredBench()
    session = committed(bench, [1, 2, 3, 4])
    reader = bench.read(session)
    first = reader.take()
    assert first is not None
    bench.store.lose("s1", 1)
    bench.step(update(session, [5, 6]))
    assert bench.wire.send()
    bench.table.appended(bench.wire.answer())  # GAP
    assert reader.take() is None
    assert bench.store.tokens["s1"] == [1]
    bench.settle()
    assert bench.store.tokens["s1"] == [1, 2, 3, 4, 5, 6]
    piece = reader.take()
    assert piece is not None
    assert (list(piece.tokens), piece.offset) == ([5, 6], 4)
    assert bench.leases.repairs == []
    assert (bench.table.counts.repairs, bench.table.counts.repaired_tokens) == (1, 5)
    assert len(bench.engine.starts) == 1, "the verifier notices nothing"


def test_a_log_that_is_short_takes_all_that_follows_in_the_meantime() -> None:
    """Two messages are on their way when it loses its end: both are refused, one repair does."""
    bench = WiredBench()
    session = committed(bench, [1, 2, 3])
    bench.store.lose("s1", 2)
    for token in (4, 5):
        bench.step(update(session, [token]))
        bench.wire.send()
    bench.settle()
    assert bench.store.tokens["s1"] == [1, 2, 3, 4, 5]
    assert (session.acked, bench.table.counts.repairs) == (5, 1)
    assert len(bench.wire.outbox) == 0


@pytest.mark.parametrize("lost", ["epoch", "record"])
def test_a_store_that_lost_the_epoch_or_the_record_is_taken_again_and_filled(lost: str) -> None:
    bench = WiredBench()
    new = record()
    bench.store.create(new)
    bench.store.states["s1"] = bench.store.states["s1"]._replace(epoch=5)
    session = bench.table.begin(new, 5, Options())
    reader = bench.read(session)
    bench.step(update(session, [1, 2, 3]))
    bench.settle()
    if lost == "epoch":
        bench.store.lose("s1", 2, epoch=3)
    else:
        del bench.store.states["s1"], bench.store.tokens["s1"]
    bench.step(update(session, [4]))
    bench.settle()
    assert bench.leases.repairs == [("s1", 5, 5)]
    bench.step(update(session, [5]))  # the verifier goes on, up to its bound
    bench.settle()
    assert session.acked == 3
    grant(bench, 6)
    start = bench.engine.starts[-1]
    assert (start.epoch, start.attempt, start.committed) == (6, 1, [1, 2, 3])
    bench.settle()
    assert bench.store.tokens["s1"] == [1, 2, 3, 4, 5]
    assert session.acked == 5
    bench.step(update(session, [4, 5, 6], offset=3, finish=STOP))  # it holds the sequence, and tells what it had
    bench.settle()
    assert bench.store.tokens["s1"] == [1, 2, 3, 4, 5, 6]
    piece = reader.take()
    assert piece is not None
    assert (list(piece.tokens), piece.last, session.error) == ([1, 2, 3, 4, 5, 6], True, None)
    assert bench.engine.cancels == []


def test_an_end_that_was_on_its_way_is_appended_again_with_its_tokens() -> None:
    bench = WiredBench()
    session = committed(bench, [1, 2])
    bench.store.lose("s1", 0, epoch=0)
    bench.step(update(session, [3], finish=STOP))
    bench.settle()
    grant(bench, 2)
    bench.settle()
    assert bench.store.tokens["s1"] == [1, 2, 3]
    assert bench.store.end("s1").finish is STOP
    assert (session.done, session.error, bench.table.sessions) == (True, None, {})
    assert len(bench.engine.starts) == 1, "what has ended is not attached again"


def test_a_session_that_is_cancelled_while_it_is_repaired_ends_so() -> None:
    bench = WiredBench()
    session = committed(bench, [1, 2])
    bench.store.lose("s1", 1, epoch=0)
    bench.step(update(session, [3]))
    bench.settle()
    assert bench.table.cancel(session)
    bench.settle()
    grant(bench, 2)
    bench.settle()
    assert bench.store.tokens["s1"] == [1, 2, 3]
    assert bench.store.end("s1").finish is CANCELLED


def test_a_session_that_is_paused_while_it_is_repaired_is_released_under_its_new_epoch() -> None:
    bench = WiredBench()
    session = committed(bench, [1, 2])
    bench.store.lose("s1", 1, epoch=0)
    bench.step(update(session, [3]))
    bench.settle()
    bench.table.pause(session)
    assert bench.leases.released == []
    grant(bench, 2)
    bench.settle()
    assert bench.store.tokens["s1"] == [1, 2, 3]
    assert bench.leases.released == [("s1", 2)]


@pytest.mark.parametrize(
    "refused", [Fenced("s1", 1, 4), SessionDeleted("s1"), SessionExpired("s1"), Unavailable("kvstore", "away")]
)
def test_a_repair_that_is_refused_ends_the_stream_with_what_was_released(refused: HedgerowError) -> None:
    bench = WiredBench()
    session = committed(bench, [1, 2])
    reader = bench.read(session)
    bench.store.lose("s1", 1, epoch=0)
    bench.step(update(session, [3]))
    bench.settle()
    bench.leases.waiting.popleft()(refused)
    piece = reader.take()
    assert piece is not None
    assert (list(piece.tokens), piece.last, session.error) == ([1, 2], True, refused)
    assert bench.table.sessions == {}
    assert bench.engine.cancels == [("s1", 1, 1)]
    assert bench.unrecorded == []


def test_a_grant_for_a_session_that_failed_in_the_meantime_is_given_back() -> None:
    bench = WiredBench()
    session = committed(bench, [1, 2])
    bench.store.lose("s1", 1, epoch=0)
    bench.step(update(session, [3]))
    bench.settle()
    bench.table.store_lost(Unavailable("kvstore", "away"))
    grant(bench, 2)
    assert bench.leases.released == [("s1", 1), ("s1", 2)]
    assert session.done


def test_of_two_gateways_whose_epochs_were_forgotten_one_stays() -> None:
    """The second one's repair finds the first one's epoch, or is granted a higher one: then the first is fenced."""
    store = MemoryStore()
    first, second = Bench(), Bench()
    first.store = second.store = store
    for bench in (first, second):
        bench.table._store = bench.table._repairs._store = store
    store.create(record())
    store.states["s1"] = store.states["s1"]._replace(epoch=5)
    one = first.table.begin(record(), 5, Options())
    first.step(update(one, [1, 2]))
    first.table.appended(store.answer())
    store.lose("s1", 1, epoch=2)
    other = second.table.begin(record(), 3, Options())  # an epoch of before, which nobody remembers
    first.step(update(one, [3]))
    second.step(update(other, [1]))
    first.table.appended(store.answer())
    second.table.appended(store.answer())
    assert (first.leases.repairs, second.leases.repairs) == ([("s1", 5, 5)], [("s1", 3, 3)])
    grant(first, 6)
    second.leases.waiting.popleft()(Fenced("s1", 3, 6))
    first.table.appended(store.answer())
    assert store.tokens["s1"] == [1, 2, 3]
    assert isinstance(other.error, Fenced)
    assert other.error.retry_after
    assert (one.error, second.table.sessions) == (None, {})


def test_a_log_that_another_gateway_made_longer_is_left_to_a_resume() -> None:
    bench = WiredBench()
    session = committed(bench, [1, 2])
    bench.store.lose("s1", 1, epoch=0)
    bench.step(update(session, [3]))
    bench.settle()
    longer = digest.extend(session.first_digest, [1, 2, 3, 4])
    bench.leases.waiting.popleft()(Granted(9, State(9, OWNER, 4, longer)))
    assert isinstance(session.error, Unavailable)
    assert bench.leases.released == [("s1", 9)]


@pytest.mark.parametrize("status", [AppendStatus.GAP, AppendStatus.FORGOTTEN])
def test_a_log_with_another_text_is_a_broken_promise(status: AppendStatus) -> None:
    bench = Bench()
    session = bench.begin()
    bench.step(update(session, [1, 2]))
    bench.acknowledge()
    state = State(1, OWNER, 1, b"?" * 16)
    bench.table.appended([Appended("s1", status, state)])
    if status is AppendStatus.FORGOTTEN:
        bench.leases.waiting.popleft()(Granted(2, state._replace(epoch=2)))
    assert isinstance(session.error, InvariantViolation)
    assert bench.unrecorded == [session.record]


def test_a_store_that_forgets_every_append_is_not_served_for_ever() -> None:
    bench = Bench()
    session = bench.begin()
    bench.step(update(session, [1, 2]))
    for _ in range(MAX_REPAIRS + 1):
        assert session.error is None
        bench.table.appended([Appended("s1", AppendStatus.GAP, State(1, OWNER, 0, session.first_digest))])
    assert isinstance(session.error, InvariantViolation)


def test_a_long_log_is_appended_again_in_entries_of_bounded_size() -> None:
    bench = WiredBench()
    tokens = [i % 4096 for i in range(2 * ENTRY_TOKENS + 5)]
    session = committed(bench, tokens)
    bench.store.lose("s1", 3, epoch=0)
    bench.step(update(session, [9]))
    bench.settle()
    grant(bench, 2)
    sizes = []
    while bench.wire.send():
        sizes += [len(entry.tokens) for entry in bench.wire.flying[-1]]
        bench.table.appended(bench.wire.answer())
    assert max(sizes) <= ENTRY_TOKENS
    assert bench.store.tokens["s1"] == [*tokens, 9]
    assert session.acked == len(tokens) + 1


def test_random_losses_leave_a_log_that_equals_what_was_released() -> None:
    """Steps, answers, losses of a suffix, of the epoch and of the record, in random order."""
    repairs = 0
    for seed in range(80):
        draw = random.Random(seed)
        bench = WiredBench()
        session = bench.begin()
        reader = bench.read(session)
        law = [draw.randrange(100) for _ in range(40)]
        got: list[int] = []
        epoch, losses = 1, 0
        while not session.done:
            kind = draw.randrange(7)
            if kind == 0 and session.end is None:
                have = len(session.tokens)
                end = min(len(law), have + draw.randrange(1, 4))
                finish = {"finish": STOP} if end == len(law) else {}
                bench.step(update(session, law[have:end], **finish))
            elif kind == 1:
                bench.wire.send()
            elif kind in (2, 3) and bench.wire.flying:
                bench.table.appended(bench.wire.answer())
            elif kind == 4 and bench.leases.waiting:
                epoch = max(epoch, bench.leases.repairs[-1][2]) + 1
                if "s1" not in bench.store.states:
                    bench.store.create(record())
                epoch = max(epoch, bench.store.states["s1"].epoch + 1)
                bench.store.states["s1"] = bench.store.states["s1"]._replace(epoch=epoch)
                bench.leases.waiting.popleft()(Granted(epoch, bench.store.states["s1"]))
            elif kind == 5 and losses < 6 and "s1" in bench.store.states and not bench.store.states["s1"].finish:
                losses += 1
                length = draw.randrange(bench.store.states["s1"].length + 1)
                if draw.randrange(4) == 0:
                    del bench.store.states["s1"], bench.store.tokens["s1"]
                else:
                    bench.store.lose("s1", length, epoch=max(0, bench.store.states["s1"].epoch - draw.randrange(2)))
            elif kind == 6 and (piece := reader.take()):
                got += piece.tokens
        assert session.error is None, f"seed {seed}: {session.error}"
        while piece := reader.take():
            got += piece.tokens
            if piece.last:
                break
        assert got == law, f"seed {seed}"
        assert bench.store.tokens["s1"] == law, f"seed {seed}"
        repairs += bench.table.counts.repairs
    assert repairs > 80, "the schedules do not test what they should"
