"""Certificates on disk: read, checked in words that name the file, and read again when they change.

No grpc here: the services (`hedgerow.rpc.tls`) and the SDK make credentials of what is read.
"""

from __future__ import annotations

import base64
import contextlib
import os
import re
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from hedgerow import watched
from hedgerow.errors import HedgerowError, InvalidRequest

TRIES = 3  # to read files of which none changes meanwhile
_BLOCK = re.compile(rb"-----BEGIN CERTIFICATE-----(.+?)-----END CERTIFICATE-----", re.DOTALL)
_UTC_TIME, _VERSION = 0x17, 0xA0  # tags of ASN.1


@dataclass(frozen=True)
class Tls:
    """PEM files of one side of a TLS connection.

    `ca`: the authorities whose certificates this side believes; None: those that gRPC ships. `cert`, `key`: what this
    side shows, and its private key, which has no passphrase; both or neither. The files are read again when they
    change: connections made from then on use the new ones, and those that are open go on.
    """

    ca: str | os.PathLike[str] | None = None
    cert: str | os.PathLike[str] | None = None
    key: str | os.PathLike[str] | None = None


class Pem(NamedTuple):
    """What the files hold; `expires` is when the own certificate does, in Unix seconds."""

    ca: bytes | None
    cert: bytes | None
    key: bytes | None
    expires: float | None


class Hint(NamedTuple):
    """What a failed connection means: the field of Tls that it is about, and a sentence."""

    field: str
    text: str


_HINTS = (
    (r"certificate has expired", Hint("ca", "the peer's certificate has expired")),
    (r"certificate is not yet valid", Hint("ca", "the peer's certificate is not valid yet")),
    (r"CERTIFICATE_VERIFY_FAILED", Hint("ca", "the peer's certificate is of no authority that is known here")),
    (r"Hostname Verification Check failed", Hint("ca", "the peer's certificate is not for its address")),
    (r"WRONG_VERSION_NUMBER", Hint("ca", "the peer speaks no TLS, or there is something between")),
    (
        r"failed to connect.*(?:Socket closed|Connection reset|Broken pipe)",
        Hint("cert", "the peer broke off the handshake: it may want TLS, or another certificate"),
    ),
)  # fmt: skip


def hint(text: str) -> Hint | None:
    """What gRPC's words for a connection that was not made mean, where it is TLS that failed."""
    return next((meaning for pattern, meaning in _HINTS if re.search(pattern, text)), None)


def read(tls: Tls) -> Pem:
    """The files. Raises InvalidRequest with the field of Tls, the file, and what is wrong with it."""
    if (tls.cert is None) != (tls.key is None):
        missing, other = ("key", "cert") if tls.key is None else ("cert", "key")
        raise InvalidRequest(missing, None, f"a file, because {other} is given")
    for _ in range(TRIES):
        pem = _read(tls)
        if _read(tls) == pem:
            return pem
    raise InvalidRequest("cert", str(tls.cert or tls.ca), "a file that does not change while it is read")


class Watched(watched.Watched[Pem]):
    """The files of one Tls. `complain` is told why changed ones are not taken. Raises InvalidRequest as `read` does."""

    def __init__(
        self,
        tls: Tls,
        complain: Callable[[InvalidRequest], None] = lambda why: None,
        taken: Callable[[bool], None] = lambda changed: None,
    ) -> None:
        def told(why: HedgerowError) -> None:
            assert isinstance(why, InvalidRequest)
            complain(why)

        self.tls = tls
        super().__init__((tls.ca, tls.cert, tls.key), lambda: read(tls), told, taken)


def contexts(files: Watched, make: Callable[[Tls], ssl.SSLContext]) -> Callable[[], ssl.SSLContext]:
    """Gives what `make` makes of the files of the moment; where they cannot be read just then, of those before."""
    held = files.current()[0], make(files.tls)

    def newest() -> ssl.SSLContext:
        nonlocal held
        version, _ = files.current()
        if version != held[0]:
            with contextlib.suppress(OSError):  # they changed once more, right now
                held = version, make(files.tls)
        return held[1]

    return newest


def server_context(tls: Tls, client_certs: bool = True) -> ssl.SSLContext:
    """Of who is called. `client_certs`: callers show a certificate of `tls.ca`. Raises OSError."""
    assert tls.cert is not None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tls.cert, tls.key)
    if client_certs:
        assert tls.ca is not None
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(os.fspath(tls.ca))
    return context


def client_context(tls: Tls) -> ssl.SSLContext:
    """Of who calls, and shows a certificate. The other end's must be for its name. Raises OSError."""
    assert tls.cert is not None
    assert tls.ca is not None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_cert_chain(tls.cert, tls.key)
    context.load_verify_locations(os.fspath(tls.ca))
    return context


def _read(tls: Tls) -> Pem:
    ca, cert, key = (_bytes(field, getattr(tls, field)) for field in ("ca", "cert", "key"))
    if ca is not None and not [end for _, end in _validity("ca", tls.ca, ca) if end > time.time()]:
        raise _refuse("ca", tls.ca, "at least one certificate that has not expired")
    expires = None
    if cert is not None and tls.cert is not None and tls.key is not None and key is not None:
        begins, expires = _validity("cert", tls.cert, cert)[0]
        if not begins <= time.time() < expires:
            when = f"it is valid from {_date(begins)} to {_date(expires)}"
            raise _refuse("cert", tls.cert, f"a certificate that is valid now: {when}")
        _check_pair(tls.cert, tls.key, key)
    return Pem(ca, cert, key, expires)


def _bytes(field: str, path: str | os.PathLike[str] | None) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError, TypeError) as error:
        why = getattr(error, "strerror", None) or error
        raise _refuse(field, path, f"a file that can be read: {why}") from None


def _check_pair(cert: str | os.PathLike[str], key: str | os.PathLike[str], pem: bytes) -> None:
    if b"ENCRYPTED" in pem:
        raise _refuse("key", key, "a private key without a passphrase")
    if b"PRIVATE KEY-----" not in pem:
        raise _refuse("key", key, "a private key in PEM")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise _refuse("key", key, f"the key of the certificate in {os.fspath(cert)}") from None
        raise _refuse("key", key, f"a key that fits {os.fspath(cert)}: {error.reason or error}") from None
    except OSError as error:
        raise _refuse("key", key, f"a file that can be read: {error.strerror}") from None


def _validity(field: str, path: object, pem: bytes) -> Sequence[tuple[float, float]]:
    """From when and until when each certificate of a file is valid, in Unix seconds."""
    try:
        found = [_dates(base64.b64decode(block, validate=False)) for block in _BLOCK.findall(pem)]
    except (ValueError, IndexError) as error:
        raise _refuse(field, path, f"certificates in PEM: {error}") from None
    if not found:
        raise _refuse(field, path, "certificates in PEM; there is none")
    return found


def _dates(der: bytes) -> tuple[float, float]:
    """SEQUENCE { SEQUENCE { [0] version, serial, algorithm, issuer, SEQUENCE { from, to }, ... }, ... }"""
    parts = _parts(_parts(_parts(der)[0][1])[0][1])
    validity = parts[3 + (parts[0][0] == _VERSION)][1]
    begins, ends = (_time(tag, value.decode("ascii")) for tag, value in _parts(validity)[:2])
    return begins, ends


def _parts(der: bytes) -> list[tuple[int, bytes]]:
    """Tag and content of each element."""
    at, found = 0, []
    while at < len(der):
        tag, size, at = der[at], der[at + 1], at + 2
        if size & 0x80:
            width = size & 0x7F
            size, at = int.from_bytes(der[at : at + width], "big"), at + width
        if at + size > len(der):
            raise ValueError("it is cut off")
        found.append((tag, der[at : at + size]))
        at += size
    return found


def _time(tag: int, text: str) -> float:
    """A two-digit year below 50 is of this century (RFC 5280)."""
    if tag == _UTC_TIME:
        text = ("20" if text < "5" else "19") + text
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _refuse(field: str, path: object, limit: str) -> InvalidRequest:
    return InvalidRequest(field, str(path), limit)
