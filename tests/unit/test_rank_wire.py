"""Connections between the hosts of a group: who is let in, and what a stranger in between can do: end them."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from hedgerow.engine.rank_door import Split
from hedgerow.engine.rank_wire import HEAD, HELLO, MOST_BYTES, NONCE, SEAL, Sealed, WireError, admit, knock, write_all
from tests.sockets import Ends, connected

SECRET, NONCES = b"a secret of this test", bytes(range(64))


@pytest.fixture
def ends() -> Iterator[Ends]:
    with connected() as both:
        yield both


def sealed(ends: Ends) -> tuple[Sealed, Sealed]:
    return Sealed(ends[0], SECRET, NONCES, first=True), Sealed(ends[1], SECRET, NONCES, first=False)


def read(wire: Sealed, count: int = 1) -> list[bytes]:
    found: list[bytes] = []
    end = time.monotonic() + 30
    while len(found) < count:
        assert time.monotonic() < end
        found += wire.read()
    return found


def test_messages_come_whole_and_in_order_both_ways(ends: Ends) -> None:
    first, other = sealed(ends)
    given = [b"a", b"", bytes(200_000), b"last"]
    sending = threading.Thread(target=lambda: [first.send(each, 5) for each in given])
    sending.start()
    assert read(other, len(given)) == given
    sending.join()
    other.send(b"back", 1)
    assert read(first) == [b"back"]
    assert other.read() == []


def changed(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def twice(data: bytes) -> bytes:
    return data + data


def left_out(data: bytes) -> bytes:
    return data[HEAD.size + SEAL + 5 :]


def huge(data: bytes) -> bytes:
    return HEAD.pack(MOST_BYTES + 1) + data[HEAD.size :]


@pytest.mark.parametrize("what", [changed, twice, left_out, huge], ids=lambda what: what.__name__)
def test_what_was_changed_repeated_or_left_out_ends_the_connection(what: Callable[[bytes], bytes]) -> None:
    pairs = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    outs = [socket.create_connection(each.getsockname()) for each in pairs]
    ins = [each.accept()[0] for each in pairs]
    try:
        sender = Sealed(outs[0], SECRET, NONCES, first=True)
        for content in (b"first", b"other"):
            sender.send(content, 1)
        between = ins[0].recv(1 << 16)
        outs[1].sendall(what(between))
        receiver = Sealed(ins[1], SECRET, NONCES, first=False)
        with pytest.raises(WireError, match=r"did not seal|the most is"):
            read(receiver, 10)
    finally:
        for each in (*pairs, *outs, *ins):
            each.close()


def test_a_message_sent_back_is_not_taken(ends: Ends) -> None:
    """Each direction has a key of its own."""
    first, _ = sealed(ends)
    first.send(b"x", 1)
    ends[1].setblocking(True)
    ends[1].sendall(ends[1].recv(1 << 16))
    with pytest.raises(WireError, match="did not seal"):
        read(first)


def let_in(ends: Ends, secret: bytes, claim: dict[str, object], patience: float = 5) -> tuple[list[str], list[str]]:
    """Why the first host did not, and why the newcomer did not come in."""
    ours: list[str] = []
    theirs: list[str] = []

    def first() -> None:
        try:
            admit(ends[0], SECRET, Split(4, 2).judge, patience)
        except WireError as error:
            ours.append(str(error))
            ends[0].close()

    thread = threading.Thread(target=first)
    thread.start()
    try:
        knock(ends[1], secret, claim, 5)
    except WireError as error:
        theirs.append(str(error))
    thread.join()
    return ours, theirs


GOOD = {"speaks": 1, "ranks": 4, "hosts": 2, "host": 1, "rank": 3}


def test_who_has_the_secret_is_let_in(ends: Ends) -> None:
    assert let_in(ends, SECRET, dict(GOOD)) == ([], [])


@pytest.mark.parametrize(
    ("claim", "why"),
    [
        ({"rank": 1}, "rank 1 of host 1 is none of this group"),
        ({"host": 0, "rank": 0}, "rank 0 of host 0 is none of this group"),
        ({"host": 2}, "rank 3 of host 2 is none"),
        ({"host": None}, "rank 3 of host None is none"),
        ({"ranks": 8}, "this group has 4 ranks on 2 hosts, not 8 on 2"),
        ({"speaks": 2}, "this host speaks version 1, not 2: one image for all of a group"),
    ],
)
def test_who_is_none_of_the_group_hears_why(ends: Ends, claim: dict[str, object], why: str) -> None:
    (ours,), (theirs,) = let_in(ends, SECRET, GOOD | claim)
    assert ours == theirs
    assert why in theirs


def test_another_secret_is_told_nothing(ends: Ends) -> None:
    ours, theirs = let_in(ends, b"another secret there is", dict(GOOD))
    assert ours == ["it has not the group's secret"]
    assert theirs == ["it broke off before it had proved anything"]


def test_a_first_host_without_the_secret_is_not_believed(ends: Ends) -> None:
    """It can send nonces and a verdict, and not the proof."""
    verdict = b""
    ends[0].sendall(HELLO[False] + bytes(NONCE) + HEAD.pack(len(verdict)) + verdict + bytes(32))
    with pytest.raises(WireError, match="the first host has another secret"):
        knock(ends[1], SECRET, dict(GOOD), 5)


@pytest.mark.parametrize("said", [b"", HELLO[False] + bytes(10)], ids=["nothing", "half"])
def test_who_takes_too_long_is_sent_away(ends: Ends, said: bytes) -> None:
    ends[1].sendall(said)
    began = time.monotonic()
    with pytest.raises(WireError, match=r"timed out|took too long"):
        admit(ends[0], SECRET, Split(4, 2).judge, 0.3)
    assert time.monotonic() - began < 10


def test_nobody_waits_long_for_one_that_does_not_read(ends: Ends) -> None:
    first, _ = sealed(ends)
    with pytest.raises(WireError, match="is not read"):
        first.send(bytes(32 << 20), 0.3)


def test_a_closed_pipe_is_said() -> None:
    one, other = socket.socketpair()
    other.close()
    with one, pytest.raises(WireError, match="Broken pipe"):
        write_all(one, b"x", 1)
