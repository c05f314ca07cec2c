"""TLS of a connection between two hosts of a group: bytes in, bytes out. Who moves them is `rank_wire`.

Both ends show a certificate of the authority that both believe. TLS 1.3 (RFC 8446), by the standard library: over
memory, because an `ssl.SSLSocket` may not be read and written by two threads at once, and because what waits in it is
nothing that a selector sees.
"""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable

ENDS = (ssl.SSLZeroReturnError, ssl.SSLEOFError)
Context = Callable[[], ssl.SSLContext]  # of the moment: certificates may change between two connections


class Cipher:
    """One end. `name`: of the other end, as its certificate has it; None: this is the end that is called.

    `encrypt` and `decrypt` may each be called by a thread of its own. They raise ssl.SSLError.
    """

    def __init__(self, context: ssl.SSLContext, name: str | None) -> None:
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out, server_side=name is None, server_hostname=name)
        self._turn = threading.Lock()

    def shake(self, data: bytes) -> tuple[bytes, str | None]:
        """Takes what came. What is to be sent, and how the handshake stands: None: not over; "": done; else why it
        failed."""
        self._in.write(data)
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return self._out.read(), None
        except ssl.SSLError as error:
            return self._out.read(), explained(error)
        return self._out.read(), ""

    def encrypt(self, data: bytes) -> bytes:
        """To be sent in the order of the calls."""
        left = memoryview(data)
        with self._turn:
            while left:
                left = left[self._tls.write(left) :]
            return self._out.read()

    def decrypt(self, data: bytes) -> bytes:
        """All that is whole by now."""
        found = bytearray()
        with self._turn:
            self._in.write(data)
            while True:
                try:
                    found += self._tls.read(1 << 16)
                except ssl.SSLWantReadError:
                    return bytes(found)


def explained(error: ssl.SSLError) -> str:
    """What an operator can do something about: whose certificate it is, and what is wrong with it."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the other end's certificate is refused: {error.verify_message}"
    if isinstance(error, ENDS):
        return "the other end is over"
    reason = (error.reason or str(error)).replace("_", " ").lower()
    if "alert" in reason:  # its words are about us
        return f"the other end refuses the certificate that it is shown: {reason.rpartition('alert ')[2]}"
    return f"TLS fails: {reason}"
