"""Following sessions: readers wait here for logs to grow.

Growth through this process wakes its readers at once; growth through another replica is found by one poll for all
sessions that are waited for, one round trip each.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import NamedTuple

from hedgerow import errors
from services.kvstore.records import Chunk, State
from services.kvstore.store import Store

MOST_CHUNKS = 1024
"""Chunks that one read takes at most."""
MOST_VIEW = 4 << 20
"""Bytes of views of one answer, exceeded by those of one chunk at most."""


class Growth(NamedTuple):
    """Tokens in order, and the session's state with the last of them (None: more may come). `parts` are the chunks that
    are joined in `chunk`.
    """

    chunk: Chunk
    final: State | None
    parts: Sequence[Chunk] = ()


class Followers:
    """Everybody who follows a session through this process. `interval` is the poll's, in seconds."""

    def __init__(self, store: Store, interval: float) -> None:
        self.store, self.interval = store, interval
        store.on_change = self.wake
        # Per session: who waits, and the state that the waiter has seen.
        self._waiting: dict[str, dict[asyncio.Future[None], State]] = {}
        self._poller: asyncio.Task[None] | None = None
        self._closed: errors.HedgerowError | None = None

    async def follow(self, session_id: str, offset: int) -> AsyncGenerator[Growth, None]:
        """The committed tokens from `offset` on, as they come, up to the session's end.

        An offset that the log has not reached waits for it. Raises NotFound's children where the session is not, or
        is deleted meanwhile, and Unavailable where Redis is away or this process drains.
        """
        while True:
            known = await self.store.read(session_id, offset, chunks=MOST_CHUNKS, durable=True)
            parts = bounded(known.chunks)
            state, chunk = known.state, _joined(parts, offset)
            if offset < state.length and not chunk.tokens:
                raise errors.InvariantViolation(f"session {session_id}: the log has no offset {offset}")
            ended = state.finish != 0 and chunk.end >= state.length
            if ended:
                last = chunk if chunk.tokens else Chunk(state.length, b"", state.digest)
                yield Growth(last, state, parts)
                return
            if chunk.tokens:
                yield Growth(chunk, None, parts)
                offset = chunk.end
            if offset >= state.length:
                await self._changed(session_id, state)

    def wake(self, session_id: str) -> None:
        """The session changed."""
        for waiter in self._waiting.pop(session_id, {}):
            if not waiter.done():
                waiter.set_result(None)

    def close(self, error: errors.HedgerowError) -> None:
        """End every reader with `error`, and those to come."""
        self._closed = error
        self._fail(error)

    async def _changed(self, session_id: str, seen: State) -> None:
        """Return once the session is not as it was `seen`."""
        if self._closed is not None:
            raise self._closed
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(session_id, {})[waiter] = seen
        if self._poller is None or self._poller.done():
            self._poller = asyncio.create_task(self._poll())
        try:
            await waiter
        finally:
            waiters = self._waiting.get(session_id, {})
            waiters.pop(waiter, None)
            if not waiters:
                self._waiting.pop(session_id, None)

    async def _poll(self) -> None:
        while self._waiting:
            try:
                states = await self.store.states(sorted(self._waiting))
            except errors.HedgerowError as error:
                self._fail(error)
                return
            for session_id, state in states.items():
                if any(state != seen for seen in self._waiting.get(session_id, {}).values()):
                    self.wake(session_id)
            await asyncio.sleep(self.interval)

    def _fail(self, error: errors.HedgerowError) -> None:
        for session_id in list(self._waiting):
            for waiter in self._waiting.pop(session_id):
                if not waiter.done():
                    waiter.set_exception(error)


def bounded(chunks: Sequence[Chunk]) -> Sequence[Chunk]:
    """The first of them whose views are no more than one answer may have; at least one."""
    size = 0
    for i, chunk in enumerate(chunks):
        size += len(chunk.view)
        if size > MOST_VIEW and i:
            return chunks[:i]
    return chunks


def _joined(chunks: Sequence[Chunk], offset: int) -> Chunk:
    if not chunks:
        return Chunk(offset, b"", b"")
    return Chunk(chunks[0].offset, b"".join(chunk.tokens for chunk in chunks), chunks[-1].digest)
