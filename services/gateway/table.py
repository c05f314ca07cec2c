"""The running sessions of one gateway, between their verifier and their store.

One message per step and hop: a step's updates become one append, an append's answers one message of committed offsets.
Nothing is released to a reader before the store has it. Single-threaded and without waiting: whoever calls brings what
happened, and what is to be sent goes out through the small protocols of ports.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from hedgerow.errors import (
    Fenced,
    HedgerowError,
    Internal,
    InvariantViolation,
    NotFound,
    Overloaded,
    Unavailable,
)
from hedgerow.rpc.logs import get_log
from services.gateway.messages import Append, Appended, AppendStatus, State, Stored, Timings, Update
from services.gateway.ports import Leases, Store, Verifier
from services.gateway.reader import Reader
from services.gateway.repairs import Repairs
from services.gateway.session import Gap, Options, Session
from services.gateway.types import Finish, Record
from services.gateway.upkeep import QUIET, Upkeep
from services.gateway.verifiers import Verifiers, Work

log = get_log(__name__)


class SessionTable:
    """Sessions by id, from their first lease until the store has their end.

    `lag`: committed tokens that a reader may be behind before its sequence is held. `patience`: seconds for which it
    is held before the session ends. `quiet`: see upkeep.QUIET. `unrecorded` is called with the record of each session
    that ended here while the store may have it as running, under this gateway's lease.
    """

    def __init__(
        self,
        verifiers: Verifiers,
        store: Store,
        leases: Leases,
        *,
        lag: int,
        patience: float,
        quiet: float = QUIET,
        unrecorded: Callable[[Record], None] = lambda record: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._verifiers, self._store, self._leases = verifiers, store, leases
        self._unrecorded, self._clock = unrecorded, clock
        self._lag = lag
        self.sessions: dict[str, Session] = {}
        self.counts, self._watcher = verifiers.counts, verifiers.watcher
        self._upkeep = Upkeep(self, verifiers, lag, patience, clock, quiet)
        self._repairs = Repairs(self, store, leases, self.counts, self._now_ns)

    @property
    def dropped(self) -> int:
        """Updates of an old attempt, or of a session that is gone."""
        return self.counts.dropped

    def hold(self, lag: int, patience: float) -> None:
        """From now on: how far a reader may be behind, and for how long its sequence is held then."""
        self._lag = self._upkeep.lag = lag
        self._upkeep.patience = patience

    @property
    def waiting(self) -> int:
        """Sessions without a verifier."""
        return self._verifiers.waiting

    def begin(self, record: Record, epoch: int, options: Options) -> Session:
        """Own a session that the store has just created, and attach it."""
        return self._begin(Session(record, epoch, options))

    def take_over(self, stored: Stored, epoch: int, options: Options) -> Session:
        """Own a session that another gateway left, and attach it. `stored` has all of its committed tokens."""
        return self._begin(Session.restored(stored, epoch, options))

    def pause(self, session: Session, error: HedgerowError | None = None, *, hand_over: bool = False) -> None:
        """Stop computing and give the lease up, once the appends on their way have settled.

        The session stays as running in the store. Whoever still reads gets `error`, by default a retryable one. To be
        handed over, it stays at its verifier, which holds it a while for the next gateway.
        """
        if session.end is not None or session.pausing:
            return
        session.pausing = error or Unavailable(f"session {session.id}", "it is paused; resume it", 0.1)
        if hand_over:
            self._verifiers.forget(session)
        else:
            self._verifiers.cancel(session)
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
        last one detached; then it is held for nobody.
        """
        session = reader.session
        session.readers.pop(reader, None)
        if not session.readers and session.end is None and not detach:
            deadline = session.options.deadline
            late = deadline is not None and self._clock() >= deadline
            self.cancel(session, Finish.DEADLINE if late else Finish.CANCELLED)
        elif session.end is None:
            self._taken(session)

    def cancel(self, session: Session, reason: Finish = Finish.CANCELLED, error: HedgerowError | None = None) -> bool:
        """End a session now, whatever the verifier still sends. False: it had ended."""
        if session.end is not None:
            return False
        self._verifiers.cancel(session)
        self.append([session.close(reason, self._now_ns(), error)])
        return True

    def stepped(self, updates: Sequence[Update], timings: Timings) -> None:
        """A message of the verifier: append all of it at once."""
        now = self._now_ns()
        self.append([entry for update in updates if (entry := self._extend(update, timings, now))])

    def appended(self, results: Sequence[Appended]) -> None:
        """An answer of the store: release what it has, and tell the verifier once a session."""
        now = self._now_ns()
        grown: dict[str, Session] = {}
        for result in results:
            session = self.sessions.get(result.session_id)
            if session is None or session.repairing:
                continue  # it failed, or is appended again, while its append was on its way
            if result.status is not AppendStatus.OK:
                self._repairs.refused(session, result)
                continue
            session.acknowledge(result.state, now)
            self._watcher.committed(session)
            session.repairs = 0
            grown[session.id] = session
            if session.done:
                del self.sessions[session.id]
            elif result.state.cancel_marked:
                self.cancel(session)
            self._settle(session)
        for session in grown.values():
            self._tell(session)
            if session.done:
                self._verifiers.forget(session)
                self._watcher.over(session)

    def verifier_opened(self, verifier: Verifier) -> None:
        """A stream to it is open."""
        self._verifiers.opened(verifier)

    def verifier_lost(self, verifier: Verifier, error: HedgerowError) -> None:
        """Its stream broke: what ran there goes on where there is a place."""
        self._verifiers.lost(verifier, error)

    def verifier_work(self, verifier: Verifier) -> Work:
        """What it should be doing."""
        return self._verifiers.work(verifier)

    def store_lost(self, error: HedgerowError) -> None:
        """The store stayed away too long: nothing more can be released here. A later resume may go on."""
        for session in list(self.sessions.values()):
            self.failed(session, error)

    def sweep(self) -> None:
        """See Upkeep."""
        self._upkeep.sweep()

    def refresh(self, age: float) -> None:
        """See Upkeep."""
        self._upkeep.refresh(age)

    def append(self, entries: Iterable[Append]) -> None:
        """Send entries to the store. What a session appends while it is being repaired goes afterwards, with all that
        is missing.
        """
        sent = [entry for entry in entries if not self.sessions[entry.session_id].repairing]
        if sent:
            self._store.append(sent)

    def _extend(self, update: Update, timings: Timings, now_ns: int) -> Append | None:
        session = self.sessions.get(update.session_id)
        if (
            session is None
            or session.end is not None
            or session.pausing
            or (update.epoch, update.attempt) != (session.epoch, session.attempt)
        ):
            self.counts.dropped += 1
            if update.finish:
                self._watcher.last_word(update)
            return None
        session.heard_at = self._clock()
        self._watcher.stepped(session, update, timings)
        if update.error is not None and self._goes_on(session, update.error):
            return None
        known = len(session.tokens)
        try:
            append = session.extend(update, timings, now_ns)
        except Gap:
            self._verifiers.attach(session, InvariantViolation(f"session {session.id}: updates with gaps"))
            return None
        except InvariantViolation as error:
            log.error("a verifier changed a token", **session.named, verifier=self._verifiers.address_of(session))
            self._verifiers.cancel(session)
            return session.close(Finish.ERROR, now_ns, error)
        if len(session.tokens) > known:
            self._verifiers.progressed(session)
        return append

    def _goes_on(self, session: Session, error: HedgerowError) -> bool:
        """Whether another attempt, here or elsewhere, may get over what a verifier says of one session."""
        if isinstance(error, Fenced):
            held = error.metadata.get("held", "")
            self._repairs.take_again(session, int(held) if held.isdecimal() else session.epoch)
            return True
        if isinstance(error, Overloaded) and session.is_new and not self._verifiers.has_another(session):
            return False  # nothing is lost, and the client can come again
        if not isinstance(error, Overloaded | Unavailable | Internal | NotFound):
            return False
        self._verifiers.attach(session, error)
        return True

    def _begin(self, session: Session) -> Session:
        self.sessions[session.id] = session
        session.appended_ns = self._now_ns()  # the store counts from the lease on
        self._verifiers.attach(session)
        return session

    def _settle(self, session: Session) -> None:
        """Drop a session that is to be paused, once nothing of it is on its way."""
        if session.pausing and session.end is None and session.settled and not session.repairing:
            del self.sessions[session.id]
            session.fail(session.pausing)
            self._watcher.over(session)
            self._leases.release(session.record, session.epoch)

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
            self._verifiers.committed(session, offset)
        if session.told == session.acked:
            session.held_since = None
        elif session.held_since is None:
            session.held_since = self._clock()

    def continued(self, session: Session) -> None:
        """See repairs.Host."""
        if session.end is None and not session.pausing:
            self._verifiers.attach(session)
        self._settle(session)

    def ended(self, session: Session, state: State) -> None:
        """See repairs.Host."""
        self._remove(session)
        session.adopt(state)
        self._watcher.over(session)

    def failed(self, session: Session, error: HedgerowError) -> None:
        """See repairs.Host. What is still this gateway's in the store is ended there, or left to a resume."""
        self._remove(session)
        self._store.forget(session.id)
        session.fail(error)
        self._watcher.over(session)
        log.info("a session does not go on here", **session.named, why=error.reason)
        if isinstance(error, InvariantViolation):
            self._unrecorded(session.record)
        elif isinstance(error, Unavailable):
            self._leases.release(session.record, session.epoch)
        self.counts.fenced += isinstance(error, Fenced)

    def _remove(self, session: Session) -> None:
        del self.sessions[session.id]
        self._verifiers.cancel(session)

    def _now_ns(self) -> int:
        return int(self._clock() * 1e9)
