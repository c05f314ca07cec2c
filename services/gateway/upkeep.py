"""What running sessions need now and then, without anything having happened: the clock is enough.

Sessions without a verifier are placed; those end whose deadline passed or whose readers do not read; those are checked
of which a verifier says nothing; what is silent is kept from expiring.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from hedgerow.errors import HedgerowError, Overloaded, Unavailable
from services.gateway.messages import Append
from services.gateway.session import Session
from services.gateway.types import Finish
from services.gateway.verifiers import Verifiers

# Seconds after its deadline at which a session is ended here, where its verifier has not done so in its own step; and
# at which its clients no longer wait for the store (stream.LATE).
LATE, CUT = 0.2, 1.0
QUIET = 5.0  # seconds for which a verifier may say nothing of a session that it runs, until the lease is checked
STALLED = 3  # as many times of them, until it is asked for the session again


class Host(Protocol):
    """The sessions that are kept up."""

    sessions: dict[str, Session]

    def cancel(self, session: Session, reason: Finish, error: HedgerowError | None = None) -> bool:
        """End it."""

    def pause(self, session: Session, error: HedgerowError | None = None) -> None:
        """Release it."""

    def append(self, entries: Sequence[Append]) -> None:
        """Send it to the store."""


class Upkeep:
    """`lag`: committed tokens that a reader may be behind before its sequence is held, `patience`: the seconds for
    which it is held before the session ends; `clock` in seconds; `quiet`: see QUIET.
    """

    def __init__(
        self,
        host: Host,
        verifiers: Verifiers,
        lag: int,
        patience: float,
        clock: Callable[[], float],
        quiet: float = QUIET,
    ) -> None:
        self._host, self._verifiers, self.lag, self.patience, self._clock = host, verifiers, lag, patience, clock
        self._quiet = quiet

    def sweep(self) -> None:
        """To be called some ten times a second."""
        for session, error in self._verifiers.sweep():
            if isinstance(error, Unavailable):
                self._host.pause(session, error)
            else:
                self._host.cancel(session, Finish.ERROR, error)
        now = self._clock()
        for session in list(self._host.sessions.values()):
            if session.end is not None:
                self._count_late(session, now)  # it needs no reader, and there may be none
            elif self._is_over(session, now):
                self._host.cancel(session, Finish.DEADLINE)
            elif session.pausing:
                continue  # it is at no verifier any more, and the store has yet to answer
            elif session.heard_at is not None and now - session.heard_at >= self._quiet and not session.may_be_held:
                self._doubt(session, now, now - session.heard_at)
            elif session.held_since is not None and now - session.held_since > self.patience:
                behind = session.acked - max((reader.cursor for reader in session.readers), default=0)
                self._host.cancel(session, Finish.ERROR, Overloaded("the client's stream", behind, self.lag, 1.0))

    def refresh(self, age: float) -> None:
        """Append nothing to sessions whose last append is `age` seconds old: what runs must not expire."""
        now = self._clock()
        running = [session for session in self._host.sessions.values() if session.end is None]
        self._append_nothing([s for s in running if now - s.appended_ns / 1e9 >= age])

    def _is_over(self, session: Session, now: float) -> bool:
        deadline = session.options.deadline
        return deadline is not None and now >= deadline + (LATE if self._verifiers.is_placed(session) else 0.0)

    def _count_late(self, session: Session, now: float) -> None:
        deadline = session.options.deadline
        if deadline is not None and now >= deadline + CUT and not session.is_late and session.readers:
            session.is_late = True
            self._verifiers.counts.late += 1

    def _doubt(self, session: Session, now: float, silent: float) -> None:
        """Its verifier speaks to others, and not about this session: it may be another gateway's by now, which only the
        store knows; if it is not, the verifier is asked for it again.
        """
        if silent >= STALLED * self._quiet:
            self._verifiers.attach(session, Unavailable("verifier", "it does not go on with the session"))
        elif now - session.appended_ns / 1e9 >= self._quiet:
            self._append_nothing([session])

    def _append_nothing(self, sessions: Sequence[Session]) -> None:
        now_ns = int(self._clock() * 1e9)
        idle = [session for session in sessions if session.settled and not session.pausing and not session.repairing]
        self._host.append([session.refresh(now_ns) for session in idle])
