"""The judge of the chaos tests finds what it is there to find, and a wire breaks what it says."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
from collections.abc import Iterator

import pytest

from hedgerow import digest
from tests.chaos.judge import Heard, Transcript, Undisturbed, Verdict, judge
from tests.chaos.wires import Loop, Wire
from tests.polling import eventually

BROKEN = (ConnectionError, BrokenPipeError)
PROMPT, ID = (5, 6), "s"
MUST = Undisturbed([1, 2, 3, 4, 5], "abcdé", "length")


def transcript() -> Transcript:
    """A right one, in three chunks; the text of the second lags."""
    chain = [digest.first(ID, PROMPT)]
    for token in MUST.tokens:
        chain.append(digest.extend(chain[-1], [token]))
    heard = [
        Heard(1.0, 0, 0, (1, 2), "ab", chain[2]),
        Heard(1.5, 2, 2, (3,), "", chain[3]),
        Heard(4.0, 3, 2, (4, 5), "cdé", chain[5]),
    ]
    return Transcript("it", PROMPT, ID, chain[0], heard, ["length"], (5, 6, chain[5]))


def changed(number: int, **fields: object) -> Transcript:
    got = transcript()
    got.heard[number] = dataclasses.replace(got.heard[number], **fields)  # type: ignore[arg-type]
    return got


def without(number: int) -> Transcript:
    got = transcript()
    del got.heard[number]
    return got


def twice(number: int) -> Transcript:
    got = transcript()
    got.heard.insert(number, got.heard[number])
    return got


def ended(*finishes: str) -> Transcript:
    return dataclasses.replace(transcript(), finishes=list(finishes))


def test_a_right_transcript_is_clean() -> None:
    assert judge(transcript(), MUST) == Verdict()
    assert transcript().silence(since=0) == 2.5
    assert transcript().silence(since=2.0) == 2.0
    assert transcript().silence(since=5.0) == 0.0


@pytest.mark.parametrize(
    ("got", "lost", "duplicated", "different", "word"),
    [
        (without(1), 2, 0, 2, "left out"),
        (without(2), 2, 0, 0, "text"),
        (twice(1), 0, 2, 2, "came again"),
        (changed(1, tokens=(9,)), 0, 0, 1, "digest"),
        (changed(1, tokens=(9,), digest=digest.extend(transcript().heard[0].digest, [9])), 0, 0, 1, "digest"),
        (changed(2, text="cdX"), 0, 0, 0, "text"),
        (changed(2, text_offset=3), 0, 0, 0, "text at byte 3 came at byte 2"),
        (changed(0, digest=b"x" * 16), 0, 0, 0, "digest"),
        (ended(), 0, 0, 0, "ended with"),
        (ended("length", "length"), 0, 0, 0, "ended with"),
        (ended("error"), 0, 0, 0, "ended with"),
        (dataclasses.replace(transcript(), exact=False), 0, 0, 0, "best effort"),
        (dataclasses.replace(transcript(), end=(4, 6, b"")), 0, 0, 0, "its end says"),
        (dataclasses.replace(transcript(), error=OSError("gone")), 0, 0, 0, "gave up with OSError"),
        (dataclasses.replace(transcript(), prompt=(7,)), 0, 0, 0, "offset 0"),
    ],
)
def test_every_kind_of_fault_is_found(got: Transcript, lost: int, duplicated: int, different: int, word: str) -> None:
    verdict = judge(got, MUST)
    assert not verdict.clean
    assert (verdict.lost, verdict.duplicated, verdict.different) == (lost, duplicated, different)
    assert any(word in problem for problem in verdict.problems), verdict.problems


class Hop:
    """A wire to a server that sends everything back."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self._opened: list[socket.socket] = []
        self._loop = Loop()
        threading.Thread(target=self._serve, daemon=True).start()
        self.wire = Wire(self._loop, self._target)

    async def _target(self) -> tuple[str, int]:
        return "127.0.0.1", int(self._server.getsockname()[1])

    def connect(self) -> socket.socket:
        """A connection through the wire, whose reads take at most a moment."""
        self._opened.append(socket.create_connection(("127.0.0.1", self.wire.port), timeout=0.3))
        return self._opened[-1]

    def close(self) -> None:
        for connection in self._opened:
            connection.close()
        self.wire.close()
        self._loop.close()
        self._server.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._server.accept()
                threading.Thread(target=self._echo, args=(connection,), daemon=True).start()

    @staticmethod
    def _echo(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            while data := connection.recv(100):
                connection.sendall(data)


@pytest.fixture
def hop() -> Iterator[Hop]:
    made = Hop()
    yield made
    made.close()


def answers(connection: socket.socket) -> bool:
    """False: silence for a moment. Raises OSError where the connection is broken."""
    try:
        connection.sendall(b"x")
        if not connection.recv(1):
            raise ConnectionError
    except TimeoutError:
        return False
    return True


def test_a_wire_passes_on_both_ways_and_the_end_too(hop: Hop) -> None:
    connection = hop.connect()
    connection.sendall(b"hello")
    connection.shutdown(socket.SHUT_WR)
    assert connection.makefile("rb").read() == b"hello"
    eventually(lambda: hop.wire.connections == 0)
    assert hop.wire.passed == 10


def test_a_cut_wire_resets_what_there_is(hop: Hop) -> None:
    connection = hop.connect()
    assert answers(connection)
    hop.wire.cut()
    with pytest.raises(BROKEN):
        answers(connection)
    assert answers(hop.connect())


def test_a_wire_that_refuses_takes_nobody_until_it_heals(hop: Hop) -> None:
    hop.wire.refuse()
    with pytest.raises(BROKEN):
        answers(hop.connect())
    hop.wire.heal()
    assert answers(hop.connect())


def test_a_half_open_connection_is_silent_and_others_pass(hop: Hop) -> None:
    connection = hop.connect()
    assert answers(connection)
    hop.wire.half_open()
    assert not answers(connection)
    assert answers(hop.connect())
    hop.wire.heal()
    with pytest.raises(BROKEN):
        answers(connection)


def test_a_silent_wire_brings_everything_when_it_heals(hop: Hop) -> None:
    connection = hop.connect()
    assert answers(connection)
    hop.wire.silence()
    late = hop.connect()
    assert not answers(connection)
    assert not answers(late)
    hop.wire.heal()
    for each in (connection, late):
        assert each.recv(1) == b"x"
        assert answers(each)


def test_a_wire_is_closed_while_connections_are_open(hop: Hop) -> None:
    assert answers(hop.connect())
    assert hop.wire.connections == 1
