"""Taking a session over that no gateway runs: a new lease, all that is committed, and on it goes here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from hedgerow import digest
from hedgerow.errors import Fenced, HedgerowError, Overloaded, Unavailable
from hedgerow.rpc.logs import get_log
from services.gateway.endings import ALL
from services.gateway.following import ended
from services.gateway.leases import persist
from services.gateway.messages import Granted, Stored
from services.gateway.session import Options, Session
from services.gateway.table import SessionTable
from services.gateway.types import NO_TRACE, Finish, Record, Trace

log = get_log(__name__)


class Store(Protocol):
    """The store as far as it is needed here. Every method raises what the store refuses, and Unavailable."""

    owner: bytes

    async def get(self, session_id: str, from_offset: int = 0) -> Stored:
        """A session as it is recorded."""

    async def acquire(self, record: Record, *, floor: int, repair: bool, only_expired: bool) -> Granted:
        """A new lease, of an epoch above `floor`; `repair`: of a session that may have to be written again. Raises
        Fenced while the session's owner lives, if `only_expired`.
        """


class Leases(Protocol):
    """Leases that are being given up."""

    def release(self, record: Record, epoch: int) -> None:
        """Give a lease up. Only enqueues."""

    async def released(self, session_id: str) -> None:
        """Return once no call for this session is on its way."""


class TakeOver:
    """`most` sessions run here. `settled` waits for what is still to be written of a session here. `patience` in
    seconds, of the store's absence after a grant.
    """

    def __init__(
        self,
        table: SessionTable,
        store: Store,
        leases: Leases,
        *,
        most: int,
        patience: float,
        settled: Callable[[str], Awaitable[None]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._table, self._store, self._leases = table, store, leases
        self.most, self._patience, self._clock = most, patience, clock
        self.settled = settled or leases.released
        self._taking: dict[str, asyncio.Task[Session | None]] = {}
        self._unsure: dict[str, None] = {}  # sessions of which a grant may have been lost on its way
        self.closed: HedgerowError | None = None
        """Why nothing is taken any more."""

    def __len__(self) -> int:
        """Sessions that are being taken."""
        return len(self._taking)

    async def take(
        self, known: Stored, trace: Trace = NO_TRACE, *, forced: bool = False, lost: bool = False
    ) -> Session | None:
        """The session, running here under `trace`; None while another gateway runs it, or only lives, unless `forced`.
        One that is `lost` is written again where the store has neither it nor a tombstone.
        Once for all who ask at the same time, and not cancelled with any of them: the store may have granted it.
        """
        session_id = known.record.session_id
        task = self._taking.get(session_id)
        if task is None:
            task = self._taking[session_id] = asyncio.create_task(self._take_now(known, trace, forced, lost))
            task.add_done_callback(lambda done: self._took(session_id, done))
        return await asyncio.shield(task)

    def _took(self, session_id: str, task: asyncio.Task[Session | None]) -> None:
        del self._taking[session_id]
        if not task.cancelled():
            task.exception()  # those who waited may be gone

    async def _take_now(self, known: Stored, trace: Trace, forced: bool, lost: bool) -> Session | None:
        record = known.record
        await self.settled(record.session_id)
        if running := self._table.sessions.get(record.session_id):
            return running
        if self.closed is not None:
            raise self.closed
        if len(self._table.sessions) >= self.most:
            raise Overloaded("the gateway", len(self._table.sessions), self.most, 1.0)
        granted = await self._granted(known, forced, lost)
        if granted is None:
            return None
        try:
            stored = await persist(lambda: self._whole(known, granted), self._patience)
        except HedgerowError:
            self._leases.release(record, granted.epoch)
            raise
        return self._begin(stored, granted.epoch, trace)

    async def _granted(self, known: Stored, forced: bool, lost: bool) -> Granted | None:
        """A lease; None while another gateway holds it, unless `forced`."""
        record, ours = known.record, known.state.owner == self._store.owner
        session_id = record.session_id
        if session_id in self._unsure and not lost:
            ours = (await self._store.get(session_id, ALL)).state.owner == self._store.owner
            self._unsure.pop(session_id, None)  # settle may have been as quick
        try:
            floor = known.state.epoch if lost else 0
            return await self._store.acquire(record, floor=floor, repair=lost, only_expired=not (ours or forced))
        except Fenced:
            return None
        except Unavailable:
            self.doubt(session_id)
            raise

    async def _whole(self, known: Stored, granted: Granted) -> Stored:
        """All that the store has: nobody else can append now."""
        state, have = granted.state, len(known.tokens)
        if (state.length, state.digest) == (have, known.state.digest):
            return known._replace(state=state)
        if state.length > have:
            more = await self._store.get(known.record.session_id, have)
            if digest.extend(known.state.digest, more.tokens) == state.digest:
                tokens, notes = [*known.tokens, *more.tokens], [*known.notes, *more.notes]
                return Stored(known.record, state, tokens, notes)
        return await self._store.get(known.record.session_id)

    def _begin(self, stored: Stored, epoch: int, trace: Trace) -> Session:
        if stored.state.finish:
            return ended(stored)
        options = self.options(stored.record, trace)
        session = self._table.take_over(stored, epoch, options)
        self._table.counts.taken_over += 1
        log.info("took a session over", **session.named, epoch=epoch, tokens=len(session.tokens))
        self.admit(session, options.deadline, cancelled=stored.state.cancel_marked)
        return session

    def admit(self, session: Session, deadline: float | None, *, cancelled: bool = False) -> None:
        """Of a session that begins to run here: what was over before ends or pauses it, before its first step."""
        if cancelled:
            self._table.cancel(session)
        elif deadline is not None and deadline <= self._clock():
            self._table.cancel(session, Finish.DEADLINE)
        elif self.closed is not None:
            self._table.pause(session, self.closed)

    def options(self, record: Record, trace: Trace = NO_TRACE) -> Options:
        """What its first client asked for."""
        deadline = None
        if record.deadline_unix_ms:
            deadline = self._clock() + (record.deadline_unix_ms * 1_000_000 - time.time_ns()) / 1e9
        return Options(record.priority, deadline, trace, record.return_steps, record.return_trees)

    def doubt(self, session_id: str) -> None:
        """This gateway may have the session's lease without knowing, and does not run it."""
        self._unsure[session_id] = None
        if len(self._unsure) > self.most:
            del self._unsure[next(iter(self._unsure))]

    def __contains__(self, session_id: str) -> bool:
        return session_id in self._taking

    async def settle(self) -> None:
        """Give back what this gateway may have been granted without hearing of it. To be called now and then."""
        for session_id in list(self._unsure):
            if session_id in self._taking or session_id in self._table.sessions:
                continue
            try:
                stored = await self._store.get(session_id, ALL)
            except Unavailable:
                return
            except HedgerowError:
                self._unsure.pop(session_id, None)
                continue
            if self._unsure.pop(session_id, 0) is None and stored.state.owner == self._store.owner:
                self._leases.release(stored.record, stored.state.epoch)
