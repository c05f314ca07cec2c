"""A TCP proxy on one hop that can cut, refuse, fall silent and leave connections half-open. It needs no tool."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

BLOCK = 1 << 16  # bytes that a pump takes at a time
RESET = struct.pack("ii", 1, 0)  # SO_LINGER of no seconds: closing sends RST, as the end of a machine would not
T = TypeVar("T")

Target = Callable[[], Awaitable[tuple[str, int]]]
"""Where a new connection goes to, asked for each."""


class Loop:
    """An event loop in a thread of its own, so that a proxy works while a test waits in its own way."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="wires", daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, T], timeout: float = 30) -> T:
        """Runs a coroutine there, and gives its result here."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout)

    def close(self) -> None:
        """Ends the thread and everything on it."""

        async def cancel_all() -> None:
            rest = asyncio.all_tasks() - {asyncio.current_task()}
            for task in rest:
                task.cancel()
            await asyncio.gather(*rest, return_exceptions=True)

        self.call(cancel_all())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()


class _Link:
    """One connection: a socket to the caller, one to the server, and whether anything passes between them."""

    def __init__(self, writers: list[asyncio.StreamWriter]) -> None:
        self.writers, self.passes = writers, asyncio.Event()
        self.dead = False  # half-open: nothing will ever pass, and nobody is told

    def reset(self) -> None:
        for writer in self.writers:
            found = writer.get_extra_info("socket")
            if found is not None:
                with contextlib.suppress(OSError):
                    found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            writer.transport.abort()


class Wire:
    """One hop: connections to `address` are passed on to `target`. Methods may be called from any thread."""

    def __init__(self, loop: Loop, target: Target) -> None:
        self._loop, self._target = loop, target
        self._links: dict[int, _Link] = {}
        self._numbers = 0
        self.passed = 0  # bytes since the start, both ways
        self._refuses = self._silent = False
        self._server = loop.call(self._listen())
        self.port: int = self._server.sockets[0].getsockname()[1]

    @property
    def address(self) -> str:
        """host:port for whoever should come through here."""
        return f"127.0.0.1:{self.port}"

    @property
    def connections(self) -> int:
        """How many there are now, half-open ones included."""
        return len(self._links)

    def cut(self) -> None:
        """Resets every connection there is; new ones pass."""
        self._loop.call(self._cut())

    def refuse(self) -> None:
        """Resets every connection and each new one, until `heal`."""
        self._refuses = True
        self.cut()

    def half_open(self) -> None:
        """Lets nothing pass on the present connections, ever, and closes none of them; new ones pass."""

        async def kill() -> None:
            for link in self._links.values():
                link.dead = True
                link.passes.clear()

        self._loop.call(kill())

    def silence(self) -> None:
        """Lets nothing pass on any connection, present or new, until `heal`; what was sent meanwhile comes then."""

        async def stop() -> None:
            self._silent = True
            for link in self._links.values():
                link.passes.clear()

        self._loop.call(stop())

    def heal(self) -> None:
        """As at the beginning. Half-open connections are reset: nobody else would ever end them."""

        async def go_on() -> None:
            self._refuses = self._silent = False
            for link in list(self._links.values()):
                if link.dead:
                    link.reset()
                link.passes.set()

        self._loop.call(go_on())

    def close(self) -> None:
        """Resets everything and listens no longer."""

        async def end() -> None:
            self._server.close()
            await self._cut()

        self._loop.call(end())

    async def _listen(self) -> asyncio.Server:
        return await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=BLOCK)

    async def _cut(self) -> None:
        for link in list(self._links.values()):
            link.reset()
            link.passes.set()  # a pump that waits finds its socket closed

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = _Link([writer])
        if not self._silent:
            link.passes.set()
        number = self._numbers = self._numbers + 1
        self._links[number] = link
        try:
            if self._refuses:
                link.reset()
                return
            await link.passes.wait()
            host, port = await self._target()
            there_reader, there_writer = await asyncio.open_connection(host, port, limit=BLOCK)
            link.writers.append(there_writer)
            async with asyncio.TaskGroup() as pumps:
                pumps.create_task(self._pump(link, reader, there_writer))
                pumps.create_task(self._pump(link, there_reader, writer))
        except* (OSError, ConnectionError):
            pass
        finally:
            link.reset()
            del self._links[number]

    async def _pump(self, link: _Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Passes bytes on in order until the sender's end, which is passed on too."""
        while True:
            data = await reader.read(BLOCK)
            await link.passes.wait()
            if not data:
                if writer.can_write_eof():
                    writer.write_eof()
                return
            self.passed += len(data)
            writer.write(data)
            await writer.drain()
