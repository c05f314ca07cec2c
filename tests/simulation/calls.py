"""The client's end of a gRPC call over a simulated link. See handlers.py for the other one."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator
from typing import Any

import grpc
import grpc.aio
from grpc.aio import EOF  # type: ignore[attr-defined]  # the stubs lack it

from tests.simulation.handlers import OK, ServerCall, Status
from tests.simulation.processes import Process
from tests.simulation.wire import Network


class Call:
    """The client's end, as grpc.aio's call objects behave."""

    def __init__(self, network: Network, client: Process, address: str, path: str, decode: Any, timeout: float | None):
        self._network, self._path, self._decode, self._process = network, path, decode, client
        self._loop = network.loop
        self._inbox: deque[bytes] = deque()
        self._status: Status | None = None
        self._cancelled = False
        self._waiters: list[asyncio.Future[None]] = []
        self._callbacks: list[Callable[[Any], None]] = []
        self._half_closed = False
        self._last = self._loop.time()
        self._deadline = None if timeout is None else self._loop.time() + timeout
        self._server: ServerCall | None = None
        network.calls += 1
        self._number = network.calls
        self._link = network.link(client, address)
        self._timer = None
        if timeout is not None:
            self._timer = self._loop.call_later(
                timeout, self._finish, (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", ())
            )
        if self._link is None:
            refused = (grpc.StatusCode.UNAVAILABLE, f"failed to connect to {address}: connection refused", ())
            self._loop.call_later(network.delay(), self._finish, refused)
        else:
            self._link.calls[self._number] = self

    def begin(self, request: bytes | None, metadata: Any) -> None:
        """Send the headers, and the only request of a unary call."""
        if self._link is not None:
            self._server = ServerCall(self, self._link, self._path, self._deadline, metadata)
            self._send(self._server.begin, request)

    def done(self) -> bool:
        return self._status is not None

    def cancelled(self) -> bool:
        return self._status is not None and self._status[0] is grpc.StatusCode.CANCELLED

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._callbacks.append(callback)

    def cancel(self) -> bool:
        """End the call here; the server hears of it."""
        if self._status is not None:
            return False
        self._cancelled = True
        self._finish((grpc.StatusCode.CANCELLED, "Locally cancelled by application!", ()))
        return True

    async def code(self) -> grpc.StatusCode:
        while self._status is None:
            await self._changed()
        return self._status[0]

    async def details(self) -> str:
        await self.code()
        assert self._status is not None
        return self._status[1]

    async def initial_metadata(self) -> grpc.aio.Metadata:
        return grpc.aio.Metadata()

    async def trailing_metadata(self) -> grpc.aio.Metadata:
        await self.code()
        assert self._status is not None
        return grpc.aio.Metadata(*self._status[2])

    def time_remaining(self) -> float | None:
        return None if self._deadline is None else self._deadline - self._loop.time()

    async def read(self) -> Any:
        """The next message, EOF at a good end; raises AioRpcError at another."""
        while not self._inbox:
            if self._status is not None:
                self._raise()
                return EOF
            try:
                await self._changed()
            except asyncio.CancelledError:
                self.cancel()
                raise
        message = self._inbox.popleft()
        if self._server is not None:
            self._server.taken()
        if not self._inbox and self._server is not None and self._server.ended is not None:
            self._finish(self._server.ended)
        return self._decode(message)

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (message := await self.read()) is not EOF:
            yield message

    async def write(self, request: Any) -> None:
        """Send a message of a stream."""
        if self._status is not None:
            raise asyncio.InvalidStateError("RPC already finished.")
        if self._half_closed:
            raise asyncio.InvalidStateError('RPC is half closed after calling "done_writing".')
        if self._server is not None:
            self._send(self._server.arrived, request.SerializeToString())
        try:
            await asyncio.sleep(0)
            if self._link is None:  # not connected: nothing leaves
                while self._status is None:
                    await self._changed()
                self._raise()
        except asyncio.CancelledError:
            self.cancel()
            raise

    async def done_writing(self) -> None:
        """Half-close."""
        if not self._half_closed and self._status is None and self._server is not None:
            self._half_closed = True
            self._send(self._server.closed)

    def __await__(self) -> Generator[Any, None, Any]:
        return self._response().__await__()

    async def _response(self) -> Any:
        try:
            while self._status is None:
                await self._changed()
        except asyncio.CancelledError:
            self.cancel()
            raise
        self._raise()
        return self._decode(self._inbox.popleft())

    # What arrives.

    def message(self, message: bytes) -> None:
        """A message of the server."""
        if self._status is None:
            self._inbox.append(message)
            self._wake()

    def ended(self, status: Status, unary: bool) -> None:
        """The server's status, behind all its messages."""
        if self._server is not None:
            self._server.ended = status
        if not self._inbox or unary:
            self._finish(status)
        self._wake()

    def broken(self, why: str) -> None:
        """The connection is gone, with what nobody has read."""
        if self._status is None:
            self._inbox.clear()
            self._finish((grpc.StatusCode.UNAVAILABLE, why, ()))

    def abandoned(self) -> None:
        """The server's end lost the connection."""
        if self._server is not None:
            self._server.cancelled()

    def _finish(self, status: Status) -> None:
        if self._status is not None:
            return
        self._status = status
        if self._timer is not None:
            self._timer.cancel()
        if status[0] in (grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED):
            self._inbox.clear()
        server, link = self._server, self._link
        if server is not None and server.ended is None and link is not None and link.client_alive:
            self._send(server.cancelled)
        if link is not None:
            link.calls.pop(self._number, None)
            if server is not None and server.ended is None:
                link.calls[-self._number] = _Remains(server)
                server.key = -self._number
        self._wake()
        for callback in self._callbacks:
            callback(self)

    def _raise(self) -> None:
        assert self._status is not None
        code, details, trailers = self._status
        if self._cancelled:
            raise asyncio.CancelledError
        if code is not OK:
            raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailers), details, details)

    def _send(self, callback: Callable[..., None], *args: Any) -> None:
        assert self._link is not None
        self._last = self._link.send(True, self._last, callback, *args)

    async def _changed(self) -> None:
        future = self._loop.create_future()
        self._waiters.append(future)
        await future

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


class _Remains:
    """A call that its client has left; its handler still runs."""

    def __init__(self, server: ServerCall) -> None:
        self._server = server

    def broken(self, why: str) -> None:
        """Nobody reads it."""

    def abandoned(self) -> None:
        """The handler is told."""
        self._server.cancelled()
