"""Attaching a session again: which sequence a start goes on with, and which ended ones are kept for that.

A start under a higher (epoch, attempt) of a session whose sequence is still here, with the same prompt and parameters
and an output that agrees with what was committed, adopts it: cache, output, draws and stop watch stay, and the new
owner is told first what the store had not acknowledged. Any other start is rebuilt from its tokens; the result is the
same, only later.
"""

from __future__ import annotations

from hedgerow.engine.sequence import AttachedSequence
from hedgerow.engine.types import Finish, Start, Update
from hedgerow.errors import Fenced

Pair = tuple[int, int]  # (epoch, attempt)


def mismatch(held: AttachedSequence, start: Start) -> str | None:
    """What keeps `held` from going on as `start`; None where all that decides tokens is the same, and the tokens too.

    One may be ahead of the other: the verifier usually is ahead of the store's log, and behind it where another
    verifier had the session meanwhile. A sequence that has ended must have all of the log.
    """
    output, committed = held.output, start.committed
    if list(held.start.prompt) != list(start.prompt):
        return "prompt"
    if held.start.sampling != start.sampling:
        return "sampling parameters"
    if held.finish and len(committed) > len(output):
        return "output"
    both = min(len(output), len(committed))
    return None if list(output[:both]) == list(committed[:both]) else "output"


def fenced(session_id: str, pair: Pair, held: Pair) -> Fenced:
    """`pair` is lower than `held`, which whoever attached under `pair` must know to get above it."""
    error = Fenced(session_id, pair[0], held[0])
    error.metadata |= {"attempt": str(pair[1]), "held_attempt": str(held[1])}
    return error


def refusal(sequence: AttachedSequence, held: Pair) -> Update:
    """Tells the sequence's owner that a higher pair has the session."""
    return Update(
        owner=sequence.start.owner,
        session_id=sequence.start.session_id,
        epoch=sequence.pair[0],
        attempt=sequence.pair[1],
        offset=sequence.told,
        tokens=(),
        finish=Finish.ERROR,
        error=fenced(sequence.start.session_id, sequence.pair, held),
    )


class KeptEnds:
    """Sequences that came to their end while the store had not acknowledged all of it.

    Bounded three ways, the oldest go first: `limit` sequences, `tokens` of prompt and output in all, `seconds` each.
    Keeps no cache page and no features. A session that is not here any more is computed again.
    """

    def __init__(self, limit: int, tokens: int, seconds: float) -> None:
        self._limit, self._most_tokens, self._seconds = limit, tokens, seconds
        self._kept: dict[str, tuple[float, AttachedSequence]] = {}  # oldest first
        self._tokens = 0

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, sequence: AttachedSequence, now: float) -> None:
        """Keeps a sequence that has ended, unless it is too large."""
        self.take(sequence.start.session_id, now)
        sequence.features = None
        self._kept[sequence.start.session_id] = (now, sequence)
        self._tokens += _size(sequence)
        while len(self._kept) > self._limit or self._tokens > self._most_tokens:
            self._drop(next(iter(self._kept)))

    def take(self, session_id: str, now: float) -> AttachedSequence | None:
        """The session's sequence, which is kept no longer; None where its time is over."""
        self.prune(now)
        return self._drop(session_id) if session_id in self._kept else None

    def committed(self, session_id: str, pair: Pair, offset: int) -> None:
        """The store holds `offset` output tokens; a sequence of which it holds all is let go."""
        kept = self._kept.get(session_id)
        if kept is not None and kept[1].pair == pair and offset >= len(kept[1].output):
            self._drop(session_id)

    def cancel(self, session_id: str, pair: Pair) -> None:
        """Nobody wants the session's sequence any more."""
        kept = self._kept.get(session_id)
        if kept is not None and kept[1].pair <= pair:
            self._drop(session_id)

    def prune(self, now: float) -> None:
        """Lets go of what is too old."""
        while self._kept:
            oldest = next(iter(self._kept))
            if now - self._kept[oldest][0] < self._seconds:
                return
            self._drop(oldest)

    def _drop(self, session_id: str) -> AttachedSequence:
        _, sequence = self._kept.pop(session_id)
        self._tokens -= _size(sequence)
        return sequence


def _size(sequence: AttachedSequence) -> int:
    return len(sequence.start.prompt) + len(sequence.output)
