"""A reader that comes with what it has: its place in the log is found and checked before anything is released."""

from __future__ import annotations

import pytest

from hedgerow import digest
from hedgerow.errors import Fenced, LostSuffix, Unavailable
from services.gateway.messages import Appended, AppendStatus, State
from services.gateway.reader import PIECE_TOKENS, Reader
from services.gateway.session import Options, Session
from tests.unit.gateway_peers import CANCELLED, LENGTH, Bench, record, stats, update

LAW = list(range(100, 160))
WRONG = b"w" * 16


def committed(bench: Bench, tokens: int = 10) -> Session:
    session = bench.begin()
    bench.step(update(session, LAW[:tokens]))
    bench.acknowledge()
    return session


def reader(bench: Bench, session: Session, offset: int, claim: bytes = b"") -> Reader:
    made = Reader(session, bench._wake, lambda session: None, offset, claim)
    session.readers[made] = None
    return made


def at(session: Session, offset: int) -> bytes:
    return digest.extend(session.first_digest, LAW[:offset])


@pytest.mark.parametrize("with_digest", [True, False])
@pytest.mark.parametrize("offset", [0, 1, 9, 10])
def test_what_the_client_has_is_left_out_and_digests_go_on(offset: int, with_digest: bool) -> None:
    bench = Bench()
    session = committed(bench)
    place = reader(bench, session, offset, at(session, offset) if with_digest else b"")
    bench.step(update(session, LAW[10:12], finish=LENGTH))
    bench.acknowledge()
    piece = place.take()
    assert piece is not None
    assert (piece.offset, list(piece.tokens), piece.last) == (offset, LAW[offset:12], True)
    assert piece.digest == at(session, 12)


@pytest.mark.parametrize("offset", [0, 1, 9, 10])
def test_another_digest_is_told_with_both_to_that_client_alone(offset: int) -> None:
    bench = Bench()
    session = committed(bench)
    other = bench.read(session)
    with pytest.raises(LostSuffix) as raised:
        reader(bench, session, offset, WRONG).take()
    assert raised.value.metadata == {
        "token_offset": str(offset), "digest": WRONG.hex(),
        "stored_offset": str(offset), "stored_digest": at(session, offset).hex(),
    }  # fmt: skip
    piece = other.take()
    assert piece is not None
    assert list(piece.tokens) == LAW[:10]
    assert session.end is None


def test_tokens_that_the_store_lost_are_released_from_the_clients_offset_on_once_made_again() -> None:
    bench = Bench()
    session = committed(bench)
    place = reader(bench, session, 20, at(session, 20))
    assert place.take() is None
    bench.step(update(session, LAW[10:19]))
    bench.acknowledge()
    assert place.take() is None
    bench.step(update(session, LAW[19:24]))
    bench.acknowledge()
    piece = place.take()
    assert piece is not None
    assert (piece.offset, list(piece.tokens), piece.digest) == (20, LAW[20:24], at(session, 24))


def test_tokens_made_again_under_another_digest_are_not_released() -> None:
    bench = Bench()
    session = committed(bench)
    place = reader(bench, session, 12, WRONG)
    assert place.take() is None
    bench.step(update(session, LAW[10:14]))
    bench.acknowledge()
    with pytest.raises(LostSuffix, match="of 12 tokens your digest is 7777"):
        place.take()
    assert session.end is None


def test_without_a_digest_nothing_is_waited_for() -> None:
    bench = Bench()
    session = committed(bench)
    with pytest.raises(LostSuffix, match="of 11 tokens your digest is not given, of the log's 10"):
        reader(bench, session, 11).take()


def test_an_end_before_the_clients_offset_is_a_lost_suffix() -> None:
    bench = Bench()
    session = committed(bench)
    place = reader(bench, session, 12, at(session, 12))
    bench.step(update(session, [], finish=LENGTH))
    assert place.take() is None
    bench.acknowledge()
    with pytest.raises(LostSuffix) as raised:
        place.take()
    assert raised.value.metadata["stored_offset"] == "10"


def test_a_session_that_is_lost_before_the_clients_offset_gives_its_error() -> None:
    """It may be there elsewhere: the client tries again."""
    bench = Bench()
    session = committed(bench)
    place = reader(bench, session, 12, at(session, 12))
    bench.step(update(session, LAW[10:11]))
    bench.table.appended([Appended("s1", AppendStatus.FENCED, State(epoch=7, length=10))])
    with pytest.raises(Fenced):
        place.take()


def test_a_long_log_is_gone_through_in_bounded_steps() -> None:
    bench = Bench(lag=1 << 20)
    session = bench.begin()
    tokens = [i % 1000 for i in range(3 * PIECE_TOKENS)]
    bench.step(update(session, tokens))
    bench.acknowledge()
    offset = 2 * PIECE_TOKENS + 5
    place = reader(bench, session, offset, digest.extend(session.first_digest, tokens[:offset]))
    woken = bench.woken
    assert [place.take(), place.take()] == [None, None]
    assert bench.woken == woken + 2, "it is to be called again"
    piece = place.take()
    assert piece is not None
    assert (piece.offset, list(piece.tokens)) == (offset, tokens[offset:])
    assert piece.digest == session.acked_digest


def test_a_reader_moves_to_the_session_as_it_runs_here() -> None:
    """Its new log is shorter than what it had: that is made again, checked and not given twice."""
    bench = Bench()
    followed = committed(bench)
    place = reader(bench, followed, 0)
    piece = place.take()
    assert piece is not None
    session = Session(followed.record, 2)
    session.tokens.extend(LAW[:6])
    session.acked, session.acked_digest = 6, at(session, 6)
    place.move(session, lambda session: None)
    assert (place in followed.readers, place in session.readers) == (False, True)
    assert place.take() is None
    session.tokens.extend(LAW[6:13])
    session.acked, session.acked_digest = 13, at(session, 13)
    piece = place.take()
    assert piece is not None
    assert (piece.offset, list(piece.tokens), piece.digest) == (10, LAW[10:13], at(session, 13))


def test_a_reader_that_waited_for_its_place_moves_with_its_claim() -> None:
    bench = Bench()
    followed = committed(bench)
    place = reader(bench, followed, 12, WRONG)
    assert place.take() is None
    session = Session(followed.record, 2)
    place.move(session, lambda session: None)
    session.tokens.extend(LAW[:12])
    session.acked, session.acked_digest = 12, at(session, 12)
    with pytest.raises(LostSuffix):
        place.take()


def test_statistics_of_tokens_that_the_client_has_are_left_out() -> None:
    bench = Bench()
    session = bench.begin(options=Options(return_steps=True))
    for emitted in (2, 3, 4):
        bench.step(update(session, [1] * emitted, stats=stats(emitted)))
        bench.acknowledge()
    piece = reader(bench, session, 5).take()
    assert piece is not None
    assert [note.stats.emitted for note in piece.notes] == [4]


def test_a_session_that_failed_after_the_clients_offset_gives_what_is_there() -> None:
    bench = Bench()
    session = committed(bench)
    bench.table.store_lost(Unavailable("kvstore", "away"))
    piece = reader(bench, session, 4, at(session, 4)).take()
    assert piece is not None
    assert (list(piece.tokens), piece.last) == (LAW[4:10], True)
    assert isinstance(session.error, Unavailable)


def test_a_client_that_has_everything_gets_the_end() -> None:
    bench = Bench()
    session = bench.begin(record())
    bench.step(update(session, LAW[:3]))
    bench.table.cancel(session)
    bench.acknowledge()
    bench.acknowledge()
    piece = reader(bench, session, 3, at(session, 3)).take()
    assert piece is not None
    assert (list(piece.tokens), piece.last) == ([], True)
    assert session.end is not None
    assert session.end.reason is CANCELLED
