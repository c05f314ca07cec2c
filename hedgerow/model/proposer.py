"""What the drafter's engine drives: whoever makes trees of committed positions and anchors.

A DFlash model gives logits, and its trees are built of them; what reads the session's own text has no logits at all.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from hedgerow.model.interface import Context, Draft
from kernels.tree_build import PlainTree


class Proposed(NamedTuple):
    """One tree a sequence, and when (perf_counter_ns) what stands before their building was done."""

    trees: list[PlainTree]
    forwarded_ns: int


@runtime_checkable
class Proposer(Protocol):
    """A context serves the proposer that made it."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def feature_width(self) -> int: ...
    @property
    def positions(self) -> int:
        """That it can stand at."""
        ...

    def new_state(self) -> Context: ...
    def append(self, state: Any, features: torch.Tensor, position: int) -> None:
        """Takes features [n, feature_width] of positions from the state's end on."""
        ...

    def propose(
        self,
        states: Sequence[Any],
        anchors: Sequence[int],
        positions: Sequence[int],
        budgets: Sequence[int],
        caps: Sequence[int],
    ) -> Proposed:
        """Trees below anchors whose contexts reach right before them; budgets and caps as in `plain_trees`."""
        ...

    def warm(self, sizes: Sequence[int]) -> None:
        """Makes now whatever is made once for trees of a size."""


class OfModel:
    """What proposers of a DFlash model have in common: its contexts."""

    def __init__(self, model: Draft) -> None:
        self.model = model
        self.vocab_size, self.feature_width = model.vocab_size, model.feature_width
        self.positions = model.config.max_position_embeddings

    def new_state(self) -> Context:
        return self.model.new_state()

    def append(self, state: Any, features: torch.Tensor, position: int) -> None:
        self.model.append(state, features, position)


class FromLogits(OfModel):
    """Trees of a block's marginals."""

    def propose(
        self,
        states: Sequence[Any],
        anchors: Sequence[int],
        positions: Sequence[int],
        budgets: Sequence[int],
        caps: Sequence[int],
    ) -> Proposed:
        logits = self.model.draft(states, anchors, positions)
        forwarded = time.perf_counter_ns()
        return Proposed(self.model.trees(logits, budgets, caps), forwarded)

    def warm(self, sizes: Sequence[int]) -> None:
        nothing = torch.zeros(1, self.model.block_size - 1, self.vocab_size)
        for size in sizes:
            self.model.trees(nothing, [size], [0])


def proposer(model: Draft | Proposer) -> Proposer:
    """`model`, or what builds trees of its logits."""
    return model if isinstance(model, Proposer) else FromLogits(model)
