"""Connections between the hosts of one group: both ends prove that they have its secret, and every message is sealed.

    both: HELLO, with or without TLS; then, over TLS where that is what both said
    first host -> newcomer:  nonce
    newcomer -> first host:  nonce, claim, proof               proof = HMAC(secret, what it is for, both nonces, text)
    first host -> newcomer:  a verdict and its proof

After that a message is its length, the first 16 bytes of HMAC-SHA256(key of the direction, number of the message,
content), and the content. A stranger can neither join nor change, repeat or leave out a message: the connection ends.
Whoever can listen on the network reads token ids, unless TLS is beneath (`rank_tls.py`). Which of both it is decides
this host's configuration alone, so no stranger can talk it out of TLS.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import selectors
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

from hedgerow.engine.rank_tls import Cipher, explained

HELLO = (b"hedgerow ranks 2 bare", b"hedgerow ranks 2 TLS ")  # by whether it is over TLS
NONCE, PROOF, SEAL = 32, 32, 16  # bytes
HEAD, NUMBER = struct.Struct("=I"), struct.Struct("=Q")
MOST_TEXT = 4096  # bytes of a claim or a verdict
MOST_BYTES = 65 << 20  # of a message
CHUNK = 1 << 16
LEAST_SECRET = 16  # characters

Claim = dict[str, Any]


class WireError(ConnectionError):
    """The connection is of no use: it was broken off, or what came is not the group's. The text says which."""


class Sealed:
    """One end of a connection that both sides have proved. `send` from any thread, `read` from one."""

    def __init__(
        self,
        connection: socket.socket,
        secret: bytes,
        nonces: bytes,
        first: bool,
        cipher: Cipher | None = None,
        came: bytes = b"",
    ) -> None:
        keys = [hmac.digest(secret, b"messages of the " + who + nonces, "sha256") for who in (b"first", b"other")]
        self._out, self._in = keys if first else reversed(keys)
        self._socket, self._turn = connection, threading.Lock()
        self._sent = self._received = 0
        self._cipher, self._rest = cipher, bytearray(came)
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def here(self) -> str:
        """This end's address, which the other one reached or was reached from."""
        return str(self._socket.getsockname()[0])

    def send(self, content: bytes, patience: float) -> None:
        """Raises WireError where it is broken, or takes longer than `patience` seconds."""
        with self._turn:
            seal = hmac.digest(self._out, NUMBER.pack(self._sent) + content, "sha256")[:SEAL]
            self._sent += 1
            data = HEAD.pack(len(content)) + seal + content
            write_all(self._socket, data if self._cipher is None else _tls(self._cipher.encrypt, data), patience)

    def beat(self, content: bytes) -> None:
        """As `send`, unless somebody is sending: that is a sign of life, too."""
        if not self._turn.locked():
            self.send(content, 1.0)

    def read(self) -> list[bytes]:
        """The messages that are there whole by now. Raises WireError at the end, and where one is not sealed."""
        try:
            data = self._socket.recv(CHUNK)
        except BlockingIOError:
            data = b""
        except OSError as error:
            raise WireError(str(error.strerror)) from None
        else:
            if not data:
                raise WireError("the connection was closed")
        self._rest += data if self._cipher is None else _tls(self._cipher.decrypt, data)
        return list(iter(self._next, None))

    def end(self) -> None:
        """Both ends see it; whoever reads here still may."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def _next(self) -> bytes | None:
        if len(self._rest) < HEAD.size + SEAL:
            return None
        (length,) = HEAD.unpack_from(self._rest)
        if length > MOST_BYTES:
            raise WireError(f"a message of {length} bytes, the most is {MOST_BYTES}")
        end = HEAD.size + SEAL + length
        if len(self._rest) < end:
            return None
        seal, content = bytes(self._rest[HEAD.size : HEAD.size + SEAL]), bytes(self._rest[HEAD.size + SEAL : end])
        if not hmac.compare_digest(seal, hmac.digest(self._in, NUMBER.pack(self._received) + content, "sha256")[:SEAL]):
            raise WireError("a message that the group's secret did not seal")
        self._received += 1
        del self._rest[:end]
        return content


def write_all(to: socket.socket | int, data: bytes, patience: float) -> None:
    """To a socket or a pipe that does not block. Raises WireError where nobody reads for `patience` seconds."""
    end, left = time.monotonic() + patience, memoryview(data)
    with selectors.DefaultSelector() as ready:
        ready.register(to, selectors.EVENT_WRITE)
        while left:
            if not ready.select(max(0.0, end - time.monotonic())):
                raise WireError("what it is told is not read")
            try:
                left = left[os.write(to if isinstance(to, int) else to.fileno(), left) :]
            except BlockingIOError:
                continue
            except OSError as error:
                raise WireError(str(error.strerror)) from None


def knock(
    connection: socket.socket, secret: bytes, claim: Claim, patience: float, cipher: Cipher | None = None
) -> Sealed:
    """Asks the first host in. Raises WireError with its verdict, or where it has not the secret."""
    with _within(connection, patience, cipher) as wire:
        wire.greet()
        theirs, mine, text = wire.take(NONCE), os.urandom(NONCE), json.dumps(claim).encode()
        nonces = theirs + mine
        wire.give(mine + HEAD.pack(len(text)) + text + _proof(secret, b"claim", nonces, text))
        verdict = wire.take_text()
        if not hmac.compare_digest(wire.take(PROOF), _proof(secret, b"verdict", nonces, verdict)):
            raise WireError("the first host has another secret")
        if verdict:
            raise WireError(verdict.decode())
    return Sealed(connection, secret, nonces, False, cipher, wire.came)


def admit(
    connection: socket.socket,
    secret: bytes,
    judge: Callable[[Claim], str],
    patience: float,
    cipher: Cipher | None = None,
) -> tuple[Sealed, Claim]:
    """Lets a newcomer in. Raises WireError where it has not the secret, or `judge` finds fault with its claim."""
    with _within(connection, patience, cipher) as wire:
        wire.greet()
        mine = os.urandom(NONCE)
        wire.give(mine)
        nonces, text = mine + wire.take(NONCE), wire.take_text()
        if not hmac.compare_digest(wire.take(PROOF), _proof(secret, b"claim", nonces, text)):
            raise WireError("it has not the group's secret")
        claim: Claim = json.loads(text)
        verdict = judge(claim)
        said = verdict.encode()
        wire.give(HEAD.pack(len(said)) + said + _proof(secret, b"verdict", nonces, said))
        if verdict:
            raise WireError(verdict)
    return Sealed(connection, secret, nonces, True, cipher, wire.came), claim


def _proof(secret: bytes, what: bytes, nonces: bytes, text: bytes) -> bytes:
    return hmac.digest(secret, what + nonces + hashlib.sha256(text).digest(), "sha256")


def _tls(what: Callable[[bytes], bytes], data: bytes) -> bytes:
    try:
        return what(data)
    except ssl.SSLError as error:
        raise WireError(explained(error)) from None


class _within:
    """A connection whose first words must be said by then. `came`: what came after them."""

    def __init__(self, connection: socket.socket, patience: float, cipher: Cipher | None) -> None:
        self._socket, self._end, self._cipher = connection, time.monotonic() + patience, cipher
        self.came = b""

    def __enter__(self) -> _within:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError) and not isinstance(error, WireError):
            raise WireError(str(error.strerror or error)) from None

    def greet(self) -> None:
        """Both say whether they speak over TLS, and do where both do. Raises WireError where they differ."""
        mine, others = HELLO[self._cipher is not None], HELLO[self._cipher is None]
        self._send(mine)
        theirs = b""
        while len(theirs) < len(mine):
            theirs += self._receive(len(mine) - len(theirs))
        if theirs == others:
            way, set_ = ("over", "there and not here") if self._cipher is None else ("without", "here and not there")
            raise WireError(f"it speaks {way} TLS: HEDGEROW_TLS_CERT is set {set_}")
        if theirs != mine:
            raise WireError("it does not speak as a rank does")
        if self._cipher is not None:
            self._shake(self._cipher)

    def give(self, data: bytes) -> None:
        self._send(data if self._cipher is None else _tls(self._cipher.encrypt, data))

    def take(self, size: int) -> bytes:
        while len(self.came) < size:
            if self._cipher is None:
                self.came += self._receive(size - len(self.came))
            else:
                self.came += _tls(self._cipher.decrypt, self._receive(CHUNK))
        found, self.came = self.came[:size], self.came[size:]
        return found

    def take_text(self) -> bytes:
        (length,) = HEAD.unpack(self.take(HEAD.size))
        if length > MOST_TEXT:
            raise WireError(f"a text of {length} bytes, the most is {MOST_TEXT}")
        return self.take(length)

    def _shake(self, cipher: Cipher) -> None:
        data, how = cipher.shake(b"")
        while True:
            if data:
                self._send(data)
            if how is not None:
                break
            data, how = cipher.shake(self._receive(CHUNK))
        if how:
            raise WireError(how)

    def _send(self, data: bytes) -> None:
        self._socket.settimeout(self._left())
        self._socket.sendall(data)

    def _receive(self, most: int) -> bytes:
        self._socket.settimeout(self._left())
        data = self._socket.recv(most)
        if not data:
            raise WireError("it broke off before it had proved anything")
        return data

    def _left(self) -> float:
        left = self._end - time.monotonic()
        if left <= 0:
            raise WireError("it took too long to prove anything")
        return left
