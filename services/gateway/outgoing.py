"""What a verifier is to be told, as messages of bounded size."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from services.gateway.messages import Start

# Prompts of many sessions that start together, all in one message, could pass the limit of a message, and the stream
# that breaks by it is everybody's. Exceeded by less than one start; cancels and offsets are some 60 bytes a session.
MESSAGE_BYTES = 8 << 20


class At(NamedTuple):
    """One attachment, or how far its tokens are committed."""

    session_id: str
    epoch: int
    attempt: int
    offset: int = 0


class Told(NamedTuple):
    """One message. The verifier takes its cancels before its starts."""

    starts: list[Start]
    cancels: list[At]
    committed: list[At]


class Outgoing:
    """Starts, cancels and committed offsets that have not left."""

    def __init__(self) -> None:
        self._starts: deque[Start] = deque()
        self._cancels: list[At] = []
        self._committed: dict[str, At] = {}

    def start(self, start: Start) -> None:
        """Begin, or go on, under a new attempt."""
        self._starts.append(start._replace(committed=tuple(start.committed)))  # the session's own grow

    def cancel(self, at: At) -> None:
        """Stop a session's attachments up to this one. A start that has not left does not leave at all: it would
        outlive its cancel, which is for an attachment before it.
        """
        pair = (at.epoch, at.attempt)
        late = [s.record.session_id == at.session_id and (s.epoch, s.attempt) <= pair for s in self._starts]
        held = [start for start, is_late in zip(self._starts, late, strict=True) if is_late]
        if held:
            self._starts = deque(start for start, is_late in zip(self._starts, late, strict=True) if not is_late)
        if not held or min((start.epoch, start.attempt) for start in held) > (1, 1):
            self._cancels.append(at)

    def committed(self, at: At) -> None:
        """The store has everything below the offset."""
        self._committed[at.session_id] = at

    def take(self) -> Told | None:
        """The next message; None: nothing is left."""
        starts: list[Start] = []
        size = 0
        while self._starts and size < MESSAGE_BYTES:
            starts.append(self._starts.popleft())
            size += _bytes(starts[-1])
        told = Told(starts, self._cancels, list(self._committed.values()))
        self._cancels, self._committed = [], {}
        return told if any(told) else None

    def clear(self) -> None:
        """Forget everything."""
        self._starts.clear()
        self._cancels, self._committed = [], {}


def _bytes(start: Start) -> int:
    sampling = start.record.resolved
    lists = 1024 * len(sampling.stop) + 5 * len(sampling.stop_token_ids) + 12 * len(sampling.logit_bias)
    return 2048 + 5 * (len(start.record.prompt) + len(start.committed)) + lists
