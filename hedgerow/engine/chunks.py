"""A sequence's steps that computed what was known of it already, as a bounded number of pieces."""

from __future__ import annotations

from hedgerow.engine.types import PrefillChunk

MOST = 32  # pieces; with more steps each stands for two, four, ... that lie beside each other


class Chunks:
    """Adds up, one step after the other. `seen` grows and is never another list."""

    def __init__(self) -> None:
        self.seen: list[PrefillChunk] = []
        self._size = 1  # steps of a whole piece

    def add(self, chunk: PrefillChunk) -> None:
        """Takes one step."""
        seen = self.seen
        if seen and seen[-1].steps < self._size:
            seen[-1] = _joined(seen[-1], chunk)
            return
        if len(seen) == MOST:
            self._size *= 2
            seen[:] = [_joined(seen[n], seen[n + 1]) for n in range(0, MOST, 2)]
        seen.append(chunk)


def _joined(one: PrefillChunk, next_one: PrefillChunk) -> PrefillChunk:
    return PrefillChunk(
        one.steps + next_one.steps,
        one.prompt_rows + next_one.prompt_rows,
        one.replayed_rows + next_one.replayed_rows,
        one.took_ns + next_one.took_ns,
        next_one.end_unix_ns,
    )
