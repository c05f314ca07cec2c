"""The target's features of a sequence's last positions, kept until the drafter has them."""

from __future__ import annotations

from collections import deque

import torch

SPARE = 8  # rings' memory that is kept for the next ones
_spare: deque[torch.Tensor] = deque(maxlen=SPARE)


class FeatureRing:
    """Features by absolute position, of the last `capacity` positions at most.

    A drafter that lost its state asks again; what is older than the ring only makes its context start later.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._rows: torch.Tensor | None = None  # [capacity, width] float32, made with the first features
        self.start = self.end = 0  # positions held: start <= position < end
        self.sent = 0  # the first position that the drafter lacks, as far as it was asked

    @property
    def waiting(self) -> int:
        """Positions that the drafter has to be fed before it can grow a tree."""
        return self.end - max(self.sent, self.start)

    def put(self, features: torch.Tensor) -> None:
        """Appends the features [n, width] of positions end .. end + n - 1. They are copied.

        By NumPy: torch takes five times as long for a few rows.
        """
        rows, capacity = features.shape[0], self.capacity
        if self._rows is None:
            self._rows = _memory(capacity, features.shape[1])
            self._held = self._rows.numpy()
        held, given = self._held, features.numpy()
        if rows > capacity:
            self.end += rows - capacity
            given, rows = given[-capacity:], capacity
        at = self.end % capacity
        if at + rows <= capacity:
            held[at : at + rows] = given
        else:
            held[at:] = given[: capacity - at]
            held[: at + rows - capacity] = given[capacity - at :]
        self.end += rows
        self.start = max(self.start, self.end - capacity)

    def skip(self, rows: int) -> None:
        """The features of so many next positions are not known: what is held begins behind them."""
        self.end += rows
        self.start = self.end

    def holds(self, position: int, rows: int) -> bool:
        """Whether `read` would give them."""
        return self.start <= position <= position + rows <= self.end

    def read(self, position: int, rows: int) -> torch.Tensor:
        """Features [rows, width] from `position` on. A view where it can be: valid until the next `put`."""
        assert self.holds(position, rows), (self.start, position, rows, self.end)
        if self._rows is None:
            return torch.empty(0, 0)
        at = position % self.capacity
        if at + rows <= self.capacity:
            return self._rows[at : at + rows]
        return torch.cat([self._rows[at:], self._rows[: at + rows - self.capacity]])

    def leave(self) -> None:
        """Nobody reads it any more, nor what `read` gave. Its memory is the next ring's: a page that was never touched
        costs a row more than the row."""
        if self._rows is not None:
            _spare.append(self._rows)
        self._rows, self.start = None, self.end


def _memory(capacity: int, width: int) -> torch.Tensor:
    try:
        spare = _spare.pop()
    except IndexError:
        return torch.empty(capacity, width)
    return spare if spare.shape == (capacity, width) else torch.empty(capacity, width)
