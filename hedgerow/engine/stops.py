"""Where a sequence ends: end-of-sequence and stop tokens, stop strings, length.

The verifier decides this on the accepted path and before anything is committed; no other service truncates. A stop
string is matched on bytes, so it may begin in one token and end in another, and need not line up with characters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hedgerow.engine.types import Finish, Sampling


class Stop(NamedTuple):
    """Why the sequence ends with the token just fed. That token belongs to the output."""

    finish: Finish
    string: str = ""
    token: int | None = None


class StopWatch:
    """Sees every output token of one sequence, in order.

    `vocabulary[token]` is what a token adds to the text; b"" for control tokens, which no stop string can match.
    The first `min_tokens` tokens never end the sequence, but for its length.
    """

    def __init__(self, sampling: Sampling, vocabulary: Sequence[bytes], eos: frozenset[int]) -> None:
        self._vocabulary = vocabulary
        self._tokens = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else eos)
        self._strings = [(text, text.encode()) for text in sampling.stop]
        self._keep = max((len(stop) for _, stop in self._strings), default=1) - 1
        self._tail = b""  # the last bytes of the text, one fewer than the longest stop string
        self._min, self._max = sampling.min_tokens, sampling.max_tokens
        self.seen = 0

    def feed(self, token: int) -> Stop | None:
        """Takes the next output token; says whether, and why, the sequence ends with it."""
        self.seen += 1
        string = self._match(self._vocabulary[token]) if self._strings else None
        if self.seen > self._min:
            if token in self._tokens:
                return Stop(Finish.STOP, token=token)
            if string is not None:
                return Stop(Finish.STOP, string=string)
        return Stop(Finish.LENGTH) if self.seen >= self._max else None

    def _match(self, piece: bytes) -> str | None:
        """The stop string that `piece` completes; of several, the one that begins first."""
        text, old = self._tail + piece, len(self._tail)
        found = []
        for string, stop in self._strings:
            # at least one byte must be new: a match that min_tokens overruled is not found again
            at = text.find(stop, max(0, old - len(stop) + 1))
            if at >= 0:
                found.append((at, string))
        self._tail = text[-self._keep :] if self._keep else b""
        return min(found)[1] if found else None
