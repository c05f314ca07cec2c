"""What a client has of a session, and whether the log has that too."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from hedgerow import digest
from hedgerow.errors import InvalidRequest, LostSuffix
from services.gateway.detokenizer import Detokenizer
from services.gateway.messages import Stored
from services.gateway.reader import PIECE_TOKENS, lost_suffix
from services.gateway.types import Record


class Position(NamedTuple):
    """What a client has. `text` in bytes, None: as much as its tokens released. Without tokens they are counted."""

    tokens: int = 0
    digest: bytes = b""
    text: int | None = None

    @property
    def by_text(self) -> bool:
        """Whether the text alone says what the client has."""
        return not self.tokens and bool(self.text)


START = Position()


def check_fields(at: Position) -> None:
    """Raises InvalidRequest where it says nothing that can be true."""
    if len(at.digest) not in (0, digest.SIZE):
        raise InvalidRequest("digest", f"{len(at.digest)} bytes", f"of {digest.SIZE} bytes, or empty")
    if at.by_text and at.digest:
        raise InvalidRequest("digest", at.digest.hex(), "empty with a text_offset and no token_offset")


async def check_position(at: Position, stored: Stored, pieces: Sequence[bytes]) -> None:
    """Compare what a client has with the log. Raises LostSuffix, InvalidRequest.

    With a digest the log may be shorter: its owner may append again what it lost, or it is generated again.
    """
    record, state, tokens = stored.record, stored.state, stored.tokens
    check_range(at, record)
    if at.tokens > state.length:
        if state.finish or not at.digest:
            raise lost_suffix(record.session_id, at.tokens, at.digest, state.length, state.digest)
    elif at.digest:
        there = digest.first(record.session_id, record.prompt)
        for begin in range(0, at.tokens, PIECE_TOKENS):
            there = digest.extend(there, tokens[begin : min(begin + PIECE_TOKENS, at.tokens)])
            await asyncio.sleep(0)
        if there != at.digest:
            raise lost_suffix(record.session_id, at.tokens, at.digest, at.tokens, there)
    if at.by_text and at.text is not None and not state.finish:
        text = Detokenizer(pieces, record.resolved.stop, record.resolved.stop_token_ids)
        for begin in range(0, len(tokens), PIECE_TOKENS):
            text.feed(tokens[begin : begin + PIECE_TOKENS])
            await asyncio.sleep(0)
        if text.text_offset < at.text:
            message = f"session {record.session_id}: you have {at.text} bytes of text, the log {text.text_offset}"
            raise LostSuffix(message, metadata={"text_offset": at.text, "stored_text_offset": text.text_offset})


def check_range(at: Position, record: Record) -> None:
    """Raises InvalidRequest where no session of this record could have come so far."""
    most = record.resolved.max_tokens
    if most is not None and at.tokens > most:
        raise InvalidRequest("token_offset", at.tokens, f"at most {most}, the session's max_tokens")
