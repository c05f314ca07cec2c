"""Verifiers that are lost, drain, refuse or come back late: sessions go on elsewhere, with the same tokens."""

from __future__ import annotations

import pytest

from hedgerow.errors import Fenced, HedgerowError, Internal, InvalidRequest, Overloaded, Unavailable
from services.gateway.messages import Appended, AppendStatus, Granted, State
from services.gateway.session import Options, Session
from services.gateway.silence import Silence
from services.gateway.types import Fingerprint
from services.gateway.upkeep import QUIET, STALLED
from services.gateway.verifiers import FIRST_DELAY, LAST_DELAY, MAX_FAULTS, Policy, Work
from tests.unit.gateway_peers import (
    CANCELLED,
    DEADLINE,
    ERROR,
    LENGTH,
    STOP,
    Bench,
    RecordingEngine,
    record,
    update,
)  # fmt: skip

GONE = Unavailable("verifier", "its stream broke")
DRAINS = Unavailable("the verifier", "it is draining")
OTHER = Fingerprint(digest="other")


def two() -> tuple[Bench, RecordingEngine]:
    """A bench with a second verifier of the same fingerprint."""
    standby = RecordingEngine("v2")
    return Bench(others=[standby]), standby


def lose(bench: Bench, engine: RecordingEngine) -> None:
    engine.attached = False
    bench.table.verifier_lost(engine, GONE)


def return_(bench: Bench, engine: RecordingEngine) -> None:
    engine.attached = True
    bench.table.verifier_opened(engine)


def refuse(bench: Bench, session: Session, error: HedgerowError) -> None:
    bench.step(update(session, [], finish=ERROR, error=error, stats=None))


def test_sessions_of_a_lost_verifier_go_on_at_once_where_a_standby_is() -> None:
    bench, standby = two()
    standby.attached = False
    sessions = [bench.begin(record(f"s{i}")) for i in range(3)]
    readers = [bench.read(session) for session in sessions]
    standby.attached = True
    bench.step(*[update(session, [1, 2]) for session in sessions])
    bench.acknowledge()
    bench.step(*[update(session, [3]) for session in sessions])  # not committed when the verifier is lost
    late = [update(session, [4]) for session in sessions]
    lose(bench, bench.engine)
    assert [(s.record.session_id, s.epoch, s.attempt, s.committed) for s in standby.starts] == [
        (f"s{i}", 1, 2, [1, 2]) for i in range(3)
    ]
    assert [s.digest for s in standby.starts] == [session.acked_digest for session in sessions]
    bench.step(*late)  # it was only slow, and wakes up
    assert bench.table.dropped == 3
    bench.acknowledge()
    bench.step(*[update(session, [3, 5], offset=2, finish=LENGTH) for session in sessions])
    bench.acknowledge()
    for session, reader in zip(sessions, readers, strict=True):
        assert bench.store.tokens[session.id] == [1, 2, 3, 5]
        piece = reader.take()
        assert piece is not None
        assert (list(piece.tokens), piece.last, session.error) == ([1, 2, 3, 5], True, None)
    assert bench.table.counts.failed_over == 3


def test_a_session_whose_end_is_on_its_way_to_the_store_is_not_computed_again() -> None:
    bench, standby = two()
    standby.attached = False
    session = bench.begin(record("s"))
    standby.attached = True
    bench.step(update(session, [1, 2], finish=LENGTH))
    lose(bench, bench.engine)
    assert (standby.starts, bench.table.counts.failed_over) == ([], 0)
    bench.acknowledge()
    assert (bench.store.tokens["s"], session.done, bench.table.sessions) == ([1, 2], True, {})


def test_a_session_goes_where_the_fewest_are_and_only_to_its_fingerprint() -> None:
    standby, stranger, unknown = RecordingEngine("v2"), RecordingEngine("v3", OTHER), RecordingEngine("v4")
    unknown.model = None
    bench = Bench(others=[standby, stranger, unknown])
    for i in range(6):
        bench.begin(record(f"s{i}"))
    assert [len(engine.starts) for engine in (bench.engine, standby, stranger, unknown)] == [3, 3, 0, 0]


def test_without_a_standby_sessions_wait_for_the_verifier_to_come_back() -> None:
    bench = Bench()
    session = bench.begin()
    bench.step(update(session, [1]))
    bench.acknowledge()
    lose(bench, bench.engine)
    bench.later(60)
    assert (len(bench.engine.starts), session.end, bench.verifiers.waiting) == (1, None, 1)
    return_(bench, bench.engine)
    assert [(s.attempt, s.committed) for s in bench.engine.starts] == [(1, []), (2, [1])]
    bench.step(update(session, [2], finish=STOP))
    bench.acknowledge()
    assert bench.store.tokens["s1"] == [1, 2]
    assert bench.verifiers.waiting == 0
    assert (bench.table.counts.recovered, bench.table.counts.recovery_seconds) == (1, 60)


def test_a_session_that_waits_too_long_is_released_and_can_be_resumed() -> None:
    bench = Bench(policy=Policy(patience=120))
    session = bench.begin()
    reader = bench.read(session)
    bench.step(update(session, [1]))
    bench.acknowledge()
    lose(bench, bench.engine)
    bench.later(119)
    assert not session.done
    bench.later(2)
    piece = reader.take()
    assert piece is not None
    assert (list(piece.tokens), piece.last) == ([1], True)
    assert isinstance(session.error, Unavailable)
    assert session.error.retry_after
    assert bench.leases.released == [("s1", 1)]
    assert not bench.store.end("s1").finish
    assert bench.table.sessions == {}
    assert (bench.verifiers.waiting, bench.table.counts.given_up) == (0, 1)


def test_a_long_life_with_many_restarts_ends_no_session() -> None:
    """Attempts were counted over a session's whole life: the eighth restart of a verifier ended it."""
    bench = Bench()
    session = bench.begin()
    for token in range(50):
        bench.step(update(session, [token]))
        bench.acknowledge()
        lose(bench, bench.engine)
        return_(bench, bench.engine)
    assert session.end is None
    assert (session.attempt, bench.store.tokens["s1"]) == (51, list(range(50)))


def test_a_verifier_that_breaks_again_and_again_without_a_token_is_tried_more_and_more_slowly() -> None:
    bench = Bench()
    session = bench.begin()
    bench.step(update(session, [1]))
    bench.acknowledge()
    for _ in range(1000):
        lose(bench, bench.engine)
        return_(bench, bench.engine)
        bench.later(0.1)
    assert session.end is None
    assert len(bench.engine.starts) < 1000 * 0.1 / (LAST_DELAY / 2) + 20


def test_a_draining_verifier_keeps_its_sessions_and_gets_no_new_ones() -> None:
    bench, standby = two()
    standby.attached = False
    old = bench.begin(record("old"))
    standby.attached, bench.engine.draining = True, True
    new = [bench.begin(record(f"new{i}")) for i in range(2)]
    assert [s.record.session_id for s in standby.starts] == [session.id for session in new]
    bench.step(update(old, [1], finish=STOP))
    bench.acknowledge()
    assert bench.store.end("old").finish is STOP
    assert bench.engine.cancels == []


def test_a_start_that_is_refused_by_a_draining_verifier_goes_to_another() -> None:
    bench, standby = two()
    session = bench.begin()
    refuse(bench, session, DRAINS)
    assert [(s.record.session_id, s.attempt) for s in standby.starts] == [("s1", 2)]
    assert session.end is None
    assert bench.store.messages == 0


def test_a_start_that_the_only_verifier_refuses_waits_longer_each_time() -> None:
    bench = Bench()
    session = bench.begin()
    times = []
    for _ in range(9):
        before = len(bench.engine.starts)
        refuse(bench, session, DRAINS)
        began = bench.clock.now
        while len(bench.engine.starts) == before:
            bench.later(0.01)
        times.append(bench.clock.now - began)
    assert times[0] == 0.0
    assert times[1] == pytest.approx(FIRST_DELAY * 0.75, abs=0.02)
    assert times[-1] == pytest.approx(LAST_DELAY * 0.75, abs=0.02)
    assert times == sorted(times)


def test_a_new_session_that_every_queue_refuses_ends_with_the_hint() -> None:
    bench, standby = two()
    session = bench.begin()
    full = Overloaded("the waiting queue", 9, 9, 0.25)
    refuse(bench, session, full)
    assert len(standby.starts) == 1, "the other one may have a place"
    refuse(bench, session, full)
    bench.acknowledge()
    assert session.error is full
    assert bench.store.end("s1").finish is ERROR


def test_a_session_with_tokens_waits_for_a_place_in_a_queue() -> None:
    bench = Bench()
    session = bench.begin()
    bench.step(update(session, [1]))
    bench.acknowledge()
    for _ in range(12):
        refuse(bench, session, Overloaded("the waiting queue", 9, 9, 0.25))
        bench.later(LAST_DELAY)
    assert session.end is None
    bench.step(update(session, [2], finish=STOP))
    bench.acknowledge()
    assert bench.store.tokens["s1"] == [1, 2]


def test_a_session_on_which_every_verifier_fails_ends_with_that_fault() -> None:
    bench, standby = two()
    session = bench.begin()
    fault = Internal("a step failed")
    for _ in range(MAX_FAULTS):
        refuse(bench, session, fault)
        bench.later(LAST_DELAY)
    assert len(bench.engine.starts) + len(standby.starts) == MAX_FAULTS
    assert standby.starts
    assert bench.engine.starts
    bench.acknowledge()
    assert session.error is fault
    assert bench.store.end("s1").finish is ERROR


def test_a_start_that_is_invalid_is_not_tried_elsewhere() -> None:
    bench, standby = two()
    session = bench.begin()
    wrong = InvalidRequest("prompt", 1, "0")
    refuse(bench, session, wrong)
    bench.acknowledge()
    assert session.error is wrong
    assert standby.starts == []


def test_a_verifier_that_was_left_is_told_so() -> None:
    """It may hold the sequence: a gap, or a fault of one step."""
    bench, standby = two()
    session = bench.begin()
    bench.step(update(session, [9], offset=4))
    assert len(standby.starts) == 1
    assert bench.engine.cancels == [("s1", 1, 2)]


def test_a_session_without_a_verifier_of_its_fingerprint_waits_by_default() -> None:
    bench = Bench(others=[RecordingEngine("v2", OTHER)], policy=Policy(patience=100))
    session = bench.begin()
    lose(bench, bench.engine)
    bench.later(99)
    assert (session.end, session.best_effort_from, bench.verifiers.waiting) == (None, None, 1)


def test_where_the_operator_wants_it_a_session_goes_on_elsewhere_marked_from_that_offset() -> None:
    stranger = RecordingEngine("v2", OTHER)
    bench = Bench(others=[stranger], policy=Policy(patience=100, best_effort_after=30))
    session = bench.begin()
    bench.step(update(session, [1]))
    bench.acknowledge()
    bench.step(update(session, [2]))
    lose(bench, bench.engine)
    bench.later(29)
    assert stranger.starts == []
    bench.later(2)
    assert [(s.attempt, s.committed, s.digest) for s in stranger.starts] == [(2, [1, 2], session.digest)]
    bench.step(update(session, [7]))
    assert bench.store.sent[-1][0].best_effort_from == 2
    bench.step(update(session, [8, 9], offset=2))  # it started again, and chose otherwise: what is known stays
    assert (session.end, len(stranger.starts)) == (None, 2)
    bench.step(update(session, [8], finish=STOP))
    for _ in range(3):
        bench.acknowledge()
    assert bench.store.tokens["s1"] == [1, 2, 7, 8]
    assert bench.table.counts.best_effort == 1


def test_a_deadline_passes_while_a_session_waits_for_a_verifier() -> None:
    bench = Bench()
    session = bench.begin(options=Options(deadline=bench.clock.now + 5))
    lose(bench, bench.engine)
    bench.later(4.9)
    assert session.end is None
    bench.later(0.1)
    bench.acknowledge()
    assert bench.store.end("s1").finish is DEADLINE
    assert bench.verifiers.waiting == 0


def test_a_deadline_is_the_verifiers_first_and_the_gateways_a_little_later() -> None:
    bench = Bench()
    session = bench.begin(options=Options(deadline=bench.clock.now + 5))
    assert bench.engine.starts[0].deadline_ms == 5000
    bench.later(5.1)
    assert session.end is None
    bench.step(update(session, [1], finish=DEADLINE))
    other = bench.begin(record("s2"), Options(deadline=bench.clock.now + 5))
    bench.later(5.3)
    bench.acknowledge()
    bench.acknowledge()
    assert (bench.store.end("s1").finish, bench.store.end("s2").finish) == (DEADLINE, DEADLINE)
    assert bench.engine.cancels == [("s2", 1, 1)]
    assert other.done


def test_an_end_that_the_store_does_not_take_is_counted_as_late_once() -> None:
    bench = Bench()
    session = bench.begin(options=Options(deadline=bench.clock.now + 5))
    bench.read(session)
    bench.later(5.5)
    assert (session.end is not None, bench.table.counts.late) == (True, 0)
    bench.later(1)
    bench.later(1)
    assert bench.table.counts.late == 1


def test_a_cancel_reaches_a_session_that_waits_for_a_verifier() -> None:
    bench = Bench()
    session = bench.begin()
    reader = bench.read(session)
    lose(bench, bench.engine)
    bench.table.leave(reader)
    bench.acknowledge()
    assert bench.store.end("s1").finish is CANCELLED
    return_(bench, bench.engine)
    assert len(bench.engine.starts) == 1
    assert session.done


def test_a_verifier_that_has_seen_a_higher_epoch_makes_the_owner_take_one_above_it() -> None:
    bench = Bench()
    session = bench.begin()
    bench.step(update(session, [1]))
    bench.acknowledge()
    refuse(bench, session, Fenced("s1", 1, 6))
    assert bench.leases.repairs == [("s1", 1, 6)]
    assert session.end is None
    bench.store.states["s1"] = bench.store.states["s1"]._replace(epoch=7)
    bench.leases.waiting.popleft()(Granted(7, bench.store.states["s1"]))
    assert [(s.epoch, s.attempt, s.committed) for s in bench.engine.starts] == [(1, 1, []), (7, 1, [1])]
    bench.step(update(session, [2], finish=STOP))
    bench.acknowledge()
    assert bench.store.tokens["s1"] == [1, 2]


def test_a_gateway_that_was_fenced_does_not_take_its_session_back() -> None:
    bench = Bench()
    session = bench.begin()
    refuse(bench, session, Fenced("s1", 1, 6))
    bench.leases.waiting.popleft()(Fenced("s1", 1, 6))
    assert isinstance(session.error, Fenced)
    assert bench.table.sessions == {}
    assert (bench.leases.released, bench.table.counts.fenced) == ([], 1)


def test_what_a_verifier_should_be_doing() -> None:
    bench = Bench()
    assert bench.table.verifier_work(bench.engine) == Work(False, False)
    session = bench.begin()
    assert bench.table.verifier_work(bench.engine) == Work(True, False), "it may wait in a queue"
    bench.step(update(session, [1]))
    assert bench.table.verifier_work(bench.engine) == Work(False, False), "it may be held: the store has not answered"
    bench.acknowledge()
    assert bench.table.verifier_work(bench.engine) == Work(True, True)
    bench.step(update(session, [2], finish=STOP))
    assert bench.table.verifier_work(bench.engine) == Work(False, False)


def test_a_verifier_with_nothing_to_say_is_not_lost() -> None:
    silence = Silence(3.0)
    silence.opened(0.0)
    for second in range(100):
        assert silence.is_lost(float(second), Work(False, False)) is None
    assert silence.is_lost(101.9, Work(True, True)) is None
    assert silence.is_lost(102.1, Work(True, True)) is not None


def test_a_verifier_that_answers_but_makes_no_step_is_lost_later() -> None:
    silence = Silence(3.0)
    silence.opened(0.0)
    lost = [second for second in range(30) if _answered(silence, float(second), 7, Work(True, True))]
    assert lost[0] == 6
    silence.opened(100.0)
    assert not any(_answered(silence, 100.0 + second, 7, Work(True, False)) for second in range(30))
    silence.opened(200.0)
    assert not any(_answered(silence, 200.0 + second, second, Work(True, True)) for second in range(30))


def _answered(silence: Silence, now: float, steps: int, work: Work) -> bool:
    silence.answered(now, steps)
    return silence.is_lost(now, work) is not None


def test_a_session_whose_store_and_verifier_are_away_waits_for_both() -> None:
    bench = Bench()
    session = bench.begin()
    bench.step(update(session, [1]))
    lose(bench, bench.engine)
    bench.later(30)
    return_(bench, bench.engine)
    assert [(s.attempt, s.committed) for s in bench.engine.starts] == [(1, []), (2, [])]
    bench.step(update(session, [1, 2], offset=0, finish=STOP))
    bench.acknowledge()
    bench.acknowledge()
    assert bench.store.tokens["s1"] == [1, 2]
    bench.table.appended([Appended("s1", AppendStatus.OK, State())])  # nobody's any more


def test_a_session_that_its_verifier_no_longer_speaks_of_is_checked_and_asked_for() -> None:
    """A gateway that was paused beyond its lease does not know that another one attached the session there."""
    bench = Bench()
    session = bench.begin()
    bench.step(update(session, [1]))
    bench.acknowledge()
    bench.later(QUIET - 1)
    assert bench.store.messages == 1
    bench.later(1)
    assert bench.store.messages == 2
    bench.acknowledge()
    bench.later(1)
    assert (bench.store.messages, len(bench.engine.starts)) == (2, 1)
    bench.later(STALLED * QUIET)
    assert [(s.attempt, s.committed) for s in bench.engine.starts] == [(1, []), (2, [1])]
    bench.store.states["s1"] = bench.store.states["s1"]._replace(epoch=2)
    bench.step(update(session, [2]))
    bench.later(QUIET)
    bench.acknowledge()
    assert isinstance(session.error, Fenced)


def test_a_session_that_waits_in_a_queue_is_not_doubted() -> None:
    bench = Bench()
    bench.begin()
    bench.later(1000)
    assert (bench.store.messages, len(bench.engine.starts)) == (0, 1)
