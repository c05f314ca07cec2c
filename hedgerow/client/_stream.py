"""One generation as it comes."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Any

import grpc.aio
from grpc.aio import EOF  # type: ignore[attr-defined]  # the stubs lack it

from hedgerow.client import _convert
from hedgerow.client._retry import Retry
from hedgerow.client._status import decode
from hedgerow.client._types import Chunk, Event, Finished, Result, Started, Step
from hedgerow.errors import Cancelled, HedgerowError, Internal
from hedgerow.v1 import gateway_pb2 as pb

Call = grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]


class Stream:
    """Chunks of one generation: `async for chunk in stream`. Nothing is sent before the first one is asked for.

    Leaving the loop, `aclose()`, the end of `async with` and dropping the last reference all cancel the session unless
    it has ended. Errors of the taxonomy (`hedgerow.errors`) are raised from the loop. `started` and `finished` are the
    first and last event, None before they came.
    """

    def __init__(
        self, open_call: Callable[[pb.GenerateRequest], Call], asked: pb.GenerateRequest, retry: Retry, address: str
    ) -> None:
        self.started: Started | None = None
        self.finished: Finished | None = None
        self._open_call, self._request, self._retry, self._address = open_call, asked, retry, address
        self._own_key = not asked.idempotency_key
        self._key = asked.idempotency_key or secrets.token_hex(16)
        self._call: Call | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._attempt = 1
        self._begun = self._closed = False

    @property
    def session_id(self) -> str:
        """What `cancel` and `get_session` take; empty before the session has started."""
        return self.started.session_id if self.started else ""

    async def events(self) -> AsyncIterator[Event]:
        """Everything, the first and last event too."""
        async with self:
            while (event := await self._next()) is not None:
                yield event

    async def result(self) -> Result:
        """Wait for the end; the whole of it."""
        text: list[str] = []
        tokens: list[int] = []
        steps: list[Step] = []
        async with self:
            async for chunk in self:
                text.append(chunk.text)
                tokens += chunk.tokens
                steps += chunk.steps
        if self.started is None or self.finished is None:
            raise Cancelled("the stream was closed before its end")
        return Result(
            "".join(text), tuple(tokens), self.finished.usage, self.finished.reason, tuple(steps), self.session_id,
            self.started.sampling.seed,
        )  # fmt: skip

    async def aclose(self) -> None:
        """Cancel the session unless it has ended."""
        self._closed = True
        if self._call is not None:
            self._call.cancel()

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Chunk:
        if (chunk := await self._next_chunk()) is None:
            raise StopAsyncIteration
        return chunk

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        # gRPC does not cancel a call that nobody reads any more (grpc/grpc#43462), and this may be any thread.
        if self._call is not None and self._loop is not None and not self._loop.is_closed():
            with contextlib.suppress(RuntimeError):  # closed meanwhile
                self._loop.call_soon_threadsafe(self._call.cancel)

    async def _next_chunk(self) -> Chunk | None:
        while (event := await self._next()) is not None:
            if isinstance(event, Chunk):
                return event
        return None

    async def _next(self) -> Event | None:
        """The next event; None after the last. Tries again while nothing has come, as `retry` says."""
        while not self.finished and not self._closed:
            try:
                return await self._read()
            except HedgerowError as error:
                delay = None if self._begun else self._delay(error)
                if delay is None:
                    raise
                await asyncio.sleep(delay)
        return None

    async def _read(self) -> Event:
        if self._call is None:
            self._loop = asyncio.get_running_loop()
            self._request.idempotency_key = self._key
            self._call = self._open_call(self._request)
        try:
            answer: Any = await self._call.read()
            if answer is EOF:
                raise Internal("the stream ended without its last event")
            event = _convert.event(answer.event)
            if isinstance(event, Finished):
                await self._call.read()  # the status behind it
        except grpc.aio.AioRpcError as error:
            raise decode(error, self._address) from None
        self._note(event)
        return event

    def _note(self, event: Event) -> None:
        if isinstance(event, Started):
            self.started = event
        elif isinstance(event, Finished):
            self.finished = event
        else:
            self._begun = True

    def _delay(self, error: HedgerowError) -> float | None:
        """Seconds until the next try, prepared here; None: give up."""
        refused = "reason" in error.metadata
        if refused and not self._own_key and self.started:
            return None  # the session of the caller's key has ended, and it would only be joined
        delay = self._retry.delay(error, self._attempt)
        if delay is not None:
            self._attempt += 1
            self._call = self.started = None
            if refused and self._own_key:  # else the outcome is unknown, and the key joins what may have begun
                self._key = secrets.token_hex(16)
        return delay
