"""Appends to a store that cannot take them for a while: in order, each once, and never given up early."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence

import pytest

from hedgerow import digest
from hedgerow.errors import InvariantViolation, Unavailable
from services.gateway.messages import (
    ENTRY_VIEW,
    Append,
    Appended,
    AppendStatus,
    End,
    Note,
    State,
    StepStats,
    Timings,
    Update,
    Usage,
)
from services.gateway.outbox import ENTRY_TOKENS, LAST_RETRY, MESSAGE_BYTES, MESSAGE_ENTRIES, Outbox
from services.gateway.session import Session
from services.gateway.store_peer import IN_FLIGHT
from services.gateway.types import Finish
from tests.unit.gateway_peers import LENGTH, Bench, Clock, MemoryStore, record, update

PATIENCE = 10.0
AWAY = AppendStatus.UNAVAILABLE


class Wire:
    """An outbox in front of a MemoryStore; the test says what each message meets."""

    def __init__(self, clock: Clock) -> None:
        self.store, self.clock, self.outbox = MemoryStore(), clock, Outbox(PATIENCE, clock)
        self.flying: deque[list[Append]] = deque()

    def create(self, new: object) -> int:
        return self.store.create(new)  # type: ignore[arg-type]

    def append(self, entries: Sequence[Append]) -> None:
        self.outbox.add(entries)

    def forget(self, session_id: str) -> None:
        self.outbox.forget(session_id)

    def send(self) -> bool:
        message = self.outbox.take() if len(self.flying) < IN_FLIGHT else []
        if message:
            self.flying.append(message)
        return bool(message)

    def answer(self, *, applied: bool = True, told: bool = True) -> list[Appended]:
        """Of the oldest message: whether the store applied it, and whether it could say so."""
        message = self.flying.popleft()
        results = [self.store._apply(entry) if applied else None for entry in message]
        answers = [
            result if result and told else Appended(entry.session_id, AWAY, State())
            for entry, result in zip(message, results, strict=True)
        ]
        return self.outbox.answered(message, answers)


class WiredBench(Bench):
    def __init__(self) -> None:
        super().__init__()
        self.wire = Wire(self.clock)
        self.store = self.wire.store
        self.table._store = self.table._repairs._store = self.wire

    def settle(self, *, applied: bool = True, told: bool = True) -> None:
        """Send and answer until nothing is on its way."""
        while self.wire.send() or self.wire.flying:
            self.table.appended(self.wire.answer(applied=applied, told=told))

    def later(self, seconds: float = LAST_RETRY) -> None:
        self.clock.now += seconds


def entry(session_id: str, offset: int, tokens: Sequence[int], **more: object) -> Append:
    return Append(session_id, 1, b"b" * 16, offset, tokens, b"", b"", **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("applied", [False, True])
def test_a_store_that_cannot_take_writes_for_a_while_ends_no_stream(applied: bool) -> None:
    """A pause of Redis by more than the store's own patience with it once ended every stream at once."""
    bench = WiredBench()
    sessions = [bench.begin(record(f"s{i}")) for i in range(3)]
    readers = [bench.read(session) for session in sessions]
    for tokens in ([1, 2], [3], [4, 5]):
        bench.step(*[update(session, tokens) for session in sessions])
        bench.settle(applied=applied, told=False)
        assert all(reader.take() is None for reader in readers), "what nobody acknowledged was released"
        bench.later()
    assert len(bench.table.sessions) == 3
    bench.settle()
    for reader in readers:
        piece = reader.take()
        assert piece is not None
        assert (piece.offset, list(piece.tokens)) == (0, [1, 2, 3, 4, 5])
    assert all(bench.store.tokens[session.id] == [1, 2, 3, 4, 5] for session in sessions)
    assert len(bench.wire.outbox) == 0


def test_what_is_sent_again_is_one_entry_of_everything_unanswered_in_order() -> None:
    bench = WiredBench()
    session = bench.begin()
    bench.step(update(session, [1]))
    assert bench.wire.send()
    bench.step(update(session, [2]))
    assert bench.wire.send()
    bench.step(update(session, [3]))
    bench.table.appended(bench.wire.answer(applied=False, told=False))
    assert not bench.wire.send(), "it waits for what is still on its way"
    bench.table.appended(bench.wire.answer())  # a gap, because the entry before it was not applied
    assert bench.table.sessions, "that gap is no loss"
    bench.step(update(session, [4], finish=LENGTH))
    assert not bench.wire.send(), "it waits for the back-off"
    bench.later()
    assert bench.wire.send()
    assert [(e.offset, list(e.tokens)) for e in bench.wire.flying[0]] == [(0, [1, 2, 3, 4])]
    bench.settle()
    assert bench.store.tokens["s1"] == [1, 2, 3, 4]
    assert bench.store.end("s1").finish is LENGTH


def test_a_session_whose_append_fails_does_not_stop_the_others() -> None:
    wire = Wire(Clock())
    wire.append([entry("a", 0, [1]), entry("b", 0, [1])])
    message = wire.outbox.take()
    answers = [Appended("a", AWAY, State()), Appended("b", AppendStatus.OK, State(1, length=1))]
    assert wire.outbox.answered(message, answers) == answers[1:]
    wire.append([entry("a", 1, [2]), entry("b", 1, [2])])
    assert [e.session_id for e in wire.outbox.take()] == ["b"]
    wire.clock.now += LAST_RETRY
    assert [(e.session_id, list(e.tokens)) for e in wire.outbox.take()] == [("a", [1, 2])]


def test_the_patience_counts_from_the_first_failure_and_then_the_stream_ends() -> None:
    bench = WiredBench()
    session = bench.begin()
    reader = bench.read(session)
    bench.step(update(session, [1]))
    bench.settle(applied=False, told=False)
    began, tries = bench.clock.now, 0
    while session.error is None:
        bench.later()
        bench.settle(applied=False, told=False)
        tries += 1
        assert tries < 100
    assert PATIENCE <= bench.clock.now - began <= PATIENCE + LAST_RETRY
    assert isinstance(session.error, Unavailable)
    piece = reader.take()
    assert piece is not None
    assert (list(piece.tokens), piece.last) == ([], True)
    assert (len(bench.wire.outbox), bench.wire.outbox.due()) == (0, None)


def test_a_store_that_was_back_in_between_is_given_all_its_time_again() -> None:
    bench = WiredBench()
    session = bench.begin()
    for i in range(5):
        bench.step(update(session, [i]))
        bench.settle(applied=False, told=False)
        bench.later(PATIENCE - 1)
        bench.settle()
    assert bench.store.tokens["s1"] == list(range(5))
    assert session.error is None


def test_a_store_that_lost_what_it_had_acknowledged_is_given_it_again() -> None:
    bench = WiredBench()
    session = bench.begin()
    bench.step(update(session, [1, 2]))
    bench.settle()
    bench.step(update(session, [3]))
    bench.settle(applied=False, told=False)
    bench.store.lose("s1", 1)
    bench.later()
    bench.settle()
    assert bench.store.tokens["s1"] == [1, 2, 3]
    assert (session.acked, session.error) == (3, None)
    assert (bench.table.counts.repairs, bench.table.counts.repaired_tokens) == (1, 2)
    assert len(bench.wire.outbox) == 0


def test_waits_between_tries_grow_to_a_bound_and_are_not_in_step() -> None:
    wire = Wire(Clock())
    wire.append([entry("a", 0, [1])])
    waits = []
    for _ in range(8):
        assert wire.send()
        wire.answer(applied=False, told=False)
        waits.append(wire.outbox.due() or 0.0)
        assert not wire.send()
        wire.clock.now += waits[-1]
    assert 0 < waits[0] <= 0.05
    assert all(LAST_RETRY / 2 <= wait <= LAST_RETRY for wait in waits[-3:])
    assert len(set(waits)) == len(waits)


def test_a_message_is_bounded_in_bytes_and_entries_and_loses_nothing() -> None:
    """Steps with trees of many sessions, joined while the store was away, could pass the limit of a message."""
    outbox = Outbox(PATIENCE, Clock())
    stats = StepStats(1, 63, 4096, 0, 1, 1, 64, range(4096), range(4096))
    size = Note(1, stats, Timings()).size
    for offset in range(40):
        notes = (Note(offset + 1, stats, Timings()),)
        outbox.add([entry(f"s{i}", offset, [i], notes=notes) for i in range(16)])
    outbox.add([entry(f"t{i}", 0, [i]) for i in range(MESSAGE_ENTRIES + 5)])
    seen: dict[str, int] = {}
    while message := outbox.take():
        assert len(message) <= MESSAGE_ENTRIES
        assert sum(len(e.notes) * size for e in message) <= MESSAGE_BYTES + ENTRY_VIEW
        assert len({e.session_id for e in message}) == len(message)
        for e in message:
            assert len(e.notes) * size <= ENTRY_VIEW
            assert e.offset == seen.get(e.session_id, 0)
            assert [note.end for note in e.notes] == [e.offset + i + 1 for i in range(len(e.notes))]
            seen[e.session_id] = e.offset + len(e.tokens)
    assert seen == {f"s{i}": 40 for i in range(16)} | {f"t{i}": 1 for i in range(MESSAGE_ENTRIES + 5)}
    outbox.add([entry("long", 0, range(ENTRY_TOKENS)), entry("long", ENTRY_TOKENS, [1])])
    assert [len(e.tokens) for e in outbox.take()] == [ENTRY_TOKENS]
    assert [len(e.tokens) for e in outbox.take()] == [1]


def test_answers_about_other_sessions_are_an_invariant_broken() -> None:
    wire = Wire(Clock())
    wire.append([entry("a", 0, [1])])
    with pytest.raises(InvariantViolation):
        wire.outbox.answered(wire.outbox.take(), [Appended("b", AppendStatus.OK, State())])


def test_random_faults_of_the_store_change_no_token_and_lose_no_end() -> None:
    """Steps, sends and answers in random order; any message may be unapplied, or applied without its caller knowing."""
    for seed in range(120):
        draw = random.Random(seed)
        bench = WiredBench()
        sessions: list[Session] = [bench.begin(record(f"s{i}")) for i in range(3)]
        laws = [[draw.randrange(100) for _ in range(30)] for _ in sessions]
        got: list[list[int]] = [[] for _ in sessions]
        readers = [bench.read(session) for session in sessions]
        steps = 0
        while bench.table.sessions:
            steps += 1
            assert steps < 20_000
            kind = draw.randrange(3)
            if kind == 0:
                running = [(s, law) for s, law in zip(sessions, laws, strict=True) if s.end is None]
                bench.step(*[step(draw, session, law) for session, law in running if draw.random() < 0.7])
            elif kind == 1:
                bench.later(0.1 * draw.random())
                bench.wire.send()
            elif bench.wire.flying:
                fault = draw.random()
                bench.table.appended(bench.wire.answer(applied=fault > 0.2, told=fault > 0.4))
            for mine, reader in zip(got, readers, strict=True):
                while (piece := reader.take()) is not None and piece.tokens:
                    assert piece.offset == len(mine)
                    mine += piece.tokens
        assert got == laws
        for session, law in zip(sessions, laws, strict=True):
            assert session.error is None
            assert bench.store.tokens[session.id] == law
            assert bench.store.end(session.id).finish is LENGTH
            assert session.digest == digest.extend(session.first_digest, law)


def step(draw: random.Random, session: Session, law: Sequence[int]) -> Update:
    have = len(session.tokens)
    end = min(len(law), have + 1 + draw.randrange(4))
    return update(session, law[have:end], finish=LENGTH if end == len(law) else Finish.NONE)


def test_an_end_alone_is_sent_again_behind_its_tokens() -> None:
    wire = Wire(Clock())
    wire.append([entry("a", 0, [1])])
    assert wire.send()
    wire.append([entry("a", 1, (), end=End(Finish.CANCELLED, Usage()))])
    assert wire.send()
    for _ in range(2):
        assert wire.answer(applied=False, told=False) == []
    wire.clock.now += LAST_RETRY
    (again,) = wire.outbox.take()
    assert (list(again.tokens), again.end is not None) == ([1], True)
