"""Sessions of which the store has forgotten something, while their owner has all of it (DESIGN section 7, Repair).

Too short a log is appended to again from where it ends. An epoch that went backwards, or a record that is gone, first
takes a new lease above every epoch that was seen, with the record. What was released stays released; nothing new is
released before the log has it again. What was deleted, or is another gateway's, is not brought back.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from hedgerow.errors import Fenced, HedgerowError, InvariantViolation, SessionDeleted, Unavailable
from hedgerow.rpc.logs import get_log
from services.gateway.messages import Appended, AppendStatus, Granted, State
from services.gateway.ports import Counts, Leases, Store
from services.gateway.session import Session

# Repairs of one session without an append that was taken. A store that forgets every time is broken.
MAX_REPAIRS = 16
log = get_log(__name__)


class Host(Protocol):
    """The sessions that are repaired."""

    sessions: dict[str, Session]

    def continued(self, session: Session) -> None:
        """It runs on, under a new epoch."""

    def ended(self, session: Session, state: State) -> None:
        """The store has its end."""

    def failed(self, session: Session, error: HedgerowError) -> None:
        """It cannot run on here."""


class Repairs:
    """`now_ns`: the table's clock."""

    def __init__(self, host: Host, store: Store, leases: Leases, counts: Counts, now_ns: Callable[[], int]) -> None:
        self._host, self._store, self._leases = host, store, leases
        self._counts, self._now_ns = counts, now_ns

    def refused(self, session: Session, result: Appended) -> None:
        """An append was not taken."""
        status, state = result.status, result.state
        if status is AppendStatus.FINISHED:
            self._host.ended(session, state)
        elif status is AppendStatus.GAP:
            if self._may_go_on(session, state):
                self._counts.repairs += 1
                self._append_again(session, state)
        elif status in (AppendStatus.NOT_FOUND, AppendStatus.FORGOTTEN):
            self.take_again(session, session.epoch)
        elif status is AppendStatus.UNAVAILABLE:
            self._host.failed(session, Unavailable("kvstore", "it cannot take writes now"))
        elif status is AppendStatus.GONE:
            # Where another one of its id is recorded, a resume goes on in that: the same request gives the same tokens.
            gone = Fenced(session.id, session.epoch, state.epoch) if state.epoch else SessionDeleted(session.id)
            self._host.failed(session, gone)
        elif status is AppendStatus.FENCED:
            self._host.failed(session, Fenced(session.id, session.epoch, state.epoch))
        else:
            wrong = InvariantViolation(f"session {session.id}: {status.name} at {session.acked}")
            self._host.failed(session, wrong)

    def take_again(self, session: Session, floor: int) -> None:
        """The store has forgotten this session's epoch, or a verifier has seen a higher one: take it above `floor`."""
        if session.repairing:
            return
        session.repairing = True
        self._counts.repairs += 1
        self._store.forget(session.id)  # what is on its way is appended again, or there already
        self._leases.repair(session.record, session.epoch, floor, partial(self._taken, session))

    def _taken(self, session: Session, outcome: Granted | HedgerowError) -> None:
        if self._host.sessions.get(session.id) is not session:  # it has failed in the meantime
            if isinstance(outcome, Granted):
                self._leases.release(session.record, outcome.epoch)
            return
        session.repairing = False
        if isinstance(outcome, HedgerowError):
            self._host.failed(session, outcome)
            return
        session.epoch, session.attempt = outcome.epoch, 0
        if outcome.state.finish:
            self._host.ended(session, outcome.state)
        elif self._may_go_on(session, outcome.state):
            self._append_again(session, outcome.state)
            self._host.continued(session)

    def _may_go_on(self, session: Session, state: State) -> bool:
        """Whether the log is a beginning of what this session holds; where it is not, the session ends here."""
        session.repairs += 1
        if session.repairs > MAX_REPAIRS:
            error: HedgerowError = InvariantViolation(f"session {session.id}: the store loses it again and again")
        elif state.length > len(session.tokens):  # another gateway had it in the meantime: a resume reads what it did
            error = Unavailable(f"session {session.id}", "its log is ahead of this gateway", 0.1)
        elif session.digest_at(state.length) != state.digest:
            error = InvariantViolation(f"session {session.id}: another text is stored below {state.length}")
            if session.best_effort_from is not None:
                error = Unavailable(f"session {session.id}", "its log went on otherwise", 0.1)
        else:
            return True
        self._host.failed(session, error)
        return False

    def _append_again(self, session: Session, state: State) -> None:
        log.warning("appending again", **session.named, stored=state.length, held=len(session.tokens))
        session.acknowledge(state, self._now_ns())
        appends = session.again(state.length)
        self._counts.repaired_tokens += len(session.tokens) - state.length
        for append in appends:
            self._store.append([append])
