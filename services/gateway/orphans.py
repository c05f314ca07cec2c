"""Sessions that nobody reads, here and anywhere.

Here: a session whose clients left it to itself goes on for a while and is paused then; a Resume lets it go on.
Anywhere: the gateway of a session may have died. What its client wanted to outlive a broken call waits for a Resume;
what has been cancelled, is past its deadline, or should have ended with its client's call is ended by a sweep.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from hedgerow.rpc.logs import get_log
from services.gateway.messages import Expired, ExpiredPage
from services.gateway.table import SessionTable
from services.gateway.types import Finish

PAGES = 64  # that one sweep reads at most; the next one goes on behind them
OVERDUE = 1_000  # milliseconds after its deadline at which a session without a gateway is ended
log = get_log(__name__)


class Orphans:
    """Pauses what runs here without a reader for `patience` seconds of `clock`."""

    def __init__(self, table: SessionTable, patience: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._table, self.patience, self._clock = table, patience, clock
        self._since: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._since)

    def of_tenant(self, tenant: str) -> int:
        """How many of a tenant's sessions run here and had no reader at the last sweep, nor have one now."""
        found = (self._table.sessions.get(name) for name in self._since)
        return sum(1 for each in found if each and not each.readers and each.record.tenant == tenant)

    def sweep(self) -> None:
        """To be called about once a second."""
        now, before = self._clock(), self._since
        self._since = {}
        for session in list(self._table.sessions.values()):
            if session.readers or session.end is not None or session.pausing:
                continue
            since = self._since[session.id] = before.get(session.id, now)
            if now - since >= self.patience:
                self._table.counts.paused += 1
                log.info("nobody reads it: paused", **session.named, tokens=session.acked)
                self._table.pause(session)


class Store(Protocol):
    """The store as far as sweeps need it."""

    async def expired(self, cursor: str = "", limit: int = 0) -> ExpiredPage:
        """Running sessions that nobody drives."""


class Endings(Protocol):
    """See endings.py."""

    async def cancelled(self, session_id: str, finish: Finish = Finish.CANCELLED) -> None:
        """End a session, unless a live gateway runs it."""


class Sweep:
    """Ends what no gateway runs and nobody may resume. `patience` are the seconds of `clock` for which a client may
    come back to a session that should have ended with its call.
    """

    def __init__(
        self, store: Store, endings: Endings, patience: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store, self._endings, self.patience, self._clock = store, endings, patience, clock
        self._since: dict[str, float] = {}
        self._cursor = ""
        self.ended = 0
        """Sessions that this gateway ended."""

    async def sweep(self) -> None:
        """To be called about once a lease. Raises Unavailable."""
        found: dict[str, Expired] = {}
        from_start = not self._cursor
        for _ in range(PAGES):
            page = await self._store.expired(self._cursor)
            self._cursor = page.cursor
            found.update({session.session_id: session for session in page.sessions})
            if not self._cursor:
                break
        now = self._clock()
        since = {name: self._since.get(name, now) for name, session in found.items() if not session.detach}
        self._since = since if from_start and not self._cursor else {**self._since, **since}
        for name, session in found.items():
            reason = self._reason(session, now)
            if reason is not None:
                log.info("no gateway runs it: ended", session=name, reason=reason.name)
                self._since.pop(name, None)
                self.ended += 1
                await self._endings.cancelled(name, reason)

    def _reason(self, session: Expired, now: float) -> Finish | None:
        if session.state.cancel_marked:
            return Finish.CANCELLED
        if session.deadline_unix_ms and time.time_ns() // 1_000_000 >= session.deadline_unix_ms + OVERDUE:
            return Finish.DEADLINE
        if not session.detach and now - self._since[session.session_id] >= self.patience:
            # Its client's call has died with its gateway. Where it had got nothing, its key is to be usable again.
            return Finish.CANCELLED if session.state.length else Finish.ERROR
        return None
