"""What waits to be sent to a gateway, and which sequences it is about."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from hedgerow.engine.types import Finish, StepTimings, Update
from hedgerow.errors import HedgerowError, Overloaded

Pair = tuple[int, int]  # (epoch, attempt)


class Outgoing(NamedTuple):
    """One message to a gateway. `step_id` 0 and no timings: outside of steps."""

    step_id: int
    updates: Sequence[Update]
    timings: StepTimings | None = None


class GatewayStream:
    """One gateway's Attach stream: a bounded queue out, and the attempts that are alive on it.

    A gateway that reads slowly first has its sequences held by the engine, because their committed offsets stay behind;
    if the queue fills all the same, the stream ends with Overloaded and its memory is freed.
    """

    def __init__(self, key: bytes, limit: int) -> None:
        self.key, self.live = key, dict[str, Pair]()
        self.gateway = b""
        self._limit = limit
        self._queue: deque[Outgoing] = deque()
        self._changed, self._taken = asyncio.Event(), asyncio.Event()
        self._ended = False
        self.closed = False  # its call is over
        self._error: HedgerowError | None = None

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def ended(self) -> bool:
        """Whether no more messages are taken."""
        return self._ended

    def send(self, message: Outgoing) -> None:
        """Queues a message; of a stream that has ended, only notes which sequences are over."""
        for update in message.updates:
            if update.finish is not Finish.NONE and self.live.get(update.session_id) == (update.epoch, update.attempt):
                del self.live[update.session_id]
        if self._ended:
            return
        if len(self._queue) >= self._limit:
            self._queue.clear()
            self.end(Overloaded("the gateway's stream", self._limit, self._limit, retry_after=1.0))
            return
        self._queue.append(message)
        self._changed.set()

    def end(self, error: HedgerowError | None = None) -> None:
        """No more messages; `receive` gives what is queued and then ends, with `error` if there is one."""
        self._ended, self._error = True, self._error or error
        self._changed.set()

    def clear(self) -> None:
        """Drops what is queued: its call is over, and nobody reads it any more."""
        self.closed = True
        self._queue.clear()
        self._taken.set()

    async def empty(self) -> None:
        """Returns once nothing is queued."""
        while self._queue:
            self._taken.clear()
            await self._taken.wait()

    async def receive(self) -> Outgoing | None:
        """The next message; None at the end. Raises what the stream ended with."""
        while not self._queue and not self._ended:
            self._changed.clear()
            await self._changed.wait()
        if self._queue:
            self._taken.set()
            return self._queue.popleft()
        if self._error is not None:
            raise self._error
        return None


class GatewayStreams:
    """The open streams by key, and those whose sequences outlive them for a short time."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._streams: dict[bytes, GatewayStream] = {}
        self._opened = 0

    def __iter__(self) -> Iterator[GatewayStream]:
        return iter(list(self._streams.values()))

    def open(self) -> GatewayStream:
        """A stream under a key of its own: a gateway that attaches twice has two streams."""
        self._opened += 1
        stream = GatewayStream(self._opened.to_bytes(8, "big"), self._limit)
        self._streams[stream.key] = stream
        return stream

    def forget(self, stream: GatewayStream) -> None:
        """The stream's sequences are over."""
        self._streams.pop(stream.key, None)

    def deliver(self, step_id: int, updates: Iterable[Update], timings: StepTimings | None) -> None:
        """One message to each stream that has updates."""
        by_owner: dict[bytes, list[Update]] = {}
        for update in updates:
            by_owner.setdefault(update.owner, []).append(update)
        for owner, mine in by_owner.items():
            if owner in self._streams:
                self._streams[owner].send(Outgoing(step_id, mine, timings))
