"""Routed experts with INT4 weights.

    y[r] = sum_j D_e (weights[r, j] * silu(G_e x[r]) * (U_e x[r])),   e = chosen[r, j], j in ascending order

x [R', H], route of its first R rows, experts -> y [R, H].   Weights are (nibble - 8) * scale, never rounded. R' >= R:
the padding that the row law asks for.

The reference takes the experts unpacked, `ExpertWeights`: a CPU's products want float32 in any case.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from kernels.dispatch import op
from kernels.linear import RowLaw, batched_linear, linear
from kernels.moe_route import Route
from kernels.swiglu import swiglu

TEST_SHAPES = [(1, 64, 32, 8, 2), (5, 64, 32, 8, 2), (17, 96, 64, 16, 4)]  # (R, H, I, E, k)


class ExpertWeights(NamedTuple):
    """All experts of a layer, [K, N] each, gate and up side by side; and views of each."""

    gate_up: torch.Tensor  # [E, H, 2 I] float32
    down: torch.Tensor  # [E, I, H] float32
    each_gate_up: tuple[torch.Tensor, ...]
    each_down: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, gate_up: torch.Tensor, down: torch.Tensor) -> ExpertWeights:
        return cls(gate_up, down, gate_up.unbind(), down.unbind())


class Places(NamedTuple):
    """Where each (row, j) pair goes in a table with one line of `capacity` slots for each expert used."""

    experts: list[int]  # those with a line
    capacity: int
    pair: torch.Tensor  # [lines * capacity] which pair a slot holds; 0 where it is free
    slot: torch.Tensor  # [R * k] where a pair is


@op
def int4_moe(x: torch.Tensor, route: Route, experts: ExpertWeights, law: RowLaw) -> torch.Tensor:
    rows, top_k = route.chosen.shape
    at = place(route.chosen, len(experts.down), law)
    lines = len(at.experts)
    inputs = x.index_select(0, at.pair // top_k).view(lines, at.capacity, -1)
    weights = route.weights.flatten().index_select(0, at.pair).view(lines, at.capacity, 1)
    if lines == len(experts.down):
        act = swiglu(batched_linear(inputs, experts.gate_up, law)).mul_(weights)
        out = batched_linear(act, experts.down, law)
    else:
        parts = [linear(part, experts.each_gate_up[e], law) for part, e in zip(inputs, at.experts, strict=True)]
        act = swiglu(torch.stack(parts)).mul_(weights)
        out = torch.stack([linear(part, experts.each_down[e], law) for part, e in zip(act, at.experts, strict=True)])
    return out.flatten(0, 1).index_select(0, at.slot).view(rows, top_k, -1).sum(1)


def place(chosen: torch.Tensor, count: int, law: RowLaw) -> Places:
    """Lines for the chosen experts alone while these are at most half of all: else one product over all is cheaper."""
    flat = chosen.numpy().ravel()
    sizes = np.bincount(flat, minlength=count)
    used = np.flatnonzero(sizes)
    if 2 * len(used) > count:
        used = np.arange(count)
    capacity = law.padded(int(sizes.max()))
    line = np.zeros(count, dtype=np.int64)
    line[used] = np.arange(len(used))
    order = np.argsort(flat, kind="stable")
    ranked = flat[order]
    slot = np.empty(len(flat), dtype=np.int64)
    slot[order] = line[ranked] * capacity + np.arange(len(flat)) - (np.cumsum(sizes) - sizes)[ranked]
    pair = np.zeros(len(used) * capacity, dtype=np.int64)
    pair[slot] = np.arange(len(flat))
    return Places(used.tolist(), capacity, torch.from_numpy(pair), torch.from_numpy(slot))
