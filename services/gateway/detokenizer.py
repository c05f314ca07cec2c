"""Tokens to text, as they come.

What is released after n tokens depends on those tokens only, never on how they were cut into messages, so a second
reader of the same session (and a resume) sees the same text offsets.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Iterable, Sequence


class Detokenizer:
    """The text of one session, released piece by piece.

    Held back are bytes that are not a whole character yet, and bytes that may be the beginning of one of `stop`.
    Invalid UTF-8 becomes U+FFFD, one for each maximal part of a sequence (as Unicode recommends). Tokens in `silent`
    have no text: a stop token ends the text, it is not part of it.
    """

    def __init__(self, pieces: Sequence[bytes], stop: Sequence[str] = (), silent: Collection[int] = ()) -> None:
        self._pieces = pieces
        self._stop = [text.encode() for text in stop]
        self._silent = frozenset(silent)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = b""
        self._old = 0  # bytes of `_held` that were there before the last token
        self.text_offset = 0
        """UTF-8 bytes of text released so far."""

    def feed(self, tokens: Iterable[int]) -> str:
        """The text that `tokens` release."""
        if not self._stop:
            return self._release(b"".join(map(self._piece, tokens)))
        return self._release(b"".join([self._free(self._piece(token)) for token in tokens]))

    def finish(self, matched_stop: str = "") -> str:
        """The rest of the text; what is left of `matched_stop` and behind it is not part of it."""
        rest, self._held = self._held, b""
        stop = matched_stop.encode()
        cut = rest.find(stop, max(0, self._old - len(stop) + 1)) if stop else -1
        return self._release(rest if cut < 0 else rest[:cut], final=True)

    def _piece(self, token: int) -> bytes:
        return b"" if token in self._silent else self._pieces[token]

    def _free(self, piece: bytes) -> bytes:
        """Take one token's bytes; give the bytes that can no longer be part of a stop string."""
        before = len(self._held)
        held = self._held + piece
        border = len(held)
        for stop in self._stop:
            # Only a match that ends within this token counts: an earlier one did not end the session.
            match = held.find(stop, max(0, before - len(stop) + 1))
            border = min(border, match if match >= 0 else _overlap(held, stop))
        self._held, self._old = held[border:], max(0, before - border)
        return held[:border]

    def _release(self, data: bytes, *, final: bool = False) -> str:
        text = self._decoder.decode(data, final)
        self.text_offset += len(text) if text.isascii() else len(text.encode())
        return text


def _overlap(text: bytes, stop: bytes) -> int:
    """Where the longest end of `text` begins that is a beginning of `stop` but not all of it."""
    for begin in range(max(0, len(text) - len(stop) + 1), len(text)):
        if stop.startswith(text[begin:]):
            return begin
    return len(text)
