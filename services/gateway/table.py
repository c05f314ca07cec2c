"""The running sessions of one gateway, between their verifier and their store.

One message per step and hop: a step's updates become one append, an append's answers one message of committed offsets.
Nothing is released to a reader before the store has it. Single-threaded and without waiting: whoever calls brings what
happened, and what is to be sent goes out through two small protocols.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from hedgerow.errors import (
    Fenced,
    HedgerowError,
    InvariantViolation,
    LostSuffix,
    Overloaded,
    SessionDeleted,
    Unavailable,
)
from services.gateway.messages import Append, Appended, AppendStatus, Granted, Start, State, Stored, Timings, Update
from services.gateway.reader import Reader
from services.gateway.session import Gap, Options, Session
from services.gateway.types import Finish, Record

# A verifier whose updates never fit is broken; attaching again and again would hide it.
MAX_ATTEMPTS = 8
# Answers that end a session here but not in the store, where it is still this gateway's.
LEFT_RUNNING = frozenset(
    (AppendStatus.UNAVAILABLE, AppendStatus.GAP, AppendStatus.CONFLICT, AppendStatus.DIGEST_MISMATCH)
)


class Engine(Protocol):
    """The verifier as a session sees it. Calls only enqueue; what is enqueued together may travel together."""

    def start(self, start: Start) -> None:
        """Begin, or go on, under a new attempt."""

    def cancel(self, session_id: str, epoch: int, attempt: int) -> None:
        """Stop computing."""

    def committed(self, session_id: str, epoch: int, attempt: int, offset: int) -> None:
        """The store has everything below `offset`, and so much may be forgotten."""


class Store(Protocol):
    """The commit log as a session sees it."""

    def append(self, entries: Sequence[Append]) -> None:
        """Enqueue one message; its answers come in the same order, and messages are answered in the order sent."""


class Leases(Protocol):
    """Leases as a session sees them. Calls only enqueue."""

    def release(self, record: Record, epoch: int) -> None:
        """Give a lease up: the session goes on wherever somebody asks for it."""

    def repair(
        self, record: Record, epoch: int, floor: int, repaired: Callable[[Granted | HedgerowError], None]
    ) -> None:
        """Take a session of this gateway, under `epoch`, again under an epoch above `floor`: the store has forgotten
        some of it, the record included where need be, or a verifier has seen that epoch. Refused with Fenced where it
        is another gateway's by now.
        """


class SessionTable:
    """Sessions by id, from their first lease until the store has their end.

    `lag`: committed tokens that a reader may be behind before its sequence is held. `patience`: seconds for which it
    is held before the session ends. `unrecorded` is called with the record of each session that ended here while the
    store may have it as running, under this gateway's lease.
    """

    def __init__(
        self,
        engine: Engine,
        store: Store,
        leases: Leases,
        *,
        lag: int,
        patience: float,
        unrecorded: Callable[[Record], None] = lambda record: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine, self._store, self._leases = engine, store, leases
        self._unrecorded, self._clock = unrecorded, clock
        self._lag, self._patience = lag, patience
        self.sessions: dict[str, Session] = {}
        self.dropped = 0
        """Updates of an old attempt, or of a session that is gone."""

    def begin(self, record: Record, epoch: int, options: Options) -> Session:
        """Own a session that the store has just created, and attach it."""
        return self._begin(Session(record, epoch, options))

    def take_over(self, stored: Stored, epoch: int, options: Options) -> Session:
        """Own a session that another gateway left, and attach it. `stored` has all of its committed tokens."""
        return self._begin(Session.restored(stored, epoch, options))

    def pause(self, session: Session, error: HedgerowError | None = None) -> None:
        """Stop computing and give the lease up, once the appends on their way have settled.

        The session stays as running in the store. Whoever still reads gets `error`, by default a retryable one.
        """
        if session.end is not None or session.pausing:
            return
        session.pausing = error or Unavailable(f"session {session.id}", "it is paused; resume it", 0.1)
        self._engine.cancel(session.id, session.epoch, session.attempt)
        self._settle(session)

    def read(self, session: Session, wake: Callable[[], None], offset: int = 0, digest: bytes = b"") -> Reader:
        """A reader from `offset` on; `digest` is the one there, empty: not known. See Reader."""
        reader = Reader(session, wake, self._taken, offset, digest)
        session.readers[reader] = None
        return reader

    def move(self, reader: Reader, session: Session) -> None:
        """A reader of a session that another gateway ran goes on in the same one, which runs here now."""
        reader.move(session, self._taken)

    def leave(self, reader: Reader, *, detach: bool = False) -> None:
        """The reader's client is gone, or has everything. A running session without readers is cancelled, unless the
        last one detached.
        """
        session = reader.session
        session.readers.pop(reader, None)
        if not session.readers and session.end is None and not detach:
            deadline = session.options.deadline
            late = deadline is not None and self._clock() >= deadline
            self.cancel(session, Finish.DEADLINE if late else Finish.CANCELLED)

    def cancel(self, session: Session, reason: Finish = Finish.CANCELLED, error: HedgerowError | None = None) -> bool:
        """End a session now, whatever the verifier still sends. False: it had ended."""
        if session.end is not None:
            return False
        self._engine.cancel(session.id, session.epoch, session.attempt)
        self._store.append([session.close(reason, self._now_ns(), error)])
        return True

    def stepped(self, updates: Sequence[Update], timings: Timings) -> None:
        """A message of the verifier: append all of it at once."""
        now = self._now_ns()
        entries = [entry for update in updates if (entry := self._extend(update, timings, now))]
        if entries:
            self._store.append(entries)

    def appended(self, results: Sequence[Appended]) -> None:
        """An answer of the store: release what it has, and tell the verifier once a session."""
        now = self._now_ns()
        grown: dict[str, Session] = {}
        for result in results:
            session = self.sessions.get(result.session_id)
            if session is None:
                continue  # failed, while its append was on its way
            if result.status is not AppendStatus.OK:
                self._refused(session, result)
                continue
            session.acknowledge(result.state, now)
            grown[session.id] = session
            if session.done:
                del self.sessions[session.id]
            elif result.state.cancel_marked:
                self.cancel(session)
            self._settle(session)
        for session in grown.values():
            self._tell(session)

    def engine_lost(self, error: HedgerowError) -> None:
        """The verifier's stream broke: what runs there ends with `error`, on record."""
        now = self._now_ns()
        running = [session for session in self.sessions.values() if session.end is None]
        if running:
            self._store.append([session.close(Finish.ERROR, now, error) for session in running])

    def store_lost(self, error: HedgerowError) -> None:
        """The store stayed away too long: nothing more can be released."""
        for session in list(self.sessions.values()):
            self._fail(session, error)
            self._unrecorded(session.record)

    def sweep(self) -> None:
        """End sessions whose readers do not read. To be called about once a second."""
        now = self._clock()
        for session in list(self.sessions.values()):
            if session.end is not None or session.held_since is None:
                continue  # an end on its way needs no reader, and there may be none
            if now - session.held_since > self._patience:
                behind = session.acked - max((reader.cursor for reader in session.readers), default=0)
                self.cancel(session, Finish.ERROR, Overloaded("the client's stream", behind, self._lag, 1.0))

    def refresh(self, age: float) -> None:
        """Append nothing to sessions whose last append is `age` seconds old: what runs must not expire."""
        now = self._now_ns()
        old = [s for s in self.sessions.values() if s.end is None and s.settled and now - s.appended_ns >= age * 1e9]
        entries = [session.refresh(now) for session in old if not session.pausing]
        if entries:
            self._store.append(entries)

    def _extend(self, update: Update, timings: Timings, now_ns: int) -> Append | None:
        session = self.sessions.get(update.session_id)
        if (
            session is None
            or session.end is not None
            or session.pausing
            or (update.epoch, update.attempt) != (session.epoch, session.attempt)
        ):
            self.dropped += 1
            return None
        try:
            return session.extend(update, timings, now_ns)
        except Gap:
            self._attach(session)
            return None
        except InvariantViolation as error:
            self._engine.cancel(session.id, session.epoch, session.attempt)
            return session.close(Finish.ERROR, now_ns, error)

    def _begin(self, session: Session) -> Session:
        self.sessions[session.id] = session
        self._attach(session)
        return session

    def _settle(self, session: Session) -> None:
        """Drop a session that is to be paused, once nothing of it is on its way."""
        if session.pausing and session.end is None and session.settled:
            del self.sessions[session.id]
            session.fail(session.pausing)
            self._leases.release(session.record, session.epoch)

    def _attach(self, session: Session) -> None:
        if session.attempt == MAX_ATTEMPTS:
            self.cancel(session, Finish.ERROR, InvariantViolation(f"session {session.id}: updates with gaps"))
            return
        session.attempt += 1
        options, left = session.options, 0
        if options.deadline is not None:
            left = max(1, int((options.deadline - self._clock()) * 1000))
        self._engine.start(
            Start(
                session.record, session.epoch, session.attempt, session.tokens, session.digest, options.priority, left,
                options.trace, options.return_trees,
            )
        )  # fmt: skip

    def _taken(self, session: Session) -> None:
        if session.told < session.acked:
            self._tell(session)

    def _tell(self, session: Session) -> None:
        """Tell the verifier the committed offset, but no further than `lag` beyond what a reader has taken.

        So a sequence whose client does not read runs into the verifier's own bound on uncommitted tokens and waits.
        """
        offset = session.acked
        if session.readers and not session.done:
            offset = min(offset, max(reader.cursor for reader in session.readers) + self._lag)
        if offset > session.told or session.done:
            session.told = offset
            self._engine.committed(session.id, session.epoch, session.attempt, offset)
        if session.told == session.acked:
            session.held_since = None
        elif session.held_since is None:
            session.held_since = self._clock()

    def _refused(self, session: Session, result: Appended) -> None:
        status, state = result.status, result.state
        if status is AppendStatus.FINISHED:
            del self.sessions[session.id]
            self._engine.cancel(session.id, session.epoch, session.attempt)
            session.adopt(state)
        elif status in LEFT_RUNNING:
            self._fail(session, _left_running(session, result))
            self._unrecorded(session.record)
        elif status in (AppendStatus.NOT_FOUND, AppendStatus.FORGOTTEN):
            self._fail(session, _lost_suffix(session, state))
        elif status is AppendStatus.GONE:
            self._fail(session, SessionDeleted(session.id))
        else:
            self._fail(session, Fenced(session.id, session.epoch, state.epoch))

    def _fail(self, session: Session, error: HedgerowError) -> None:
        del self.sessions[session.id]
        self._engine.cancel(session.id, session.epoch, session.attempt)
        session.fail(error)

    def _now_ns(self) -> int:
        return int(self._clock() * 1e9)


def _left_running(session: Session, result: Appended) -> HedgerowError:
    status, state = result.status, result.state
    if status is AppendStatus.UNAVAILABLE:
        return Unavailable("kvstore", "it cannot take writes now")
    if status is AppendStatus.GAP:
        return _lost_suffix(session, state)
    return InvariantViolation(f"session {session.id}: {status.name} at {session.acked}")


def _lost_suffix(session: Session, state: State) -> LostSuffix:
    metadata = {"released": session.acked, "stored": state.length}
    return LostSuffix(f"session {session.id}: the store lost its end", metadata=metadata)
