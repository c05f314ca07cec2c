"""What a drafter reads of the positions that were committed: one row of numbers each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch

from hedgerow.engine.rows import Part, Walk, picked


class Reads(Protocol):
    """Rows for a drafter."""

    @property
    def width(self) -> int:
        """Of a row; 0: there is nothing that a drafter could read."""
        ...

    def rows(self, features: torch.Tensor, parts: Sequence[Part], walks: Sequence[Walk]) -> list[torch.Tensor]:
        """What each part's committed path adds, [path, width] float32; features [rows of the pass, the target's]."""
        ...


@runtime_checkable
class OfFeatures(Protocol):
    """Reads that are the target's features, or made of them."""

    def of(self, features: torch.Tensor) -> torch.Tensor:
        """[n, the target's] -> [n, width]"""
        ...


class Hidden:
    """The target's hidden states after the drafter's layers, side by side."""

    def __init__(self, width: int) -> None:
        self.width = width

    def of(self, features: torch.Tensor) -> torch.Tensor:
        return features

    def rows(self, features: torch.Tensor, parts: Sequence[Part], walks: Sequence[Walk]) -> list[torch.Tensor]:
        return [picked(features, part.first_row, walk.path) for part, walk in zip(parts, walks, strict=True)]


class Projected:
    """Those after the drafter's `fc` and norm, for the committed rows of a step together."""

    def __init__(self, width: int, project: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.width, self._project = width, project

    def of(self, features: torch.Tensor) -> torch.Tensor:
        return self._project(features)

    def rows(self, features: torch.Tensor, parts: Sequence[Part], walks: Sequence[Walk]) -> list[torch.Tensor]:
        each = Hidden(self.width).rows(features, parts, walks)
        return list(self._project(torch.cat(each)).split([len(rows) for rows in each])) if each else []


class Tokens:
    """The tokens themselves: for a drafter that has no model. A float32 holds every token below 2^24."""

    width = 1

    def rows(self, features: torch.Tensor, parts: Sequence[Part], walks: Sequence[Walk]) -> list[torch.Tensor]:
        return [
            torch.tensor([[part.rows.tokens[row]] for row in walk.path], dtype=torch.float32)
            for part, walk in zip(parts, walks, strict=True)
        ]
