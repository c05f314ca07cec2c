"""Which verifier runs which session, and what becomes of those that have none.

A session is placed on an attached verifier of its fingerprint, the one with the fewest of this gateway's sessions. When
that one is lost, or will not go on with it, it is placed again under a new attempt: at once where there is another,
else when one comes. Repeated failures wait longer and longer; without any new token they are bounded. Updates of an
attempt that is over are dropped by its number, so a verifier that wakes up late changes nothing.

No I/O and no waiting here: `sweep` is to be called several times a second.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hedgerow.errors import HedgerowError, Internal, InvariantViolation, Unavailable
from hedgerow.rpc.logs import get_log
from services.gateway.messages import Start
from services.gateway.ports import Counts, Verifier, Watcher
from services.gateway.session import Session
from services.gateway.types import Trace

FIRST_DELAY, LAST_DELAY = 0.05, 2.0  # seconds between attempts that fail
# The same after losses: a session that kills whatever takes it must leave the others time for their tokens.
LAST_LOSS_DELAY = 8.0
# Faults in a row without a new token. A session on which every verifier fails must not go round for ever.
MAX_FAULTS = 8
log = get_log(__name__)


@dataclass(frozen=True)
class Policy:
    """`patience`: seconds without a new token and without a verifier until a session is given up. `best_effort_after`:
    seconds without a verifier of its fingerprint until one of another takes it on, marked; None: never.
    """

    patience: float = 120.0
    best_effort_after: float | None = None


WAIT = Policy()


class Work(NamedTuple):
    """Whether a verifier has sessions that it should speak about; `decoding`: it has spoken about some of them."""

    any: bool
    decoding: bool


@dataclass
class _Trouble:
    """What has gone wrong with a session since its last new token."""

    since: float
    error: HedgerowError
    failures: int = 0
    faults: int = 0
    retry_at: float = 0.0
    refused: dict[str, None] = field(default_factory=dict)  # addresses


class Verifiers:
    """The verifiers of one gateway. `clock` in seconds; `draw` gives numbers below 1, for jitter."""

    def __init__(
        self,
        members: Sequence[Verifier],
        policy: Policy = WAIT,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
        watcher: Watcher = Watcher(),  # noqa: B008  it has no state
    ) -> None:
        self._members, self._policy, self._clock, self._draw = list(members), policy, clock, draw
        self.watcher = watcher
        self._at: dict[str, Verifier] = {}
        self._running: dict[str, dict[str, Session]] = {member.address: {} for member in members}
        self._waiting: dict[str, Session] = {}
        self._troubles: dict[str, _Trouble] = {}
        self.counts = Counts()

    @property
    def waiting(self) -> int:
        """Sessions without a verifier."""
        return len(self._waiting)

    def address_of(self, session: Session) -> str:
        """Of the verifier that runs it; "" where none does."""
        return self._at[session.id].address if session.id in self._at else ""

    def is_placed(self, session: Session) -> bool:
        """Whether a verifier runs it."""
        return session.id in self._at

    def attach(self, session: Session, error: HedgerowError | None = None) -> None:
        """Place a session under a new attempt, now or later. `error`: why its verifier does not go on with it."""
        before = self._remove(session)
        if before is not None:
            self.watcher.displaced(session, error.reason if error else "MOVED", lost=False)
        session.attempt += 1
        session.heard_at = None
        if error is not None:
            self.counts.refused += 1
            self._note(session, error, before)
            where = before.address if before else ""
            log.info("a verifier does not go on with a session", **session.named, verifier=where, why=error.reason)
        self._waiting[session.id] = session
        self._place(session, before if error is None else None)
        if before is not None and before.attached and self._at.get(session.id) is not before:
            before.cancel(session.id, session.epoch, session.attempt)

    def lost(self, verifier: Verifier, error: HedgerowError) -> None:
        """Its stream broke: what ran there goes on elsewhere, or there again."""
        for session in list(self._running[verifier.address].values()):
            self._remove(session)
            if session.end is not None:
                continue  # only the store's answer is missing; another verifier would hold a sequence nobody ends
            self.watcher.displaced(session, error.reason, lost=True)
            log.info("a session lost its verifier", **session.named, verifier=verifier.address, why=error.reason)
            session.attempt += 1
            session.heard_at, session.moved = None, True
            self.counts.failed_over += 1
            self._note(session, error, None)
            self._waiting[session.id] = session
        self.opened(verifier)

    def opened(self, verifier: Verifier) -> None:
        """A stream has opened, or broken: what waits may have a place."""
        for session in list(self._waiting.values()):
            self._place(session, None)

    def progressed(self, session: Session) -> None:
        """It has new tokens: what went wrong before is over."""
        trouble = self._troubles.pop(session.id, None)
        if trouble is not None:
            self.counts.recovered += 1
            self.counts.recovery_seconds += self._clock() - trouble.since

    def has_another(self, session: Session) -> bool:
        """Whether there is a verifier that has not refused this session since its last token."""
        trouble = self._troubles.get(session.id)
        refused: dict[str, None] = trouble.refused if trouble else {}
        here = self._at.get(session.id)
        return any(v is not here and v.address not in refused for v in self._open(session))

    def cancel(self, session: Session) -> None:
        """Stop computing it, wherever that is. It is not placed again."""
        verifier = self._remove(session)
        if verifier is not None:
            verifier.cancel(session.id, session.epoch, session.attempt)
        self.forget(session)

    def committed(self, session: Session, offset: int) -> None:
        """See Verifier."""
        if (verifier := self._at.get(session.id)) is not None:
            verifier.committed(session.id, session.epoch, session.attempt, offset)

    def forget(self, session: Session) -> None:
        """The session is over here."""
        self._remove(session)
        self._troubles.pop(session.id, None)

    def work(self, verifier: Verifier) -> Work:
        """What it should be doing. A sequence whose tokens are not all acknowledged may rightly be held."""
        free = [session for session in self._running[verifier.address].values() if not session.may_be_held]
        return Work(bool(free), any(session.heard_at is not None for session in free))

    def sweep(self) -> list[tuple[Session, HedgerowError]]:
        """Place what waits; gives the sessions for which that is over, and why."""
        now, over = self._clock(), []
        for session in list(self._waiting.values()):
            trouble = self._troubles[session.id]
            if trouble.faults >= MAX_FAULTS:
                over.append((session, trouble.error))
            elif now - trouble.since >= self._policy.patience:
                why = f"none has taken the session for {self._policy.patience:g} s: {trouble.error.message}"
                over.append((session, Unavailable("verifier", why)))
                self.counts.given_up += 1
            elif now >= trouble.retry_at and not self._place(session, None):
                self._loosen(session, now - trouble.since)
        return over

    def _remove(self, session: Session) -> Verifier | None:
        self._waiting.pop(session.id, None)
        verifier = self._at.pop(session.id, None)
        if verifier is not None:
            self._running[verifier.address].pop(session.id)
        return verifier

    def _note(self, session: Session, error: HedgerowError, refused_by: Verifier | None) -> None:
        trouble = self._troubles.setdefault(session.id, _Trouble(self._clock(), error))
        trouble.error = error
        trouble.failures += 1
        trouble.faults += isinstance(error, Internal | InvariantViolation)
        if refused_by is not None:
            trouble.refused[refused_by.address] = None
        if trouble.failures > 1:  # the first time there may be another verifier, or the same one is there again
            last = LAST_LOSS_DELAY if refused_by is None else LAST_DELAY
            delay = min(FIRST_DELAY * 2.0 ** min(trouble.failures - 2, 16), last)
            trouble.retry_at = self._clock() + delay * (0.5 + 0.5 * self._draw())

    def _place(self, session: Session, stay: Verifier | None) -> bool:
        """Where a verifier takes it, and it has waited long enough; `stay` is the one that holds its sequence."""
        trouble = self._troubles.get(session.id)
        if trouble and (self._clock() < trouble.retry_at or trouble.faults >= MAX_FAULTS):
            return False
        found = self._open(session)
        if not found:
            why = Unavailable("verifier", "none of the session's fingerprint is attached")
            self._troubles.setdefault(session.id, _Trouble(self._clock(), why))
            return False
        found = [v for v in found if not trouble or v.address not in trouble.refused] or found
        chosen = stay if stay in found else min(found, key=lambda v: len(self._running[v.address]))
        assert chosen is not None
        del self._waiting[session.id]
        self._at[session.id] = chosen
        self._running[chosen.address][session.id] = session
        self.counts.attached += 1
        chosen.start(self._start(session, self.watcher.placed(session, chosen.address)))
        return True

    def _open(self, session: Session) -> list[Verifier]:
        return [v for v in self._members if v.attached and not v.draining and _fits(v, session)]

    def _loosen(self, session: Session, waited: float) -> None:
        """Where the operator wants that, go on under another fingerprint when none of the session's own is left."""
        after = self._policy.best_effort_after
        if after is None or waited < after or session.best_effort_from is not None:
            return
        if any(v.attached and _fits(v, session) for v in self._members):
            return  # it drains, or is being waited for
        session.best_effort_from = len(session.tokens)
        if self._place(session, None):
            self.counts.best_effort += 1
        else:
            session.best_effort_from = None

    def _start(self, session: Session, trace: Trace) -> Start:
        """From the committed tokens on: what is on its way to the store is generated again and compared. Under another
        fingerprint it could differ, so there everything counts that is known.
        """
        exact = session.best_effort_from is None
        tokens = session.tokens[: session.acked] if exact else session.tokens
        session.told = len(tokens)
        options, left = session.options, 0
        if options.deadline is not None:
            left = max(1, int((options.deadline - self._clock()) * 1000))
        return Start(
            session.record, session.epoch, session.attempt, tokens, session.acked_digest if exact else session.digest,
            options.priority, left, trace, options.return_trees,
        )  # fmt: skip


def _fits(verifier: Verifier, session: Session) -> bool:
    model, record = verifier.model, session.record
    if model is None:
        return False
    if session.best_effort_from is not None:
        room = len(record.prompt) + (record.resolved.max_tokens or 0)
        return model.name == record.model and room <= model.context_length
    return model.fingerprint == record.fingerprint
