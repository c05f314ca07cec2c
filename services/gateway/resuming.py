"""Finding the session that a client comes back to, wherever it is.

It runs here; or it has ended, and its log is read; or another gateway runs it, and its log is followed; or nobody does,
and it is taken over and goes on here. What the client has is compared before anything is changed.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from typing import Protocol

from hedgerow.errors import HedgerowError, SessionUnknown, Unavailable
from hedgerow.rpc.logs import get_log
from services.gateway.following import Following, Times, ended
from services.gateway.leases import FIRST_DELAY, LAST_DELAY, persist
from services.gateway.messages import Growth, Stored
from services.gateway.position import START, Position, check_position, check_range
from services.gateway.reader import Reader, lost_suffix
from services.gateway.session import Session
from services.gateway.table import SessionTable
from services.gateway.takeover import TakeOver
from services.gateway.types import NO_TRACE, Finish, Record, Trace

log = get_log(__name__)


class Store(Protocol):
    """The store as far as resuming needs it. Every method raises what the store refuses, and Unavailable."""

    owner: bytes

    async def get(self, session_id: str, from_offset: int = 0) -> Stored:
        """A session as it is recorded."""

    async def mark_cancel(self, session_id: str) -> bool:
        """Ask whoever owns the session to end it."""

    def tail(self, session_id: str, from_offset: int) -> AsyncGenerator[Growth, None]:
        """A session's tokens from an offset on, as they are committed, until its end."""


class Resuming:
    """Sessions for clients that come back, and the readers of those that do not run here. See stream.Source."""

    def __init__(
        self, table: SessionTable, store: Store, takeover: TakeOver, pieces: Sequence[bytes], times: Times
    ) -> None:
        self._table, self._store, self._takeover, self._pieces, self._times = table, store, takeover, pieces, times
        self._following: dict[str, Following] = {}
        self._marking: dict[str, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        """Sessions that are followed, being taken or being cancelled elsewhere."""
        return len(self._following) + len(self._takeover) + len(self._marking)

    def running(self, session_id: str) -> Session | None:
        """The session as it runs or is followed here. Raises Unavailable while it is being given up."""
        session = self._table.sessions.get(session_id)
        if session is not None and session.pausing:
            raise Unavailable(f"session {session_id}", "it is being paused; resume it", 0.1)
        if session is None and (following := self._following.get(session_id)) is not None:
            return following.session
        return session

    async def find(
        self,
        session_id: str,
        allow: Callable[[Record], None],
        at: Position = START,
        trace: Trace = NO_TRACE,
    ) -> Session:
        """The session for a client that has `at`. `allow` raises where it is not that client's; where it goes on here
        for this client, it does so under `trace`.

        Raises NotFound, LostSuffix, InvalidRequest, Overloaded, Unavailable.
        """
        if here := self._table.sessions.get(session_id):
            allow(here.record)  # before anything is said of it
        session = self.running(session_id)
        if session is None:
            stored = await self._stored(session_id, at)
            allow(stored.record)
            await check_position(at, stored, self._pieces)
            if stored.state.finish:
                return ended(stored)
            session = self.running(session_id) or await self._open(stored, trace)
        allow(session.record)
        check_range(at, session.record)
        return session

    def read(self, session: Session, wake: Callable[[], None], offset: int = 0, digest: bytes = b"") -> Reader:
        """A reader from `offset` on."""
        if self._table.sessions.get(session.id) is session:
            return self._table.read(session, wake, offset, digest)
        reader = Reader(session, wake, _nothing, offset, digest)
        session.readers[reader] = None
        return reader

    def leave(self, reader: Reader, *, detach: bool) -> None:
        """The reader's client is gone, or has everything. A session that runs elsewhere is cancelled there, unless
        the last reader here detached.
        """
        session = reader.session
        if self._table.sessions.get(session.id) is session:
            self._table.leave(reader, detach=detach)
            return
        session.readers.pop(reader, None)
        following = self._following.get(session.id)
        if following is None or following.session is not session or session.readers:
            return
        running = not session.done
        del self._following[session.id]
        following.stop(Unavailable(f"session {session.id}", "nobody reads it"))
        if running and not detach:
            self._mark(session.id)

    def close(self, error: HedgerowError) -> None:
        """Take nothing over any more; readers of what runs elsewhere get `error`."""
        self._takeover.closed = error
        for following in list(self._following.values()):
            following.stop(error)

    async def _stored(self, session_id: str, at: Position) -> Stored:
        """Where a client shows that it has something of a session that is not there, that is waited for: its owner may
        write it again. Raises LostSuffix where nobody does, and nobody can make it again without its prompt.
        """
        await self._takeover.settled(session_id)
        loop, delay = asyncio.get_running_loop(), FIRST_DELAY
        end = loop.time() + self._times.repair
        while True:
            try:
                stored = await self._store.get(session_id)
                if not (at.tokens and at.digest) or stored.state.length or stored.state.finish is not Finish.ERROR:
                    return stored
                raise SessionUnknown(session_id)  # only the failed one is there whose place it had taken
            except SessionUnknown:
                if not at.digest:
                    raise
                if loop.time() >= end:
                    if at.tokens:
                        raise lost_suffix(session_id, at.tokens, at.digest, 0, b"") from None
                    raise
            await asyncio.sleep(delay * random.uniform(0.5, 1.0))
            delay = min(2 * delay, LAST_DELAY)

    async def _open(self, stored: Stored, trace: Trace) -> Session:
        taken = await self._takeover.take(stored, trace)
        if taken is not None:
            return taken
        if self._takeover.closed is not None:
            raise self._takeover.closed
        session_id = stored.record.session_id
        following = self._following.get(session_id)
        if following is None:
            options = self._takeover.options(stored.record)
            take = partial(self._takeover.take, trace=trace)
            following = Following(stored, options, self._store, take, self._move, self._times)
            self._following[session_id] = following
            following.task.add_done_callback(lambda done: self._forget(session_id, done))
        return following.session

    def _forget(self, session_id: str, task: asyncio.Task[None]) -> None:
        following = self._following.get(session_id)
        if following is not None and following.task is task:
            del self._following[session_id]

    def _move(self, before: Session, now: Session) -> None:
        """Readers of a session that was followed go on in `now`."""
        for reader in list(before.readers):
            if self._table.sessions.get(now.id) is now:
                self._table.move(reader, now)
            else:
                reader.move(now, _nothing)

    def _mark(self, session_id: str) -> None:
        if session_id not in self._marking:
            task = self._marking[session_id] = asyncio.create_task(self._mark_now(session_id))
            task.add_done_callback(lambda done: self._marking.pop(session_id, None))

    async def _mark_now(self, session_id: str) -> None:
        try:
            await persist(lambda: self._store.mark_cancel(session_id), self._times.patience)
        except HedgerowError as refused:
            log.info("a session was not cancelled", session=session_id, why=refused.message)


def _nothing(session: Session) -> None:
    """What runs elsewhere is not held for a slow reader."""
