"""What `front.py` runs: what comes over TLS goes to a Unix socket, and back.

The bundled Valkey has no TLS of its own. Only peers with a certificate of CA come through; new files count from the
next connection on. SIGTERM ends it at once: whoever has a connection opens another one when the pod is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from pathlib import Path
from types import FrameType

from hedgerow.certificates import Tls, Watched
from hedgerow.errors import InvalidRequest
from hedgerow.rpc import ending
from hedgerow.rpc.logs import get_log
from hedgerow.rpc.tls import http_context

CHUNK = 1 << 18  # bytes that are read at once; what waits to be written is bounded by it
MOST = 4096  # connections
HANDSHAKE = 10.0  # seconds
log = get_log(__name__)


class Front:
    """`target`: the socket's path."""

    def __init__(self, target: Path) -> None:
        self._target, self._open = target, 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, to the end of either side."""
        self._open += 1
        try:
            if self._open > MOST:
                log.warning("a connection too many", most=MOST)
                return
            inner = await asyncio.open_unix_connection(self._target, limit=CHUNK)
            await _joined((reader, writer), inner)
        except OSError as error:  # whoever called sees that the connection has ended
            log.debug("a connection has ended", why=str(error))
        finally:
            self._open -= 1
            writer.close()


async def _joined(
    one: tuple[asyncio.StreamReader, asyncio.StreamWriter], other: tuple[asyncio.StreamReader, asyncio.StreamWriter]
) -> None:
    """Passes bytes on in both directions until one side has ended."""
    ways = [asyncio.create_task(_pass(one[0], other[1])), asyncio.create_task(_pass(other[0], one[1]))]
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        other[1].close()


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(CHUNK):
        writer.write(data)
        await writer.drain()


async def run(listen: str, target: Path, files: Tls) -> None:
    """Until SIGTERM; a second one ends the process. Raises InvalidRequest with the file, OSError with the port."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop(number: int, frame: FrameType | None) -> None:
        ending.at_once(ending.STOP)
        loop.call_soon_threadsafe(stopping.set)

    for number in ending.STOP:
        signal.signal(number, stop)

    def complain(why: InvalidRequest) -> None:
        log.error("changed certificates are not taken; those before stay in use", file=why.value, must_be=why.limit)

    context = http_context(Watched(files, complain), client_certs=True)
    host, _, port = listen.rpartition(":")
    server = await asyncio.start_server(
        Front(target).serve, host.strip("[]"), int(port), ssl=context, limit=CHUNK, ssl_handshake_timeout=HANDSHAKE
    )
    log.info("listening", port=server.sockets[0].getsockname()[1], target=target)
    with contextlib.closing(server):
        await stopping.wait()
