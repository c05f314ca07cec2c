"""GET /metrics over HTTP, for Prometheus: off unless an address is configured.

In the service's own event loop: a process that hangs shows nothing, which is the truth.
"""

from __future__ import annotations

import asyncio
import ssl
from email.parser import BytesHeaderParser
from typing import NamedTuple

from prometheus_client.exposition import choose_encoder

from hedgerow.rpc.config import ConfigError, variable_of
from hedgerow.rpc.logs import get_log
from hedgerow.rpc.telemetry import REGISTRY

HEAD_BYTES = 8192  # of a request
SECONDS = 5.0  # that a request and its answer may take
CONNECTIONS = 16  # at once; one more is closed unheard
log = get_log(__name__)


class Answer(NamedTuple):
    """One answer."""

    status: str
    body: bytes = b""
    kind: str = "text/plain; charset=utf-8"

    def packed(self) -> bytes:
        """As it is sent."""
        head = f"HTTP/1.1 {self.status}\r\nContent-Type: {self.kind}\r\nContent-Length: {len(self.body)}\r\n"
        return head.encode() + b"Connection: close\r\n\r\n" + self.body


class Exposition:
    """The endpoint of one process."""

    def __init__(self) -> None:
        self._server: asyncio.Server | None = None
        self._open = 0

    @property
    def port(self) -> int:
        """The port; 0 while there is none."""
        return self._server.sockets[0].getsockname()[1] if self._server is not None else 0

    async def start(self, address: str | None, tls: ssl.SSLContext | None = None) -> None:
        """Listens at host:port, over TLS if so told; None: nowhere. Raises ConfigError where it cannot."""
        if address is None:
            return
        host, _, port = address.rpartition(":")
        try:
            patience = {} if tls is None else {"ssl_handshake_timeout": SECONDS, "ssl_shutdown_timeout": SECONDS}
            self._server = await asyncio.start_server(
                self._connected, host.strip("[]") or None, int(port), limit=HEAD_BYTES, ssl=tls, **patience
            )
        except (OSError, ValueError, OverflowError) as error:
            limit = f"cannot listen there: {error}"
            raise ConfigError(variable_of("metrics_address"), repr(address), limit) from error
        log.info("metrics", port=self.port)

    async def stop(self) -> None:
        """Listens no more."""
        if self._server is not None:
            self._server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        try:
            if self._open <= CONNECTIONS:
                async with asyncio.timeout(SECONDS):
                    head = await reader.readuntil(b"\r\n\r\n")
                    writer.write(answer(head).packed())
                    await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as broken:
            log.debug("a look at the metrics failed", why=type(broken).__name__)
        finally:
            self._open -= 1
            writer.close()


def answer(head: bytes) -> Answer:
    """To a request of this head."""
    line, _, rest = head.partition(b"\r\n")
    words = line.split()
    if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
        return Answer("400 Bad Request")
    if words[1].partition(b"?")[0] != b"/metrics":
        return Answer("404 Not Found", b"metrics are at /metrics\n")
    if words[0] != b"GET":
        return Answer("405 Method Not Allowed")
    encode, kind = choose_encoder(BytesHeaderParser().parsebytes(rest).get("Accept", ""))
    return Answer("200 OK", encode(REGISTRY), kind)
