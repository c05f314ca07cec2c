"""TLS between the hosts of a group: who is refused on either side and told why, and what is to be seen in between."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from hedgerow.certificates import Tls, client_context, server_context
from hedgerow.engine.rank_door import Split
from hedgerow.engine.rank_tls import Cipher
from hedgerow.engine.rank_wire import HELLO, Sealed, WireError, admit, knock
from hedgerow.rpc.config import ConfigError
from hedgerow.rpc.tls import TlsConfig, mutual_contexts
from tests.certificates import Authority, Files, copied, put
from tests.sockets import Ends, connected

SECRET = b"a secret of this test"
CLAIM = {"speaks": 1, "ranks": 4, "hosts": 2, "host": 1, "rank": 3}
PROMPT = b"the tokens of a prompt" * 3


class Some(NamedTuple):
    """Certificates: good ones, one of each kind that is not, and those of another authority."""

    good: Files
    expired: Files
    elsewhere: Files
    stranger: Files


@pytest.fixture(scope="module")
def some(tmp_path_factory: pytest.TempPathFactory) -> Some:
    ours, other = (Authority(tmp_path_factory.mktemp(name)) for name in ("ours", "other"))
    return Some(
        ours.issue("good"), ours.issue("expired", days=-1), ours.issue("elsewhere", hosts="DNS:elsewhere"),
        other.issue("stranger"),
    )  # fmt: skip


@pytest.fixture
def ends() -> Iterator[Ends]:
    with connected() as both:
        yield both


def tls(files: Files) -> Tls:
    return Tls(files.ca, files.cert, files.key)


def server(files: Files) -> Cipher:
    return Cipher(server_context(tls(files)), None)


def client(files: Files) -> Cipher:
    return Cipher(client_context(tls(files)), "127.0.0.1")


def without(files: Files) -> Cipher:
    """It calls, and shows nothing."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(files.ca)
    return Cipher(context, "127.0.0.1")


class Met(NamedTuple):
    """Both ends, or why each has none."""

    first: Sealed | str
    newcomer: Sealed | str


def meet(ends: Ends, first: Cipher | None, newcomer: Cipher | None, patience: float = 5) -> Met:
    ours: list[Sealed | str] = []

    def let_in() -> None:
        try:
            ours.append(admit(ends[0], SECRET, Split(4, 2).judge, patience, first)[0])
        except WireError as error:
            ours.append(str(error))
            ends[0].close()

    thread = threading.Thread(target=let_in)
    thread.start()
    theirs: Sealed | str
    try:
        theirs = knock(ends[1], SECRET, dict(CLAIM), patience, newcomer)
    except WireError as error:
        theirs = str(error)
        ends[1].close()
    thread.join()
    return Met(ours[0], theirs)


def read(wire: Sealed, count: int) -> list[bytes]:
    found: list[bytes] = []
    end = time.monotonic() + 30
    while len(found) < count:
        assert time.monotonic() < end
        found += wire.read()
    return found


def test_messages_come_whole_both_ways_at_once(some: Some, ends: Ends) -> None:
    """Each end is read by one thread and written by another, as a group does."""
    first, newcomer = meet(ends, server(some.good), client(some.good))
    assert isinstance(first, Sealed), first
    assert isinstance(newcomer, Sealed), newcomer
    given = [b"a", b"", bytes(200_000), *[bytes([n]) * 1000 * n for n in range(60)], b"last"]
    sending = [threading.Thread(target=lambda to=to: [to.send(each, 30) for each in given]) for to in (first, newcomer)]
    found: list[list[bytes]] = []
    reading = threading.Thread(target=lambda: found.append(read(first, len(given))))
    for thread in (*sending, reading):
        thread.start()
    assert read(newcomer, len(given)) == given
    for thread in (*sending, reading):
        thread.join()
    assert found == [given]


@pytest.mark.parametrize("over_tls", [True, False])
def test_what_is_said_can_be_read_in_between_only_without_tls(some: Some, over_tls: bool) -> None:
    """The whole of it, claim and verdict included, as somebody on the way sees it."""
    listening = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    here, far = (socket.create_connection(each.getsockname()) for each in listening)
    near, there = (each.accept()[0] for each in listening)
    seen = bytearray()

    def pass_on(source: socket.socket, to: socket.socket) -> None:
        while data := source.recv(1 << 16):
            seen.extend(data)
            to.sendall(data)

    between = [threading.Thread(target=pass_on, args=pair, daemon=True) for pair in ((near, far), (far, near))]
    for thread in between:
        thread.start()
    first, newcomer = meet(
        (there, here), server(some.good) if over_tls else None, client(some.good) if over_tls else None
    )
    assert isinstance(first, Sealed), first
    assert isinstance(newcomer, Sealed), newcomer
    first.send(PROMPT, 5)
    assert read(newcomer, 1) == [PROMPT]
    assert (PROMPT in seen) is not over_tls
    assert (b'"ranks"' in seen) is not over_tls
    newcomer.end()
    first.end()
    for thread in between:
        thread.join(5)
    for each in (*listening, here, far, near, there):
        each.close()


def test_a_message_right_behind_the_verdict_is_not_lost(some: Some, ends: Ends) -> None:
    first, newcomer = server(some.good), client(some.good)
    begun = threading.Event()

    def let_in() -> None:
        wire, _ = admit(ends[0], SECRET, Split(4, 2).judge, 5, first)
        wire.send(PROMPT, 5)
        begun.set()

    thread = threading.Thread(target=let_in)
    thread.start()

    class Late(socket.socket):
        """Reads nothing of what follows the claim, its fourth word after HELLO and two of TLS, before all is there."""

        said = 0

        def sendall(self, data: Any, flags: int = 0) -> None:
            self.said += 1
            super().sendall(data, flags)

        def recv(self, size: int, flags: int = 0) -> bytes:
            if self.said == 4:
                assert begun.wait(30)
            return super().recv(size, flags)

    late = Late(fileno=ends[1].detach())
    with late:
        wire = knock(late, SECRET, dict(CLAIM), 5, newcomer)
        assert late.said == 4
        assert read(wire, 1) == [PROMPT]
    thread.join()


def test_one_end_without_tls_is_told_the_setting(some: Some, ends: Ends) -> None:
    assert meet(ends, server(some.good), None) == (
        "it speaks without TLS: HEDGEROW_TLS_CERT is set here and not there",
        "it speaks over TLS: HEDGEROW_TLS_CERT is set there and not here",
    )


def test_the_other_end_without_tls_is_told_the_setting(some: Some, ends: Ends) -> None:
    assert meet(ends, None, client(some.good)) == (
        "it speaks over TLS: HEDGEROW_TLS_CERT is set there and not here",
        "it speaks without TLS: HEDGEROW_TLS_CERT is set here and not there",
    )


REFUSED, REFUSES = (
    "the other end's certificate is refused: ",
    "the other end refuses the certificate that it is shown: ",
)


@pytest.mark.parametrize(
    ("first", "newcomer", "ours", "theirs"),
    [
        ("good", "expired", REFUSED + "certificate has expired", REFUSES + "certificate expired"),
        ("expired", "good", REFUSES + "certificate expired", REFUSED + "certificate has expired"),
        ("good", "stranger", REFUSES + "unknown ca", REFUSED),
        ("elsewhere", "good", REFUSES + "bad certificate", REFUSED + "IP address mismatch"),
    ],
)
def test_a_certificate_that_does_not_fit_is_refused_and_said(
    some: Some, ends: Ends, first: str, newcomer: str, ours: str, theirs: str
) -> None:
    met = meet(ends, server(getattr(some, first)), client(getattr(some, newcomer)))
    assert str(met.first).startswith(ours)
    assert str(met.newcomer).startswith(theirs)


def test_a_newcomer_of_another_authority_is_refused_and_said(some: Some, ends: Ends) -> None:
    """It believes the first host's, and shows one that the first host does not know."""
    mixed = Files(some.stranger.cert, some.stranger.key, some.good.ca)
    met = meet(ends, server(some.good), client(mixed))
    assert str(met.first).startswith(REFUSED)
    assert str(met.newcomer).startswith(REFUSES + "unknown ca")


def test_a_newcomer_that_shows_nothing_is_refused(some: Some, ends: Ends) -> None:
    met = meet(ends, server(some.good), without(some.good))
    assert met.first == "TLS fails: peer did not return a certificate"
    assert met.newcomer == REFUSES + "certificate required"


def test_noise_in_the_handshake_ends_it(some: Some, ends: Ends) -> None:
    ends[1].sendall(HELLO[True] + b"GET / HTTP/1.1\r\n\r\n")
    with pytest.raises(WireError, match="TLS fails"):
        admit(ends[0], SECRET, Split(4, 2).judge, 5, server(some.good))


@pytest.mark.parametrize("called", [True, False])
def test_nobody_waits_long_for_a_handshake(some: Some, ends: Ends, called: bool) -> None:
    ends[1].sendall(HELLO[True])
    began = time.monotonic()
    meeting: Callable[[], object] = (
        (lambda: admit(ends[0], SECRET, Split(4, 2).judge, 0.3, server(some.good)))
        if called
        else (lambda: knock(ends[0], SECRET, dict(CLAIM), 0.3, client(some.good)))
    )
    with pytest.raises(WireError, match=r"timed out|took too long"):
        meeting()
    assert time.monotonic() - began < 10


def test_what_was_changed_on_the_way_ends_the_connection(some: Some, ends: Ends) -> None:
    first, newcomer = meet(ends, server(some.good), client(some.good))
    assert isinstance(first, Sealed), first
    assert isinstance(newcomer, Sealed), newcomer
    newcomer.read()  # what TLS itself says after the handshake
    ends[0].setblocking(True)
    ends[0].sendall(b"\x17\x03\x03\x00\x20" + bytes(32))
    with pytest.raises(WireError, match="TLS fails"):
        read(newcomer, 1)


def test_new_certificates_count_for_the_next_connection(
    some: Some, ends: Ends, tmp_path_factory: pytest.TempPathFactory
) -> None:
    files = copied(some.good, tmp_path_factory.mktemp("files"))
    config = TlsConfig(tls_cert=files.cert, tls_key=files.key, tls_ca=files.ca)
    called, calls = mutual_contexts(config, True), mutual_contexts(config, False)
    assert called is not None
    assert calls is not None
    before = called()
    assert called() is before
    put(some.stranger, files)
    after = called()
    assert after is not before
    assert meet(ends, Cipher(after, None), client(some.stranger)).first.__class__ is Sealed
    files.key.write_text("no key")
    assert called() is after, "what does not fit is not taken"
    assert calls().minimum_version == after.minimum_version == ssl.TLSVersion.TLSv1_3


def test_without_an_authority_it_is_refused_at_the_start(some: Some) -> None:
    config = TlsConfig(tls_cert=some.good.cert, tls_key=some.good.key, tls_client_certs=False)
    for called in (True, False):
        with pytest.raises(ConfigError, match=r"HEDGEROW_TLS_CA: nothing is not allowed.*HEDGEROW_TLS_CERT"):
            mutual_contexts(config, called)
    assert mutual_contexts(TlsConfig(), True) is None
