"""One gRPC call over a simulated link: what a client holds, and what runs at the server."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator
from typing import Any

import grpc
import grpc.aio
from grpc.aio import EOF  # type: ignore[attr-defined]  # the stubs lack it

from tests.simulation.loop import CURRENT, Process
from tests.simulation.wire import Link, Network

OK = grpc.StatusCode.OK
NO_DEADLINE = 1e10
Status = tuple[grpc.StatusCode, str, tuple[tuple[str, bytes], ...]]


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


class ServerCall:
    """The server's end: the handler's task, its requests and its context. `ended` is the status that it sent."""

    def __init__(self, call: Call, link: Link, path: str, deadline: float | None, metadata: Any) -> None:
        self._call, self._link, self._path, self._deadline = call, link, path, deadline
        self._network = link.network
        self._loop = link.network.loop
        self._metadata = tuple(metadata or ())
        self._inbox: deque[bytes] = deque()
        self._half_closed = self._is_cancelled = False
        self._waiter: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._unread = 0
        self._room: asyncio.Future[None] | None = None
        self._last = self._loop.time()
        self._aborted: Status | None = None
        self.ended: Status | None = None
        self.key = 0
        self.session_id = ""
        self.request: Any = None

    def begin(self, request: bytes | None) -> None:
        """The call arrived."""
        if self._is_cancelled:
            return
        handler = self._network.handlers.get(self._link.server, {}).get(self._path)
        if handler is None:
            self._end((grpc.StatusCode.UNIMPLEMENTED, f"no method {self._path}", ()))
            return
        if request is not None:
            self._inbox.append(request)
            self._half_closed = True
        self._task = asyncio.get_running_loop().create_task(self._run(handler))
        if self._deadline is not None:
            self._loop.call_at(self._deadline, self.cancelled)

    def arrived(self, request: bytes) -> None:
        """A message of the client."""
        self._inbox.append(request)
        self._wake()

    def closed(self) -> None:
        """The client half-closed."""
        self._half_closed = True
        self._wake()

    def taken(self) -> None:
        """The client's program took a message: there is room for another."""
        self._unread -= 1
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    def cancelled(self) -> None:
        """The client is gone."""
        if self.ended is None and not self._is_cancelled:
            self._is_cancelled = True
            self._half_closed = True
            self._link.calls.pop(self.key, None)
            self._wake()
            if self._task is not None:
                self._task.cancel()

    # The part of grpc.aio.ServicerContext that servicers use.

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> None:
        self._aborted = (code, details, tuple(trailing_metadata))
        raise grpc.aio.AbortError("aborted")

    def is_cancelled(self) -> bool:
        return self._is_cancelled

    def time_remaining(self) -> float:
        return NO_DEADLINE if self._deadline is None else max(0.0, self._deadline - self._loop.time())

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._metadata

    def peer(self) -> str:
        return f"sim:{self._link.client.name}"

    async def _run(self, handler: Any) -> None:
        context = Context(self)
        try:
            if handler.request_streaming:
                request: Any = self._requests(handler.request_deserializer)
            else:
                request = self.request = handler.request_deserializer(self._inbox.popleft())
            if handler.response_streaming:
                await (handler.stream_stream or handler.unary_stream)(request, context)
            else:
                await self.write(await handler.unary_unary(request, context))
            self._end((OK, "", ()), unary=not handler.response_streaming)
        except grpc.aio.AbortError:
            assert self._aborted is not None
            self._end(self._aborted)
        except asyncio.CancelledError:
            self._end((grpc.StatusCode.CANCELLED, "cancelled", ()))
            raise
        except Exception as error:  # noqa: BLE001  as grpc.aio answers it
            self._loop.failures.append(f"{self._link.server}: handler of {self._path}: {error!r}")
            self._end((grpc.StatusCode.UNKNOWN, f"Unexpected {type(error)}", ()))

    async def _requests(self, decode: Callable[[bytes], Any]) -> AsyncIterator[Any]:
        while True:
            while not self._inbox:
                if self._half_closed:
                    return
                self._waiter = self._loop.create_future()
                await self._waiter
            yield decode(self._inbox.popleft())

    async def write(self, answer: Any) -> None:
        while self._unread >= self._network.window and not self._is_cancelled:
            self._room = self._loop.create_future()
            await self._room
        if self._is_cancelled:
            raise asyncio.CancelledError
        self._unread += 1
        self._network.sent(self, self._path, answer)
        self._send(self._call.message, answer.SerializeToString())
        await asyncio.sleep(0)

    def _end(self, status: Status, *, unary: bool = False) -> None:
        if self.ended is None and not self._is_cancelled:
            self._send(self._call.ended, status, unary)

    def _send(self, callback: Callable[..., None], *args: Any) -> None:
        if self._link.server_alive:
            self._last = self._link.send(False, self._last, callback, *args)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        if self._is_cancelled and self._room is not None and not self._room.done():
            self._room.set_result(None)


class Context:
    """grpc.aio.ServicerContext."""

    def __init__(self, call: ServerCall) -> None:
        self._call = call
        self.abort, self.write, self.cancelled, self.peer = call.abort, call.write, call.is_cancelled, call.peer
        self.time_remaining, self.invocation_metadata = call.time_remaining, call.invocation_metadata

    def add_done_callback(self, callback: Any) -> None:
        """Nobody needs it here."""

    async def send_initial_metadata(self, metadata: Any) -> None:
        """Headers are not simulated."""

    def set_trailing_metadata(self, metadata: Any) -> None:
        """Trailers are those of `abort`."""


class Channel:
    """grpc.aio.Channel: `insecure_channel` of a simulated process."""

    def __init__(self, network: Network, address: str) -> None:
        process = CURRENT.get()
        assert process is not None, "a channel belongs to a process"
        self._network, self._address, self._process = network, address, process
        self._open: list[Call] = []

    async def close(self, grace: float | None = None) -> None:
        """Cancel what is open."""
        for call in self._open:
            call.cancel()

    async def __aenter__(self) -> Channel:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    def unary_unary(
        self, path: str, request_serializer: Any = None, response_deserializer: Any = None, **_: Any
    ) -> Any:
        """A unary call, which may break its connection or be delivered twice."""

        def start(request: Any, *, timeout: float | None = None, metadata: Any = None, **_: Any) -> Call:
            call = self._call(path, response_deserializer, timeout)
            network, link = self._network, call._link
            data = request_serializer(request)
            if link is None or not (network.lose or network.repeat):
                call.begin(data, metadata)
                return call
            x = network.chance.random()
            if x < network.lose / 2:  # the request is lost with its connection
                link.fail_client("connection reset")
                return call
            call.begin(data, metadata)
            if x < network.lose:  # so is the answer
                network.loop.at(network.loop.time() + 2 * network.delay(), link.fail_client, "connection reset")
            elif x < network.lose + network.repeat:
                again = Call(network, self._process, self._address, path, response_deserializer, timeout)
                network.loop.at(network.loop.time() + 10 * network.delay(), again.begin, data, metadata)
            return call

        return start

    def unary_stream(
        self, path: str, request_serializer: Any = None, response_deserializer: Any = None, **_: Any
    ) -> Any:
        """A call with a stream of answers."""

        def start(request: Any, *, timeout: float | None = None, metadata: Any = None, **_: Any) -> Call:
            call = self._call(path, response_deserializer, timeout)
            call.begin(request_serializer(request), metadata)
            return call

        return start

    def stream_stream(
        self, path: str, request_serializer: Any = None, response_deserializer: Any = None, **_: Any
    ) -> Any:
        """A stream both ways."""

        def start(*, timeout: float | None = None, metadata: Any = None, **_: Any) -> Call:
            call = self._call(path, response_deserializer, timeout)
            call.begin(None, metadata)
            return call

        return start

    def _call(self, path: str, decode: Any, timeout: float | None) -> Call:
        call = Call(self._network, self._process, self._address, path, decode, timeout)
        self._open = [open_call for open_call in self._open if not open_call.done()]
        self._open.append(call)
        return call
