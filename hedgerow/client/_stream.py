"""One generation as it comes."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from types import TracebackType

from hedgerow.client._chat import Answer
from hedgerow.client._types import Chunk, Event, Finished, Position, Result, Started, Step
from hedgerow.client._wire import Wire
from hedgerow.errors import Cancelled


class Stream:
    """Chunks of one generation: `async for chunk in stream`. Nothing is sent before the first one is asked for.

    A stream that breaks goes on by itself at the next gateway, as the client's `retry` says: no token comes twice, none
    is missing. One that finds no place for its first token begins anew as another session, with a first event of its
    own. What cannot go on raises an error of the taxonomy (`hedgerow.errors`) from the loop; the session may
    still be there then, and `client.resume(*stream.position)` tries it again.

    Leaving the loop, `aclose()`, the end of `async with`, cancelling the task and dropping the last reference all
    cancel the session unless it has ended. `detach()` and the option `leave_running` leave it going on. `started` and
    `finished` are the first and last event, None before they came.
    """

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    @property
    def started(self) -> Started | None:
        """The first event, None before it came."""
        return self._wire.order.started

    @property
    def finished(self) -> Finished | None:
        """The last event, None before it came."""
        return self._wire.order.finished

    @property
    def session_id(self) -> str:
        """What `cancel` and `get_session` take; empty before the session has started."""
        return self._wire.order.position.session_id

    @property
    def position(self) -> Position:
        """Where the stream goes on behind the last event that it gave; its session id is empty before the first."""
        return self._wire.position

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
        answer = Answer()
        async with self:
            async for chunk in self:
                text.append(chunk.text)
                answer.add(chunk)
                tokens += chunk.tokens
                steps += chunk.steps
        if self.started is None or self.finished is None:
            raise Cancelled("the stream was closed before its end")
        return Result(
            "".join(text), tuple(tokens), self.finished.usage, self.finished.reason, tuple(steps), self.session_id,
            self.started.sampling.seed, answer,
        )  # fmt: skip

    async def detach(self) -> Position:
        """End the stream and leave its session going on, for a `client.resume` of this process or another.

        Waits until the session has started. Without a reader a gateway pauses it after a while; a resume wakes it up.
        """
        while not self.session_id and await self._next() is not None:
            pass
        self._wire.leave_running = True
        await self._wire.leave()
        return self.position._replace(session_id=self.session_id)  # which is known before its event is given

    async def aclose(self) -> None:
        """Cancel the session unless it has ended or `leave_running` was asked for.

        Waits a second at most for the gateway to say that it has; then that goes on in the background.
        """
        await self._wire.leave()

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
        loop = self._wire.loop
        if loop is not None and not loop.is_closed():
            with contextlib.suppress(RuntimeError):  # closed meanwhile
                loop.call_soon_threadsafe(self._wire.leave_soon)

    async def _next_chunk(self) -> Chunk | None:
        while (event := await self._next()) is not None:
            if isinstance(event, Chunk):
                return event
        return None

    async def _next(self) -> Event | None:
        return await self._wire.next()
