"""Ends that the store does not know of.

A session that ends here while the store is away is recorded as running: nobody would act on a cancel, and its
idempotency key would be taken until its retention is over. So its end is written when the store is back.
"""

from __future__ import annotations

from typing import Protocol

from hedgerow.errors import HedgerowError, Overloaded, Unavailable
from hedgerow.rpc.logs import get_log
from services.gateway.messages import Granted, State, Stored, Usage
from services.gateway.types import Finish, Record

ALL = (1 << 31) - 1  # from this offset on there are no tokens
log = get_log(__name__)


class Store(Protocol):
    """The store as far as ends need it. Every method raises what the store refuses, and Unavailable."""

    owner: bytes

    async def get(self, session_id: str, from_offset: int = 0) -> Stored:
        """A session as it is recorded."""

    async def acquire(self, record: Record) -> Granted:
        """A new lease. Raises Fenced while the session's owner lives."""

    async def end(self, record: Record, epoch: int, finish: Finish, usage: Usage) -> State:
        """What is recorded then: an earlier end wins."""


class Endings:
    """Writes the ends of sessions that nobody runs. At most `limit` wait for a store that is away."""

    def __init__(self, store: Store, limit: int) -> None:
        self._store, self._limit = store, limit
        self._waiting: dict[str, bytes] = {}  # birth marks by session, oldest first

    def __len__(self) -> int:
        return len(self._waiting)

    def remember(self, record: Record) -> None:
        """The session has ended here, with an error, and the store has it as running."""
        self._waiting.setdefault(record.session_id, record.birth)
        if len(self._waiting) > self._limit:
            dropped = next(iter(self._waiting))
            del self._waiting[dropped]
            log.warning("an end stays unrecorded: too many wait", session=dropped, limit=self._limit)

    async def record(self) -> None:
        """Write what waits, as long as the store answers."""
        for session_id in list(self._waiting):
            try:
                await self.recorded(session_id)
            except (Unavailable, Overloaded):
                return

    async def recorded(self, session_id: str) -> None:
        """Return once the end of this session, if one waits, is on record. Raises Unavailable, Overloaded."""
        birth = self._waiting.get(session_id)
        if birth is None:
            return
        try:
            stored = await self._store.get(session_id, ALL)
            if stored.record.birth == birth:
                await self.end(stored, Finish.ERROR)
        except (Unavailable, Overloaded):
            raise
        except HedgerowError as refused:  # it is gone, or another gateway's by now
            log.info("an end was not recorded", session=session_id, why=refused.message)
        self._waiting.pop(session_id, None)

    async def cancelled(self, session_id: str, finish: Finish = Finish.CANCELLED) -> None:
        """End a session that carries a cancel mark, unless a live gateway runs it: that one sees the mark."""
        try:
            await self.end(await self._store.get(session_id, ALL), finish)
        except HedgerowError as refused:
            log.debug("a cancel is left to the owner", session=session_id, why=refused.message)

    async def end(self, stored: Stored, finish: Finish) -> None:
        """End a session that does not run here. Raises Fenced while another gateway runs it, NotFound, Unavailable."""
        record, state = stored.record, stored.state
        if state.finish:
            return
        epoch = state.epoch
        if state.owner != self._store.owner:
            epoch, state = await self._store.acquire(record)
        usage = state.usage._replace(prompt_tokens=len(record.prompt), completion_tokens=state.length)
        await self._store.end(record, epoch, finish, usage)
