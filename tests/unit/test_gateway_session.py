"""A session between verifier, store and readers: what is released, when, and how it ends."""

from __future__ import annotations

import hashlib
import random
import struct

import pytest

from hedgerow import digest
from hedgerow.errors import Fenced, InvariantViolation, Overloaded, SessionDeleted, Unavailable
from services.gateway.messages import Appended, AppendStatus, State, Usage
from services.gateway.reader import PIECE_TOKENS
from services.gateway.session import Options, Session
from services.gateway.types import Finish
from services.gateway.upkeep import QUIET, STALLED
from services.gateway.verifiers import LAST_DELAY, MAX_FAULTS
from tests.unit.gateway_peers import (
    CANCELLED,
    DEADLINE,
    ERROR,
    LENGTH,
    STOP,
    Bench,
    record,
    stats,
    update,
)  # fmt: skip


def test_the_digest_chain_has_known_answers() -> None:
    d0 = hashlib.sha256(b"ab12" + struct.pack("<3I", 1, 2, 163839)).digest()[:16]
    d1 = hashlib.sha256(d0 + struct.pack("<I", 70000)).digest()[:16]
    assert digest.first("ab12", (1, 2, 163839)) == d0
    assert digest.extend(d0, [70000]) == d1
    assert digest.extend(d0, [70000, 9]) == digest.extend(d1, [9]), "borders of chunks do not matter"
    assert digest.first("ab12", (1, 2, 163839)).hex() == "db96ec7f4db2cd0104450cdfbcb5e9cc"  # by sha256sum(1)


def test_nothing_is_released_before_the_store_has_it() -> None:
    bench = Bench()
    session = bench.begin()
    reader = bench.read(session)
    bench.step(update(session, [1, 2]))
    bench.step(update(session, [3]))
    assert reader.take() is None
    assert bench.engine.offsets == {}
    bench.acknowledge()
    piece = reader.take()
    assert piece is not None
    assert (list(piece.tokens), piece.offset, piece.last) == ([1, 2], 0, False)
    assert piece.digest == digest.extend(session.first_digest, [1, 2])
    assert bench.engine.offsets == {"s1": 2}
    assert reader.take() is None
    bench.acknowledge()
    piece = reader.take()
    assert piece is not None
    assert (list(piece.tokens), piece.offset) == ([3], 2)


def test_a_step_of_many_sessions_is_one_message_to_the_store() -> None:
    bench = Bench()
    sessions = [bench.begin(record(f"s{i}")) for i in range(32)]
    bench.step(*[update(session, [i, i]) for i, session in enumerate(sessions)])
    assert bench.store.messages == 1
    bench.acknowledge()
    assert bench.engine.offsets == {f"s{i}": 2 for i in range(32)}


def test_a_finish_travels_with_the_last_tokens_and_ends_the_stream_once() -> None:
    bench = Bench()
    session = bench.begin()
    reader = bench.read(session)
    usage = Usage(3, 2, 0, 1, 4, 1)
    bench.step(update(session, [1, 2], finish=STOP, matched_stop="x", usage=usage))
    assert bench.store.messages == 1
    assert reader.take() is None, "an end is released as tokens are: committed"
    bench.acknowledge()
    piece = reader.take()
    assert piece is not None
    assert (list(piece.tokens), piece.last) == ([1, 2], True)
    assert (session.end, session.done) == ((STOP, usage, "x", None), True)
    assert bench.table.sessions == {}
    assert bench.store.end("s1").finish is STOP
    bench.table.leave(reader)
    assert bench.engine.cancels == []
    bench.step(update(session, [9]))
    assert bench.table.dropped == 1


def test_updates_of_another_attempt_or_epoch_are_dropped() -> None:
    bench = Bench()
    session = bench.begin()
    for epoch, attempt in ((1, 0), (0, 1), (1, 2), (2, 1)):
        bench.step(update(session, [1])._replace(epoch=epoch, attempt=attempt))
    bench.step(update(session, [1])._replace(session_id="other"))
    assert bench.store.messages == 0
    assert bench.table.dropped == 5


def test_an_update_behind_is_compared_and_only_the_rest_is_new() -> None:
    bench = Bench()
    session = bench.begin()
    bench.step(update(session, [1, 2, 3]))
    bench.step(update(session, [2, 3, 4, 5], offset=1))
    bench.step(update(session, [1, 2], offset=0))
    assert bench.store.messages == 2, "a repetition without news is not sent"
    bench.acknowledge()
    bench.acknowledge()
    assert bench.store.tokens["s1"] == [1, 2, 3, 4, 5]


def test_a_changed_token_ends_the_session_loudly() -> None:
    bench = Bench()
    session = bench.begin()
    reader = bench.read(session)
    bench.step(update(session, [1, 2, 3]))
    bench.step(update(session, [2, 9], offset=1))
    bench.acknowledge()
    bench.acknowledge()
    piece = reader.take()
    assert piece is not None
    assert (list(piece.tokens), piece.last) == ([1, 2, 3], True)
    assert isinstance(session.error, InvariantViolation)
    assert bench.store.end("s1").finish is ERROR
    assert bench.engine.cancels == [("s1", 1, 1)]


def test_a_gap_is_never_applied_but_attached_again_at_our_offset() -> None:
    bench = Bench()
    session = bench.begin()
    bench.step(update(session, [1, 2]))
    bench.step(update(session, [4], offset=3))
    assert [(s.attempt, s.committed, s.digest) for s in bench.engine.starts] == [
        (1, [], session.first_digest),
        (2, [], session.first_digest),  # what is not committed is generated again, and compared
    ]
    bench.step(update(session, [1, 2, 3, 4], offset=0))
    bench.acknowledge()
    bench.acknowledge()
    assert bench.store.tokens["s1"] == [1, 2, 3, 4]


def test_gaps_without_end_end_the_session() -> None:
    bench = Bench()
    session = bench.begin()
    for _ in range(MAX_FAULTS):
        bench.step(update(session, [4], offset=3))
        bench.later(LAST_DELAY)
    assert len(bench.engine.starts) == MAX_FAULTS
    bench.acknowledge()
    assert isinstance(session.error, InvariantViolation)
    assert bench.table.sessions == {}


def test_an_answer_covers_all_that_the_store_has_but_no_end_that_it_has_not() -> None:
    """Appends are joined while the store is behind, and repeated after its stream broke: answers tell lengths."""
    bench = Bench()
    session = bench.begin()
    bench.step(update(session, [1, 2]))
    bench.step(update(session, [3]))
    bench.table.cancel(session)
    bench.table.appended([Appended("s1", AppendStatus.OK, State(1, length=3))])
    assert (session.acked, session.done) == (3, False)
    assert session.acked_digest == digest.extend(session.first_digest, [1, 2, 3])
    bench.table.appended([Appended("s1", AppendStatus.OK, State(1, length=3))])
    assert not session.done
    bench.table.appended([Appended("s1", AppendStatus.OK, State(1, length=3, finish=CANCELLED))])
    assert session.done
    assert bench.table.sessions == {}


def test_joined_appends_are_one_append() -> None:
    bench = Bench()
    session = bench.begin()
    bench.step(update(session, [1, 2]))
    bench.step(update(session, [3], finish=STOP))
    (first,), (second,) = bench.store.sent
    bench.store.sent.clear()
    bench.store.append([first.joined(second)])
    bench.acknowledge()
    assert bench.store.tokens["s1"] == [1, 2, 3]
    assert session.done
    assert bench.engine.offsets == {"s1": 3}


def test_a_reader_that_leaves_cancels_its_session_and_the_store_has_it() -> None:
    bench = Bench()
    session = bench.begin()
    reader = bench.read(session)
    bench.step(update(session, [1, 2]))
    bench.table.leave(reader)
    bench.step(update(session, [3]))  # on its way when the cancel was
    assert bench.engine.cancels == [("s1", 1, 1)]
    bench.acknowledge()
    bench.acknowledge()
    state = bench.store.end("s1")
    assert (state.finish, state.length) == (CANCELLED, 2)
    assert state.usage == Usage(3, 2, 0, 1, 4, 1)
    assert bench.table.sessions == {}


def test_a_reader_that_leaves_after_its_deadline_ends_the_session_by_it() -> None:
    bench = Bench()
    session = bench.begin(options=Options(deadline=bench.clock.now + 0.5))
    assert bench.engine.starts[0].deadline_ms == 500
    bench.clock.now += 1
    bench.table.leave(bench.read(session))
    bench.acknowledge()
    assert bench.store.end("s1").finish is DEADLINE


def test_of_two_readers_the_last_to_leave_cancels() -> None:
    bench = Bench()
    session = bench.begin()
    first, second = bench.read(session), bench.read(session)
    bench.step(update(session, [1]))
    bench.acknowledge()
    bench.table.leave(first)
    assert bench.engine.cancels == []
    piece = second.take()
    assert piece is not None
    assert list(piece.tokens) == [1]
    bench.table.leave(second)
    assert bench.engine.cancels == [("s1", 1, 1)]


def test_a_cancel_is_once_and_its_stream_ends_as_cancelled() -> None:
    bench = Bench()
    session = bench.begin()
    reader = bench.read(session)
    assert bench.table.cancel(session)
    assert not bench.table.cancel(session)
    assert reader.take() is None, "the end is not committed yet"
    bench.acknowledge()
    piece = reader.take()
    assert piece is not None
    assert piece.last
    assert session.end is not None
    assert (session.end.reason, session.error) == (CANCELLED, None)
    assert bench.store.messages == 1


def test_a_cancel_mark_in_an_answer_ends_the_session() -> None:
    bench = Bench()
    session = bench.begin()
    bench.store.marked.add("s1")
    bench.step(update(session, [1]))
    bench.acknowledge()
    bench.acknowledge()
    assert bench.store.end("s1").finish is CANCELLED
    assert bench.engine.cancels == [("s1", 1, 1)]


def test_a_finish_wins_over_a_cancel_that_comes_later() -> None:
    """A late or double abort after completion wedged an engine elsewhere: one terminal transition wins."""
    bench = Bench()
    session = bench.begin()
    bench.step(update(session, [1], finish=LENGTH))
    assert not bench.table.cancel(session)
    bench.acknowledge()
    assert bench.store.end("s1").finish is LENGTH
    assert bench.engine.cancels == []


@pytest.mark.parametrize(
    ("status", "there", "error"),
    [
        (AppendStatus.FENCED, State(epoch=7, length=1), Fenced),
        (AppendStatus.GONE, State(), SessionDeleted),
        (AppendStatus.GONE, State(epoch=1), Fenced),  # another one of its id, in which a resume goes on
        (AppendStatus.CONFLICT, State(epoch=7, length=1), InvariantViolation),
        (AppendStatus.DIGEST_MISMATCH, State(epoch=7, length=1), InvariantViolation),
        (AppendStatus.UNAVAILABLE, State(epoch=7, length=1), Unavailable),
    ],
)
def test_a_refused_append_ends_the_stream_and_drops_the_session(
    status: AppendStatus, there: State, error: type[Exception]
) -> None:
    bench = Bench()
    session = bench.begin()
    reader = bench.read(session)
    bench.step(update(session, [1]))
    bench.step(update(session, [2]))
    bench.acknowledge()
    bench.table.appended([Appended("s1", status, there)])
    piece = reader.take()
    assert piece is not None
    assert (list(piece.tokens), piece.last) == ([1], True)
    assert type(session.error) is error
    assert bench.table.sessions == {}
    assert bench.engine.cancels == [("s1", 1, 1)]
    bench.table.leave(reader)
    assert bench.store.messages == 2, "a session that is fenced writes nothing more"


def test_an_end_that_the_store_knows_already_is_the_end() -> None:
    bench = Bench()
    session = bench.begin()
    reader = bench.read(session)
    bench.step(update(session, [1]))
    state = State(1, b"", 0, session.first_digest, CANCELLED, Usage(3))
    bench.table.appended([Appended("s1", AppendStatus.FINISHED, state)])
    piece = reader.take()
    assert piece is not None
    assert (list(piece.tokens), piece.last, session.error) == ([], True, None)
    assert session.end is not None
    assert session.end.reason is CANCELLED


def test_a_start_that_the_verifier_refuses_ends_with_its_error_and_hint() -> None:
    bench = Bench()
    session = bench.begin()
    reader = bench.read(session)
    full = Overloaded("waiting queue", 256, 256, 0.25)
    bench.step(update(session, [], finish=ERROR, error=full, stats=None))
    bench.acknowledge()
    piece = reader.take()
    assert piece is not None
    assert (list(piece.tokens), piece.last, session.error) == ([], True, full)
    assert bench.store.end("s1").finish is ERROR
    assert bench.store.end("s1").usage == Usage(3)


def test_usage_over_several_attempts_is_what_this_gateway_counted() -> None:
    bench = Bench()
    session = bench.begin()
    bench.step(update(session, [1, 2], cached_prompt_tokens=1))
    bench.step(update(session, [9], offset=5))  # a gap: attached again
    last = update(session, [1, 2, 3], offset=0, cached_prompt_tokens=2)  # what it had the second time saved nothing
    bench.step(last._replace(finish=LENGTH, usage=Usage(3, 1, 2, 1, 4, 0)))
    bench.acknowledge()
    bench.acknowledge()
    assert bench.store.end("s1").usage == Usage(3, 3, 1, 2, 8, 3)


def test_a_lost_store_ends_all_streams_and_leaves_the_sessions_to_a_resume() -> None:
    bench = Bench()
    session = bench.begin()
    reader = bench.read(session)
    bench.step(update(session, [1]))
    bench.table.store_lost(Unavailable("kvstore", "away"))
    piece = reader.take()
    assert piece is not None
    assert (list(piece.tokens), piece.last) == ([], True)
    assert bench.table.sessions == {}
    bench.acknowledge()  # an answer that comes all the same is nobody's
    assert session.acked == 0


def test_a_slow_reader_holds_its_sequence_and_gets_everything_in_one_piece() -> None:
    bench = Bench(lag=10)
    session = bench.begin()
    reader = bench.read(session)
    for i in range(8):
        bench.step(update(session, [i] * 4))
        bench.acknowledge()
    assert bench.engine.offsets == {"s1": 10}, "the verifier runs into its own bound on uncommitted tokens"
    piece = reader.take()
    assert piece is not None
    assert list(piece.tokens) == [i for i in range(8) for _ in range(4)]
    assert bench.engine.offsets == {"s1": 32}
    assert session.held_since is None


def test_a_reader_that_never_reads_ends_its_session() -> None:
    bench = Bench(lag=1, patience=5)
    session = bench.begin()
    reader = bench.read(session)
    bench.step(update(session, [1, 2, 3]))
    bench.acknowledge()
    bench.clock.now += 4
    bench.table.sweep()
    assert session.end is None
    bench.clock.now += 2
    bench.table.sweep()
    bench.acknowledge()
    assert isinstance(session.error, Overloaded)
    assert bench.store.end("s1").finish is ERROR
    piece = reader.take()
    assert piece is not None
    assert (list(piece.tokens), piece.last) == ([1, 2, 3], True)


def test_a_held_session_whose_reader_left_does_not_break_the_sweep() -> None:
    """Its end was on its way to a store that was slow, and the most that any of no readers had read was asked for."""
    bench = Bench(lag=1, patience=5)
    session = bench.begin()
    reader = bench.read(session)
    bench.step(update(session, [1, 2, 3]))
    bench.acknowledge()
    bench.table.leave(reader)
    bench.clock.now += 6
    bench.table.sweep()
    bench.acknowledge()
    assert bench.store.end("s1").finish is CANCELLED
    assert bench.table.sessions == {}


def test_a_session_is_not_held_for_a_slow_reader_that_has_left() -> None:
    """Its client may come back for what it left to itself, and finds no end by then."""
    bench = Bench(lag=1, patience=5)
    session = bench.begin()
    reader = bench.read(session)
    bench.step(update(session, [1, 2, 3]))
    bench.acknowledge()
    assert bench.engine.offsets == {"s1": 1}
    bench.later(4)
    bench.table.leave(reader, detach=True)
    assert bench.engine.offsets == {"s1": 3}
    bench.later(2)
    assert (session.end, session.held_since) == (None, None)


def test_a_session_that_is_being_paused_is_asked_of_no_verifier_again() -> None:
    """The store is away while it has an append of nothing on its way."""
    bench = Bench()
    session = bench.begin()
    bench.step(update(session, [1]))
    bench.acknowledge()
    bench.later(QUIET)
    assert not session.settled
    bench.table.pause(session)
    starts = len(bench.engine.starts)
    bench.later(STALLED * QUIET)
    bench.acknowledge()
    assert len(bench.engine.starts) == starts
    assert (bench.table.sessions, bench.verifiers.is_placed(session)) == ({}, False)


def test_a_late_reader_is_given_a_long_log_in_pieces_with_true_digests() -> None:
    bench = Bench(lag=1 << 20)
    session = bench.begin()
    tokens = list(range(PIECE_TOKENS + 10))
    bench.step(update(session, tokens))
    bench.acknowledge()
    reader = bench.read(session)
    first, second = reader.take(), reader.take()
    assert first is not None
    assert second is not None
    assert [len(first.tokens), len(second.tokens)] == [PIECE_TOKENS, 10]
    assert first.digest == digest.extend(session.first_digest, tokens[:PIECE_TOKENS])
    assert second.digest == digest.extend(session.first_digest, tokens)


def test_statistics_reach_the_readers_piece_that_has_their_tokens() -> None:
    bench = Bench()
    session = bench.begin(options=Options(return_steps=True))
    reader = bench.read(session)
    for emitted in (2, 3):
        bench.step(update(session, [1] * emitted, stats=stats(emitted)))
    bench.acknowledge()
    piece = reader.take()
    assert piece is not None
    assert [note.stats.emitted for note in piece.notes] == [2]
    bench.acknowledge()
    piece = reader.take()
    assert piece is not None
    assert [note.stats.emitted for note in piece.notes] == [3]


def test_random_schedules_release_exactly_the_log() -> None:
    """Steps, answers and takes in random order; repeated and overlapping updates; two readers."""
    for seed in range(60):
        draw = random.Random(seed)
        bench = Bench(lag=draw.choice([3, 1000]))
        session: Session = bench.begin()
        law = [draw.randrange(100) for _ in range(60)]
        readers, got = [bench.read(session), bench.read(session)], ([], [])
        while not (session.done and all(len(g) == len(law) for g in got)):
            kind = draw.randrange(4)
            if kind == 0 and session.end is None:
                have = len(session.tokens)
                begin, end = draw.randrange(max(0, have - 3), have + 1), min(len(law), have + draw.randrange(5))
                finish = Finish.LENGTH if end == len(law) else Finish.NONE
                bench.step(update(session, law[begin:end], offset=begin, finish=finish))
            elif kind == 1 and bench.store.sent:
                bench.acknowledge()
            elif kind > 1 and (piece := readers[kind - 2].take()):
                assert piece.offset == len(got[kind - 2])
                got[kind - 2].extend(piece.tokens)
                assert piece.digest == digest.extend(session.first_digest, got[kind - 2])
        assert got == (law, law)
        assert bench.store.tokens["s1"] == law
        assert bench.engine.offsets == {"s1": len(law)}
