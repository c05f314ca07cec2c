"""One client's place in a session: from an offset that it has, over what the store has, to the end.

Nothing here does I/O or waits. A reader of a session that another gateway runs (following.py) is a reader like others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from hedgerow import digest
from hedgerow.errors import HedgerowError, LostSuffix
from services.gateway.messages import Note
from services.gateway.session import Session

# A reader that comes late or reads slowly is given this many tokens at a time.
PIECE_TOKENS = 4096


class Piece(NamedTuple):
    """Committed tokens that a reader has not had. `last`: the session is over after them."""

    offset: int
    tokens: Sequence[int]
    digest: bytes  # after them
    notes: Sequence[Note]
    last: bool


class Reader:
    """One client's place in a session. `wake` is called when `take` may have something; `taken` after each take.

    A client that has `offset` tokens gets those after them, once the log has that offset and its digest there is
    `claim`; without one it is taken at its word, but nothing is waited for. `taken` is called with the session.
    """

    def __init__(
        self,
        session: Session,
        wake: Callable[[], None],
        taken: Callable[[Session], None],
        offset: int = 0,
        claim: bytes = b"",
    ) -> None:
        self.session, self.wake, self._taken = session, wake, taken
        self.cursor = offset
        self._claim = claim
        self._error: HedgerowError | None = None
        self._digest = session.first_digest  # at the cursor, once the place is found
        self._look_for_place()

    def move(self, session: Session, taken: Callable[[Session], None]) -> None:
        """Go on in the same session as this gateway runs it now, where another one did. Its log may be shorter."""
        self._claim = self._digest if self._placed else self._claim
        self.session.readers.pop(self, None)
        self.session, self._taken = session, taken
        self._look_for_place()
        session.readers[self] = None
        self.wake()

    @property
    def waits(self) -> bool:
        """Whether the log does not reach what the client has."""
        return not self._placed and self.session.acked < self.cursor

    def fail(self, error: HedgerowError) -> None:
        """Give this client an error, whatever becomes of the session."""
        self._error = error
        self.wake()

    def take(self) -> Piece | None:
        """What is committed and not yet taken, in one piece however many steps it took; None: nothing yet.

        Raises LostSuffix where the log does not have what the client has, and the session's error where it ended
        before that is known.
        """
        if self._error is not None:
            raise self._error
        if not self._placed and not self._find_place():
            return None
        session, begin = self.session, self.cursor
        end = min(session.acked, begin + PIECE_TOKENS)
        last = session.done and end == session.acked
        if end == begin and not last:
            return None
        tokens = session.tokens[begin:end]
        self._digest = session.acked_digest if end == session.acked else digest.extend(self._digest, tokens)
        self.cursor = end
        self._taken(session)
        return Piece(begin, tokens, self._digest, self._take_notes(end), last)

    def _look_for_place(self) -> None:
        self._placed = self.cursor == 0 and self._claim in (b"", self.session.first_digest)
        self._at, self._note = 0, 0
        self._digest = self.session.first_digest

    def _find_place(self) -> bool:
        """Whether the log has the client's offset. A long one is gone through over several calls."""
        session, offset = self.session, self.cursor
        if session.acked < offset:
            if session.done and session.error:
                raise session.error
            if session.done or not self._claim:
                raise lost_suffix(session.id, offset, self._claim, session.acked, session.acked_digest)
            return False
        at = min(offset, self._at + PIECE_TOKENS)
        self._digest = digest.extend(self._digest, session.tokens[self._at : at])
        self._at = at
        if at < offset:
            self.wake()
            return False
        if self._claim not in (b"", self._digest):
            raise lost_suffix(session.id, offset, self._claim, offset, self._digest)
        self._placed = True
        self._take_notes(offset)
        return True

    def _take_notes(self, end: int) -> Sequence[Note]:
        notes, begin = self.session.notes, self._note
        while self._note < len(notes) and notes[self._note].end <= end:
            self._note += 1
        return notes[begin : self._note]


def lost_suffix(session_id: str, offset: int, claim: bytes, there: int, stored: bytes) -> LostSuffix:
    """A client has `offset` tokens with the digest `claim`; of the log's `there` tokens the digest is `stored`,
    empty: there is no log."""
    return LostSuffix(
        f"session {session_id}: of {offset} tokens your digest is {claim.hex() or 'not given'}, "
        + (f"of the log's {there} it is {stored.hex()}" if stored else "and the store has nothing of it"),
        metadata={"token_offset": offset, "digest": claim.hex(), "stored_offset": there, "stored_digest": stored.hex()},
    )
