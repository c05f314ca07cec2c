"""A session that another gateway runs, as readers here see it: its log, followed until it ends or runs here.

Its owner may die. So where the log does not grow for half a lease, this gateway tries to take the session: the store
grants that only when the lease has ended. Readers do not notice.

Or its owner lives and does not run it any more: it has ended the session, and the store forgot the end. Nobody can ask
it; so where the log does not grow for long, or stays shorter than what a client has, the session is taken all the same.
An owner that did run it is fenced by that, and its clients come here. The same where the store lost the session and its
owner does not write it again: the record is here, so it is written anew, and its tokens are generated again.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import NamedTuple, Protocol

from hedgerow import digest
from hedgerow.errors import (
    HedgerowError,
    Internal,
    InvariantViolation,
    Overloaded,
    SessionFailed,
    SessionUnknown,
    Unavailable,
)
from hedgerow.rpc.logs import get_log
from services.gateway.leases import FIRST_DELAY, LAST_DELAY
from services.gateway.messages import Growth, State, Stored
from services.gateway.reader import lost_suffix
from services.gateway.session import Options, Session
from services.gateway.types import Finish

REPAIRS = 2.0  # leases for which an owner may leave a log shorter than what a client has
FORSAKEN = 8.0  # leases without a new token after which a session is taken from an owner that lives
EAGER = 16  # part of the usual quiet after which a lease is tried at first: its owner may just be giving it up
log = get_log(__name__)


class Store(Protocol):
    """The store as far as following needs it."""

    def tail(self, session_id: str, from_offset: int) -> AsyncGenerator[Growth, None]:
        """A session's tokens from an offset on, as they are committed, until its end."""


class Times(NamedTuple):
    """In seconds."""

    quiet: float
    """Without growth until the lease is tried; half of one."""
    repair: float
    """For which an owner may leave a log shorter than what a client has, or a lost session unwritten."""
    forsaken: float
    """Without growth until a session is taken from an owner that lives."""
    patience: float
    """Without the store."""

    @classmethod
    def of(cls, lease: float, patience: float) -> Times:
        """Those of a gateway whose leases live `lease` seconds; see docs/guarantees.md."""
        return cls(lease / 2, REPAIRS * lease, FORSAKEN * lease, patience)


class Following:
    """One such session. `take` tries to run it here: it gives the session, or None while its owner lives, unless it is
    `forced`; one that is `lost` is written again where the store has neither it nor a tombstone.
    """

    def __init__(
        self,
        known: Stored,
        options: Options,
        store: Store,
        take: Callable[..., Awaitable[Session | None]],
        move: Callable[[Session, Session], None],
        times: Times,
    ) -> None:
        self.session = Session.restored(known, 0, options)
        self._record, self._store, self._take, self._move, self._times = known.record, store, take, move, times
        self._epoch = known.state.epoch
        self._grown_at = self._read_at = asyncio.get_running_loop().time()
        self._away_since: float | None = None  # since when the store does not answer, or does not know the session
        self._delay = FIRST_DELAY
        self._quiet_for = times.quiet / EAGER
        self.task = asyncio.create_task(self._run())

    def stop(self, error: HedgerowError) -> None:
        """Follow no longer. Whoever reads gets what is there, then `error`."""
        self.task.cancel()
        if not self.session.done:
            self.session.fail(error)

    async def _run(self) -> None:
        try:
            while not self.session.done:
                self._check_read()
                if await self._turn():
                    return
        except HedgerowError as error:
            self.session.fail(error)
        except Exception as fault:  # noqa: BLE001  readers must be told, whatever happened
            log.error("following failed", exception=fault, **self.session.named)
            self.session.fail(Internal(f"session {self.session.id} could not be followed"))

    async def _turn(self) -> bool:
        """Follow while the log grows. True: the session runs here now. Raises what cannot be waited for."""
        try:
            try:
                await self._follow()
            except TimeoutError:
                return await self._quiet()
        except (Unavailable, Overloaded) as away:
            await self._wait(away, self._times.patience)
        except SessionUnknown:
            return await self._lost()
        return False

    async def _follow(self) -> None:
        """Raises TimeoutError where nothing comes for a while."""
        async with aclosing(self._store.tail(self.session.id, len(self.session.tokens))) as growths:
            while not self.session.done:
                async with asyncio.timeout(self._quiet_for * random.uniform(0.75, 1.0)):
                    growth = await anext(growths, None)
                if growth is None:
                    raise Unavailable("kvstore", "it ended the stream", 0.0)
                self._away_since, self._delay, self._quiet_for = None, FIRST_DELAY, self._times.quiet
                self._grow(growth)
                self._check_read()

    def _grow(self, growth: Growth) -> None:
        session = self.session
        if growth.state is not None and growth.offset < len(session.tokens):
            raise SessionUnknown(session.id)  # what is there is the failed one whose place it had taken
        if growth.offset != len(session.tokens):
            raise InvariantViolation(f"session {session.id}: its log goes on at {growth.offset}")
        after = digest.extend(session.acked_digest, growth.tokens)
        if growth.digest != after:
            end = growth.offset + len(growth.tokens)
            raise lost_suffix(session.id, end, after, end, growth.digest)
        session.tokens.extend(growth.tokens)
        session.notes.extend(growth.notes)
        session.acked, session.acked_digest = len(session.tokens), after
        self._grown_at = asyncio.get_running_loop().time()
        if growth.state is not None:
            finish(session, growth.state)
        session.wake()

    def _check_read(self) -> None:
        """Whoever let it be followed may have gone before it read. Raises Unavailable."""
        now = asyncio.get_running_loop().time()
        if self.session.readers:
            self._read_at = now
        elif now - self._read_at >= self._times.quiet:
            raise Unavailable(f"session {self.session.id}", "nobody reads it", 0.0)

    async def _quiet(self) -> bool:
        self._away_since, self._quiet_for = None, min(2 * self._quiet_for, self._times.quiet)
        waits = any(reader.waits for reader in self.session.readers)
        silent = asyncio.get_running_loop().time() - self._grown_at
        return await self._try(forced=silent >= (self._times.repair if waits else self._times.forsaken))

    async def _lost(self) -> bool:
        """The store does not know the session. Its owner, if it lives and runs it, writes it again; else we do."""
        try:
            await self._wait(SessionUnknown(self.session.id), self._times.repair)
        except SessionUnknown:
            return await self._try(lost=True)
        return False

    async def _try(self, *, forced: bool = False, lost: bool = False) -> bool:
        session = self.session
        state = State(length=len(session.tokens), digest=session.acked_digest, epoch=self._epoch)
        taken = await self._take(Stored(self._record, state, session.tokens, session.notes), forced=forced, lost=lost)
        if taken is None:
            return False
        self._move(session, taken)
        return True

    async def _wait(self, error: HedgerowError, patience: float) -> None:
        """Back off. Raises `error` where that has been so for `patience` seconds."""
        now = asyncio.get_running_loop().time()
        self._away_since = now if self._away_since is None else self._away_since
        if now - self._away_since >= patience:
            raise error
        await asyncio.sleep(self._delay * random.uniform(0.5, 1.0))
        self._delay = min(2 * self._delay, LAST_DELAY)


def ended(stored: Stored) -> Session:
    """A session that is over, for readers who come after its end. One that ended with an error gives that."""
    session = Session.ended(stored)
    if stored.state.finish is Finish.ERROR:
        session.error = SessionFailed(session.id)
    return session


def finish(session: Session, state: State) -> None:
    """The log says that the session is over. One that failed before its first token gives way to whoever asks again."""
    session.adopt(state)
    if session.error is None and session.has_failed:
        session.error = Unavailable(f"session {session.id}", "it failed before its first token; ask again", 0.1)
    elif session.error is None and state.finish is Finish.ERROR:
        session.error = SessionFailed(session.id)
