"""What running sessions need of the world: verifiers, the commit log, leases. Calls only enqueue; none waits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from hedgerow.errors import HedgerowError
from services.gateway.messages import Append, Granted, Start, Timings, Update
from services.gateway.types import Model, Record, Trace

if TYPE_CHECKING:
    from services.gateway.session import Session


class Verifier(Protocol):
    """One verifier's stream. What is enqueued together may travel together.

    `model` is what it serves as far as is known, `attached` whether a stream to it is open; one that is `draining` is
    given no new sequences.
    """

    address: str
    model: Model | None
    attached: bool
    draining: bool

    def start(self, start: Start) -> None:
        """Begin, or go on, under a new attempt."""

    def cancel(self, session_id: str, epoch: int, attempt: int) -> None:
        """Stop computing this session, whichever attempt up to this one it runs under."""

    def committed(self, session_id: str, epoch: int, attempt: int, offset: int) -> None:
        """The store has everything below `offset`, and so much may be forgotten."""


class Store(Protocol):
    """The commit log as a session sees it."""

    def append(self, entries: Sequence[Append]) -> None:
        """Enqueue one message; its answers come in the same order, and messages are answered in the order sent."""

    def forget(self, session_id: str) -> None:
        """Of what this session has enqueued, send no more and tell no answer."""


class Leases(Protocol):
    """Leases as a session sees them."""

    def release(self, record: Record, epoch: int) -> None:
        """Give a lease up: the session goes on wherever somebody asks for it."""

    def repair(
        self, record: Record, epoch: int, floor: int, repaired: Callable[[Granted | HedgerowError], None]
    ) -> None:
        """Take a session of this gateway, under `epoch`, again under an epoch above `floor`: the store has forgotten
        some of it, the record included where need be, or a verifier has seen that epoch. Refused with Fenced where it
        is another gateway's by now.
        """


class Watcher:
    """Is told what becomes of sessions, for traces and metrics. This one tells nobody."""

    def placed(self, session: Session, address: str) -> Trace:
        """A verifier is given it under its present attempt; under which trace."""
        return session.options.trace

    def displaced(self, session: Session, why: str, *, lost: bool) -> None:
        """That attempt is over. `lost`: with its verifier."""

    def stepped(self, session: Session, update: Update, timings: Timings) -> None:
        """Its verifier said something under the present attempt."""

    def last_word(self, update: Update) -> None:
        """A verifier ended an attempt that is over here."""

    def committed(self, session: Session) -> None:
        """The store has more of it; `session.commit_ns` is how long that took."""

    def over(self, session: Session) -> None:
        """It does not run here any more."""


@dataclass
class Counts:
    """What went wrong and was mended, since the start."""

    attached: int = 0  # attachments of a session to a verifier
    failed_over: int = 0  # sessions whose verifier was lost
    refused: int = 0  # attachments that a verifier ended
    recovered: int = 0  # sessions that had a new token after a verifier was lost or ended their attachment
    recovery_seconds: float = 0.0  # until then, all of them together
    best_effort: int = 0  # sessions that went on under another fingerprint
    given_up: int = 0  # sessions that were released because no verifier took them
    repairs: int = 0  # sessions of which the store had forgotten something
    repaired_tokens: int = 0  # tokens that were appended again
    fenced: int = 0  # sessions that another gateway took
    taken_over: int = 0  # sessions that no gateway ran, or this one again, for a client that came back
    paused: int = 0  # sessions that nobody read for too long
    late: int = 0  # streams that ended at their deadline before the store had the end
    dropped: int = 0  # updates of an old attempt, or of a session that is gone
