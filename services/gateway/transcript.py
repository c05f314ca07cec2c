"""A session's text as one client gets it: from the byte that it has on, whatever its tokens are."""

from __future__ import annotations

from collections.abc import Sequence

from hedgerow.errors import InvalidRequest
from services.gateway.detokenizer import Detokenizer


class Transcript:
    """`have`: bytes of text that the client has; None: as many as the tokens release that are passed over.

    All tokens of the session go through here in order, first those that the client has: what is held back for an
    unfinished character or a possible stop does not line up with tokens.
    """

    def __init__(self, text: Detokenizer, have: int | None = None) -> None:
        self._text, self._have = text, have
        self._lead = ""

    @property
    def offset(self) -> int:
        """Bytes that the client has when it has got all that was given."""
        return (self._text.text_offset if self._have is None else self._have) - len(self._lead.encode())

    @property
    def missing(self) -> int:
        """Bytes that the client says it has, and the tokens so far do not."""
        return 0 if self._have is None else self._have - self._text.text_offset

    def pass_over(self, tokens: Sequence[int]) -> None:
        """Tokens that the client has. What it lacks of their text comes with the next ones."""
        text = self._text.feed(tokens)
        if self._have is not None:
            self._lead += self._news(text)

    def skip(self, tokens: Sequence[int]) -> int:
        """Passes over tokens up to the first that releases text which the client lacks, and over that; how many these
        are before it.
        """
        for i, token in enumerate(tokens):
            self.pass_over([token])
            if self._lead:
                return i
        return len(tokens)

    def feed(self, tokens: Sequence[int]) -> str:
        """What the client lacks of the text that `tokens` release."""
        if self._have is None:
            self._have = self._text.text_offset
        text = self._lead + self._news(self._text.feed(tokens))
        self._lead = ""
        return text

    def finish(self, matched_stop: str) -> str:
        """The rest of the text."""
        if self._have is None:
            self._have = self._text.text_offset
        return self._news(self._text.finish(matched_stop))

    def _news(self, text: str) -> str:
        """The part of what has just been released that is behind what the client has.

        Raises InvalidRequest where that begins inside of a character.
        """
        assert self._have is not None
        end = self._text.text_offset
        if end <= self._have:
            return ""
        size = len(text) if text.isascii() else len(text.encode())
        known, self._have = self._have - (end - size), end
        if known == 0:
            return text
        data = text.encode()[known:]
        if data[0] & 0xC0 == 0x80:
            raise InvalidRequest("text_offset", end - len(data), "where a character of the text begins")
        return data.decode()
