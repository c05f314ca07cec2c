"""What a client asked to see of its tokens: stored with them, and the same for whoever reads them later, elsewhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from services.gateway.endings import Endings
from services.gateway.messages import ENTRY_TOKENS, ENTRY_VIEW, Append, Note, StepStats, Timings, Usage
from services.gateway.session import Options, Session
from tests.polling import soon
from tests.unit.gateway_peers import CANCELLED, LENGTH, Bench, record, stats, update
from tests.unit.shared_store import SharedStore
from tests.unit.test_gateway_outbox import WiredBench
from tests.unit.test_gateway_repair import grant
from tests.unit.test_gateway_resuming import LAW, A, Side, b, comes, store  # noqa: F401  (fixtures)
from tests.unit.test_gateway_takeover import stored

SHOWN = Options(return_steps=True)


def notes(*emitted: int) -> list[Note]:
    """Of steps that emitted so many tokens each, from 0 on."""
    return [Note(sum(emitted[: i + 1]), stats(count), Timings(total_ns=i + 1)) for i, count in enumerate(emitted)]


def ends(appended: Sequence[Append]) -> list[list[int]]:
    return [[note.end for note in entry.notes] for entry in appended]


def test_statistics_go_to_the_store_with_their_tokens_where_they_were_asked_for() -> None:
    bench = Bench()
    for options, expected in ((SHOWN, [2, 5]), (Options(), [])):
        session = bench.begin(record(f"s{len(expected)}"), options)
        bench.step(update(session, [1, 2]))
        bench.step(update(session, [3, 4, 5], finish=LENGTH, usage=Usage(3, 5, 0, 2)))
        sent = [bench.store.sent.popleft()[0] for _ in range(2)]
        assert [end for entry in ends(sent) for end in entry] == expected
        assert [note.stats.emitted for entry in sent for note in entry.notes] == ([2, 3] if expected else [])


def test_what_a_session_has_cost_so_far_goes_with_every_append_but_the_last() -> None:
    bench = Bench()
    session = bench.begin()
    bench.step(update(session, [1, 2]))
    bench.step(update(session, [3]))
    bench.step(update(session, [4], finish=LENGTH))
    sent = [bench.store.sent.popleft()[0] for _ in range(3)]
    assert [entry.spent for entry in sent] == [Usage(3, 2, 0, 1, 4, 1), Usage(3, 3, 0, 2, 8, 1), None]
    joined = sent[0].joined(sent[1])
    assert joined.spent == sent[1].spent
    assert joined.joined(sent[2]).spent is None


def test_a_session_taken_over_counts_what_its_gateways_before_counted() -> None:
    bench = Bench()
    known = stored(bench, [1, 2, 3], epoch=4)
    known = known._replace(state=known.state._replace(usage=Usage(3, 3, 2, 2, 8, 1)))
    session = bench.table.take_over(known, 4, Options())
    bench.step(update(session, [4, 5], finish=LENGTH, usage=Usage(3, 2, 0, 1, 4, 1)))
    bench.acknowledge()
    assert bench.store.end("s1").usage == Usage(3, 5, 2, 3, 12, 2)


def test_a_session_taken_over_shows_the_steps_before_and_after() -> None:
    bench = Bench()
    known = stored(bench, [1, 2, 3], epoch=4)._replace(notes=notes(1, 2))
    session = bench.table.take_over(known, 4, SHOWN)
    for offset, expected in ((0, [1, 3]), (1, [3]), (2, [3]), (3, [])):
        piece = bench.table.read(session, lambda: None, offset).take()
        assert [note.end for note in (piece.notes if piece else ())] == expected
    reader = bench.read(session)
    bench.step(update(session, [4, 5]))
    bench.acknowledge()
    piece = reader.take()
    assert piece is not None
    assert [note.end for note in piece.notes] == [1, 3, 5]
    assert len(known.notes) == 2, "another reader's copy has not grown"


def test_what_is_appended_again_has_its_statistics_and_its_cost() -> None:
    bench = WiredBench()
    session = bench.begin(options=SHOWN)
    for emitted in (2, 3, 1):
        bench.step(update(session, [1] * emitted))
        bench.settle()
    for offset, expected in ((0, [2, 5, 6]), (2, [5, 6]), (3, [5, 6]), (5, [6])):
        (entry,) = session.again(offset)
        assert ends([entry]) == [expected]
        assert (entry.offset, len(entry.tokens), entry.spent) == (offset, 6 - offset, session.usage(6))
    assert session.again(6) == []


def test_long_statistics_are_appended_again_in_entries_of_bounded_size() -> None:
    bench = WiredBench()
    session = bench.begin(options=SHOWN)
    large = StepStats(1, 63, 1000, 0, 2, 1, 64, range(1000), range(1000))
    for i in range(200):
        bench.step(update(session, [i, i], stats=large))
        bench.settle()
    bench.step(update(session, [7] * (ENTRY_TOKENS + 3), stats=large))
    bench.settle()
    bench.store.lose("s1", 1, epoch=0)
    bench.step(update(session, [9, 9], stats=large))
    bench.settle()
    grant(bench, 2)
    sent: list[Append] = []
    while bench.wire.send():
        sent += bench.wire.flying[-1]
        bench.table.appended(bench.wire.answer())
    assert all(sum(note.size for note in entry.notes) <= ENTRY_VIEW for entry in sent)
    assert all(len(entry.tokens) <= ENTRY_TOKENS for entry in sent)
    assert [end for entry in ends(sent) for end in entry] == [note.end for note in session.notes]
    for entry in sent:
        assert all(entry.offset < note.end <= entry.offset + len(entry.tokens) for note in entry.notes)
    assert session.acked == len(session.tokens) == len(bench.store.tokens["s1"]) == 400 + ENTRY_TOKENS + 5


def shown(session: Session) -> list[int]:
    return [note.end for note in session.notes]


async def test_statistics_of_an_ended_session_come_from_its_log(store: SharedStore, b: Side) -> None:  # noqa: F811
    store.put(record(), A, LAW[:10], finish=LENGTH).notes = notes(4, 6)
    piece = b.read(await b.find()).take()
    assert piece is not None
    assert [(note.end, note.stats.emitted, note.timings.total_ns) for note in piece.notes] == [(4, 4, 1), (10, 6, 2)]


async def test_statistics_are_followed_and_taken_over(store: SharedStore, b: Side) -> None:  # noqa: F811
    kept = store.put(dataclasses.replace(record(), return_steps=True), A, LAW[:4])
    store.alive.add(A)
    kept.notes = notes(4, 3, 2)
    session = await b.find()
    reader = b.read(session)
    await comes(reader, LAW[:4])
    kept.grow(LAW[4:7])
    await comes(reader, LAW[4:7])
    assert shown(reader.session) == [4, 7]
    kept.grow(LAW[7:9])
    store.alive.remove(A)
    await comes(reader, LAW[7:9])
    await soon(lambda: b.table.sessions)
    assert shown(b.table.sessions["s1"]) == [4, 7, 9]


async def test_a_cancelled_session_without_a_gateway_is_billed_for_all_its_steps(store: SharedStore) -> None:  # noqa: F811
    spent = Usage(3, 4, 0, 2, 8, 3)
    kept = store.put(record(), A, LAW[:5], usage=spent)
    await Endings(store.of(b"c" * 16), 4).cancelled("s1")
    assert (kept.state.finish, kept.state.usage) == (CANCELLED, spent._replace(completion_tokens=5))
