"""A session as one client sees it: one Started, Chunks with their text, one Finished or an error."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import NamedTuple

from services.gateway.detokenizer import Detokenizer
from services.gateway.messages import End, Timings
from services.gateway.reader import Piece, Reader
from services.gateway.session import Note, Session
from services.gateway.types import Mode, Record


class Started(NamedTuple):
    """The session exists in the store."""

    record: Record
    digest: bytes


class Chunk(NamedTuple):
    """Committed tokens and the text that they release."""

    token_offset: int
    text_offset: int
    tokens: Sequence[int]
    text: str
    digest: bytes
    notes: Sequence[Note]


class Finished(NamedTuple):
    """The session has ended."""

    end: End
    timings: Timings | None
    token_offset: int
    text_offset: int
    digest: bytes
    mode: Mode


Event = Started | Chunk | Finished


class Stream:
    """One client's events. To be closed, whatever happens: that is what cancels an abandoned session."""

    def __init__(
        self,
        session: Session,
        pieces: Sequence[bytes],
        read: Callable[[Session, Callable[[], None]], Reader],
        leave: Callable[[Reader], None],
    ) -> None:
        self.session = session
        self._changed = asyncio.Event()
        sampling = session.record.resolved
        self._text = Detokenizer(pieces, sampling.stop, sampling.stop_token_ids)
        self._reader, self._leave = read(session, self._changed.set), leave

    def close(self) -> None:
        """Leave the session."""
        self._leave(self._reader)

    async def events(self) -> AsyncGenerator[Event, None]:
        """Everything from the first token on. Raises the session's error in place of Finished."""
        yield Started(self.session.record, self.session.first_digest)
        while True:
            piece = self._reader.take()
            if piece is None:
                await self._changed.wait()
                self._changed.clear()
                continue
            chunk = self._chunk(piece)
            if chunk.tokens or chunk.text:
                yield chunk
            if piece.last:
                yield self._finished(chunk)
                return

    def _chunk(self, piece: Piece) -> Chunk:
        begin = self._text.text_offset
        text = self._text.feed(piece.tokens)
        # After an error what is held back stays so: a later reader may go on from here.
        if piece.last and self.session.error is None and self.session.end:
            text += self._text.finish(self.session.end.matched_stop)
        return Chunk(piece.offset, begin, piece.tokens, text, piece.digest, piece.notes)

    def _finished(self, last: Chunk) -> Finished:
        session = self.session
        if session.error:
            raise session.error
        assert session.end is not None, "a session is done when it has an end"
        offset = last.token_offset + len(last.tokens)
        mode = session.record.mode
        return Finished(session.end, session.timings, offset, self._text.text_offset, last.digest, mode)
