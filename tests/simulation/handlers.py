"""The server's end of a gRPC call over a simulated link: the task of its handler, its requests and its context."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio

from tests.simulation.wire import Link

OK = grpc.StatusCode.OK
NO_DEADLINE = 1e10
Status = tuple[grpc.StatusCode, str, tuple[tuple[str, bytes], ...]]


class Said:
    """What a gateway has said in one call: whose stream it is, the end of its tokens, whether that was all."""

    session, end, finished = "", -1, False


class ServerCall:
    """The server's end: the handler's task, its requests and its context. `ended` is the status that it sent."""

    def __init__(self, call: Any, link: Link, path: str, deadline: float | None, metadata: Any) -> None:
        self._call, self._link, self._path, self._deadline = call, link, path, deadline
        self._network = link.network
        self._network.handled += 1
        self._number = self._network.handled
        self._loop = link.network.loop
        self._metadata = tuple(metadata or ())
        self._inbox: deque[bytes] = deque()
        self._half_closed = self._is_cancelled = False
        self._waiter: asyncio.Future[None] | None = None
        self.task: asyncio.Task[None] | None = None
        self._timer: Any = None
        self._unread = 0
        self._room: asyncio.Future[None] | None = None
        self._last = self._loop.time()
        self._aborted: Status | None = None
        self.ended: Status | None = None
        self.key = 0
        self.request: Any = None
        self.said = Said()

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
        self.task = asyncio.get_running_loop().create_task(self._run(handler))
        self._network.running.setdefault(self._link.server, {})[self._number] = self
        if self._deadline is not None:
            self._timer = self._loop.call_at(self._deadline, self.cancelled)

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
            if self.task is not None:
                self.task.cancel()

    def shut(self) -> None:
        """The server ends what is left of its calls."""
        if self.ended is None and not self._is_cancelled:
            self._send(self._call.broken, "the server shuts down")
            self.cancelled()

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
        finally:
            self._network.running[self._link.server].pop(self._number, None)
            if self._timer is not None:
                self._timer.cancel()

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
