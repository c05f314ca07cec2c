"""Lease calls for running sessions, tried again for as long as the store is away.

`table.py` asks, and is told through a callback: it does not wait itself.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from hedgerow.errors import Fenced, HedgerowError, Overloaded, SessionUnknown, Unavailable
from hedgerow.rpc.logs import get_log
from services.gateway.endings import ALL
from services.gateway.messages import Granted, State, Stored
from services.gateway.types import Record

FIRST_DELAY, LAST_DELAY = 0.05, 1.0  # seconds between tries while the store is away
AT_ONCE = 16  # calls on their way; with a store that is away, all sessions of this gateway wait here
Answer = TypeVar("Answer")
Repaired = Callable[[Granted | HedgerowError], None]
log = get_log(__name__)


class Store(Protocol):
    """The store as far as leases need it. Every method raises what the store refuses, and Unavailable."""

    owner: bytes

    async def get(self, session_id: str, from_offset: int = 0) -> Stored:
        """A session as it is recorded."""

    async def acquire(self, record: Record, *, floor: int, repair: bool, only_expired: bool) -> Granted:
        """A new lease."""

    async def release(self, record: Record, epoch: int) -> State:
        """A lease is given up."""


class Leases:
    """One task a session at most, bounded by the sessions that there are. `patience` in seconds, of each task."""

    def __init__(self, store: Store, patience: float) -> None:
        self._store, self._patience = store, patience
        self._places = asyncio.Semaphore(AT_ONCE)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.kept: Callable[[str], None] = lambda session_id: None
        """Called with the id of a session that may still be this gateway's: the store was away for too long."""

    def __len__(self) -> int:
        return len(self._tasks)

    def release(self, record: Record, epoch: int) -> None:
        """See ports.Leases."""
        self._run(record.session_id, lambda: self._release(record, epoch))

    def repair(self, record: Record, epoch: int, floor: int, repaired: Repaired) -> None:
        """See ports.Leases."""
        self._run(record.session_id, lambda: self._repair(record, epoch, floor, repaired))

    async def released(self, session_id: str) -> None:
        """Return once no call for this session is on its way: then somebody else, or we, may take it."""
        if task := self._tasks.get(session_id):
            await asyncio.wait([task])

    def _run(self, session_id: str, work: Callable[[], Awaitable[None]]) -> None:
        before = self._tasks.get(session_id)
        task = asyncio.ensure_future(_after(before, work))
        self._tasks[session_id] = task
        task.add_done_callback(lambda done: self._forget(session_id, done))

    def _forget(self, session_id: str, task: asyncio.Task[None]) -> None:
        if self._tasks.get(session_id) is task:
            del self._tasks[session_id]

    async def _release(self, record: Record, epoch: int) -> None:
        try:
            await self._persist(lambda: self._store.release(record, epoch))
        except HedgerowError as refused:  # it is another gateway's by now, or gone
            log.info("a lease was not released", **record.named, why=refused.message)
            if isinstance(refused, Unavailable | Overloaded):
                self.kept(record.session_id)

    async def _repair(self, record: Record, epoch: int, floor: int, repaired: Repaired) -> None:
        try:
            outcome: Granted | HedgerowError = await self._persist(lambda: self._take_again(record, epoch, floor))
        except HedgerowError as refused:
            outcome = refused
        except Exception as fault:  # noqa: BLE001  the session must be told, whatever happened
            log.error("a repair failed", exception=fault, **record.named)
            outcome = Unavailable("kvstore", "a lost session could not be repaired")
        repaired(outcome)

    async def _take_again(self, record: Record, epoch: int, floor: int) -> Granted:
        """The check keeps a gateway that was fenced from taking back what another one has by right. Between it and the
        grant another gateway may take the session: then that one is fenced, and its clients resume here.
        """
        try:
            there = await self._store.get(record.session_id, ALL)
            state, another = there.state, there.record.birth != record.birth
            if another and (state.length or not state.finish):
                raise Fenced(record.session_id, epoch, state.epoch)
            if state.epoch > epoch or (state.epoch == epoch and state.owner != self._store.owner):
                raise Fenced(record.session_id, epoch, state.epoch)
        except SessionUnknown:
            log.warning("the store lost a session, which is written again", **record.named)
        return await self._store.acquire(record, floor=max(floor, epoch), repair=True, only_expired=False)

    async def _persist(self, call: Callable[[], Awaitable[Answer]]) -> Answer:
        async def placed() -> Answer:
            async with self._places:
                return await call()

        return await persist(placed, self._patience)


async def persist(call: Callable[[], Awaitable[Answer]], patience: float) -> Answer:
    """What `call` gives, tried again with back-off while the store is away, for `patience` seconds."""
    loop, delay = asyncio.get_running_loop(), FIRST_DELAY
    end = loop.time() + patience
    while True:
        try:
            return await call()
        except (Unavailable, Overloaded):
            if loop.time() >= end:
                raise
        await asyncio.sleep(delay * random.uniform(0.5, 1.0))
        delay = min(2 * delay, LAST_DELAY)


async def _after(before: asyncio.Task[None] | None, work: Callable[[], Awaitable[None]]) -> None:
    if before is not None:
        await asyncio.wait([before])
    await work()
