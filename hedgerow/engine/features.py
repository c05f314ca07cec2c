"""The target's features of a sequence's last positions, kept until the drafter has them."""

from __future__ import annotations

import torch


class FeatureRing:
    """Features by absolute position, of the last `capacity` positions at most.

    A drafter that lost its state asks again; what is older than the ring only makes its context start later.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._rows: torch.Tensor | None = None  # [capacity, width] float32, made with the first features
        self.start = self.end = 0  # positions held: start <= position < end

    def put(self, features: torch.Tensor) -> None:
        """Appends the features [n, width] of positions end .. end + n - 1. They are copied."""
        if self._rows is None:
            self._rows = torch.empty(self._capacity, features.shape[1])
        kept = features[-self._capacity :]
        self.end += len(features)
        self.start = max(self.start, self.end - self._capacity)
        at = (self.end - len(kept)) % self._capacity
        until_wrap = min(len(kept), self._capacity - at)
        self._rows[at : at + until_wrap] = kept[:until_wrap]
        if until_wrap < len(kept):
            self._rows[: len(kept) - until_wrap] = kept[until_wrap:]

    def read(self, position: int, rows: int) -> torch.Tensor:
        """Features [rows, width] from `position` on. A view where it can be: valid until the next `put`."""
        assert self.start <= position <= position + rows <= self.end, (self.start, position, rows, self.end)
        if self._rows is None:
            return torch.empty(0, 0)
        at = position % self._capacity
        if at + rows <= self._capacity:
            return self._rows[at : at + rows]
        return torch.cat([self._rows[at:], self._rows[: at + rows - self._capacity]])
