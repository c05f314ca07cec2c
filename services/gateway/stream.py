"""A session as one client sees it: one Started, Chunks with their text, one Finished or an error."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import NamedTuple, Protocol

from hedgerow.errors import DeadlineExceeded, InvalidRequest, LostSuffix
from services.gateway.answers import Answer
from services.gateway.deltas import Content, Delta
from services.gateway.detokenizer import Detokenizer
from services.gateway.messages import End, Note, Timings
from services.gateway.position import START, Position
from services.gateway.reader import PIECE_TOKENS, Piece, Reader
from services.gateway.session import Session
from services.gateway.transcript import Transcript
from services.gateway.types import Finish, Mode, Record

# A session that runs ends within a step of its deadline, and has this many seconds to be recorded so. After them its
# clients are told, whatever it still waits for.
LATE = 1.0


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
    deltas: Sequence[Delta] = ()  # the same text by the parts of an answer, where the prompt is a conversation


class Finished(NamedTuple):
    """The session has ended."""

    end: End
    timings: Timings | None
    token_offset: int
    text_offset: int
    digest: bytes
    mode: Mode


Event = Started | Chunk | Finished


class Making:
    """How long making text of tokens takes, all pieces of a stream together; in nanoseconds of `perf_counter`."""

    def __init__(self) -> None:
        self.begun = self.ended = self.spent = self.pieces = 0

    def took(self, begun: int, ended: int) -> None:
        """One more piece."""
        self.begun = self.begun or begun
        self.ended = ended
        self.spent += ended - begun
        self.pieces += 1


class Source(Protocol):
    """Where a stream reads."""

    def read(self, session: Session, wake: Callable[[], None], offset: int, digest: bytes) -> Reader:
        """A reader of the session, from an offset on."""

    def leave(self, reader: Reader, *, detach: bool) -> None:
        """The reader's client is gone, or has everything."""


class Stream:
    """One client's events. To be closed, whatever happens: that is what cancels an abandoned session."""

    def __init__(
        self,
        session: Session,
        pieces: Sequence[bytes],
        source: Source,
        position: Position = START,
        *,
        detach: bool = False,
        clock: Callable[[], float] = time.monotonic,
        reader: Callable[[Record], Answer | None] = lambda record: None,
    ) -> None:
        self._changed = asyncio.Event()
        self._source, self._position, self._detach, self._clock = source, position, detach, clock
        self._reader = source.read(session, self._changed.set, position.tokens, position.digest)
        sampling = session.record.resolved
        text = Detokenizer(pieces, sampling.stop, sampling.stop_token_ids)
        self._text, self._answer = Transcript(text, position.text), reader(session.record)
        self._seeking, self._is_late = position.by_text, False
        self.making = Making()

    @property
    def session(self) -> Session:
        """What is read now: another object after this gateway has taken the session over."""
        return self._reader.session

    def close(self) -> None:
        """Leave the session."""
        self._source.leave(self._reader, detach=self._detach)

    async def events(self) -> AsyncGenerator[Event, None]:
        """Everything that the client does not have. Raises the session's error in place of Finished."""
        deadline, timer = self.session.options.deadline, None
        if deadline is not None:
            left = max(0.0, deadline - self._clock()) + LATE
            timer = asyncio.get_running_loop().call_later(left, self._deadline_passed)
        try:
            yield Started(self.session.record, self.session.first_digest)
            piece = await self._next()
            await self._pass_over(piece.offset)
            while True:
                begun = time.perf_counter_ns()
                chunk = self._chunk(piece)
                self.making.took(begun, time.perf_counter_ns())
                if chunk.tokens or chunk.text or chunk.deltas:
                    yield chunk
                if piece.last:
                    yield self._finished(piece)
                    return
                piece = await self._next()
        except (InvalidRequest, LostSuffix):
            self._detach = True  # it is that client's matter alone
            raise
        finally:
            if timer is not None:
                timer.cancel()

    async def _next(self) -> Piece:
        while (piece := self._reader.take()) is None:
            if self._seeking:
                self._check_text()
            if self._is_late:
                raise DeadlineExceeded(f"session {self.session.id}: its end is not recorded yet")
            await self._changed.wait()
            self._changed.clear()
            await asyncio.sleep(0)  # a reader that looks for its place wakes itself: others have their turn
        return piece

    def _deadline_passed(self) -> None:
        self._is_late = True
        self._changed.set()

    async def _pass_over(self, offset: int) -> None:
        """The tokens that the client has: the text behind them depends on them."""
        for begin in range(0, offset, PIECE_TOKENS):
            tokens = self.session.tokens[begin : min(begin + PIECE_TOKENS, offset)]
            self._text.pass_over(tokens)
            if self._answer:
                self._answer.feed(tokens)
            await asyncio.sleep(0)

    def _chunk(self, piece: Piece) -> Chunk:
        tokens, known, fed = piece.tokens, 0, 0
        if self._seeking:
            known = self._text.skip(tokens)
            self._seeking, fed = known == len(tokens), known + 1
        begin = self._text.offset
        text, deltas = self._text.feed(tokens[fed:]), list[Delta]()
        if self._answer:
            self._answer.feed(tokens[:known])
            deltas = self._answer.feed(tokens[known:])
        # After an error what is held back stays so: a later reader may go on from here.
        if piece.last and self.session.error is None and self.session.end:
            text += self._text.finish(self.session.end.matched_stop)
            deltas += self._answer.finish(self.session.end.matched_stop) if self._answer else []
            self._check_text()
        elif self._seeking and self._reader.cursor >= self.session.acked:
            self._check_text()
        if self._answer and not deltas and (tokens[known:] or text):
            deltas = [Content("")]  # a marker alone: clients know by it that there are parts
        notes = [note for note in piece.notes if note.end > piece.offset + known]
        return Chunk(piece.offset + known, begin, tokens[known:], text, piece.digest, notes, deltas)

    def _check_text(self) -> None:
        """Raises LostSuffix where the client has more text than there is."""
        missing, have = self._text.missing, self._position.text
        if missing > 0 and have is not None:
            metadata = {"text_offset": have, "stored_text_offset": have - missing}
            message = f"session {self.session.id}: you have {have} bytes of text, the log {have - missing}"
            raise LostSuffix(message, metadata=metadata)

    def _finished(self, last: Piece) -> Finished:
        session = self.session
        if session.error:
            raise session.error
        assert session.end is not None, "a session is done when it has an end"
        offset = last.offset + len(last.tokens)
        mode = session.record.mode if session.best_effort_from is None else Mode.BEST_EFFORT
        end = session.end
        if end.reason is Finish.STOP and self._answer and self._answer.calls:
            end = end._replace(reason=Finish.TOOL_CALLS)
        return Finished(end, session.timings, offset, self._text.offset, last.digest, mode)
