"""The order of a session's events, whoever they come from: nothing twice, nothing left out, or a loud error."""

from __future__ import annotations

from hedgerow.client._types import Chunk, Event, Finished, Position, Started
from hedgerow.errors import Internal


class Order:
    """How far a stream has come. `position` is where its next event must begin.

    `counted`: both offsets of `position` are meant. Otherwise one that is 0 beside another that is not is the server's
    to say, with its next event.
    """

    def __init__(self, position: Position, *, counted: bool = False) -> None:
        self.position = position
        self.started: Started | None = None
        self.finished: Finished | None = None
        tokens, text = position.token_offset, position.text_offset
        self._free_tokens = not counted and tokens == 0 < text
        self._free_text = not counted and text == 0 < tokens

    @property
    def fresh(self) -> bool:
        """No token and no text has come."""
        return self.position.token_offset == self.position.text_offset == 0

    def take(self, event: Event) -> bool:
        """Notes an event; False: it is known. Raises Internal for one that does not belong here."""
        if isinstance(event, Started):
            return self._start(event)
        at = self.position
        if not at.session_id:
            raise Internal("the stream began without its first event")
        self._check(event)
        if isinstance(event, Finished):
            self.finished = event
            self.position = Position(at.session_id, event.token_offset, event.digest, event.text_offset)
        else:
            tokens, text = event.token_offset + len(event.tokens), event.text_offset + len(event.text.encode())
            self.position = Position(at.session_id, tokens, event.digest, text)
        self._free_tokens = self._free_text = False
        return True

    def _start(self, event: Started) -> bool:
        at = self.position
        if at.session_id not in ("", event.session_id):
            raise Internal(f"session {event.session_id} answered in place of {at.session_id}")
        if self.fresh:
            self.position = at._replace(session_id=event.session_id, digest=event.digest)
        known, self.started = self.started, event
        return known is None

    def _check(self, event: Chunk | Finished) -> None:
        at = self.position
        digest = event.digest if isinstance(event, Finished) and not self._free_tokens else at.digest
        came = (
            at.token_offset if self._free_tokens else event.token_offset,
            at.text_offset if self._free_text else event.text_offset,
            digest if at.digest else b"",
        )
        if came != (at.token_offset, at.text_offset, at.digest):
            raise Internal(
                f"session {at.session_id}: an event came from token {event.token_offset}, text byte "
                f"{event.text_offset}, where token {at.token_offset}, text byte {at.text_offset} is next",
                metadata={"session_id": at.session_id, "digest": at.digest.hex(), "came": digest.hex()},
            )
