"""Routed experts with INT4 weights.

    y[r] = sum_j D_e (weights[r, j] * silu(G_e x[r]) * (U_e x[r])),   e = chosen[r, j], j in ascending order

x [R', H], route of its first R rows, experts -> y [R, H].   Weights are (nibble - 8) * scale, never rounded. R' >= R:
the padding that the row law asks for.

The reference takes the experts unpacked, `ExpertWeights`: a CPU's products want float32 in any case.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from kernels.dispatch import op
from kernels.linear import RowLaw, batched_linear, linear
from kernels.moe_route import Route
from kernels.swiglu import swiglu

TEST_SHAPES = [(1, 64, 32, 8, 2), (5, 64, 32, 8, 2), (17, 96, 64, 16, 4)]  # (R, H, I, E, k)
# Slots of one product over all experts, relative to those of a product each: up to here it was as fast or faster
# (16 experts of 384 x 128, 2 to 256 rows, even and uneven routing).
UNIFORM_UP_TO = 1.5


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
    """Where each (row, j) pair goes in a table of slots, expert by expert."""

    sizes: list[int]  # slots of each expert, lawful row counts; 0: not chosen
    uniform: bool  # all sizes are equal
    pair: torch.Tensor  # [slots] which pair a slot holds; 0 where it is free
    slot: torch.Tensor  # [R * k] where a pair is


@op
def int4_moe(x: torch.Tensor, route: Route, experts: ExpertWeights, law: RowLaw) -> torch.Tensor:
    rows, top_k = route.chosen.shape
    at = place(route.chosen, len(experts.down), law)
    inputs = x.index_select(0, at.pair // top_k)
    weights = route.weights.flatten().index_select(0, at.pair).unsqueeze(-1)
    multiply = _one_product if at.uniform else _product_each
    act = swiglu(multiply(inputs, experts.gate_up, experts.each_gate_up, at.sizes, law)).mul_(weights)
    out = multiply(act, experts.down, experts.each_down, at.sizes, law)
    return out.index_select(0, at.slot).view(rows, top_k, -1).sum(1)


def place(chosen: torch.Tensor, count: int, law: RowLaw) -> Places:
    """As many slots for each expert as the busiest needs, unless that wastes so much that a product each is cheaper."""
    flat = chosen.numpy().ravel()
    found = np.bincount(flat, minlength=count)
    sizes = np.array([law.padded(n) if n else 0 for n in found.tolist()])
    largest = int(sizes.max())
    uniform = count * largest <= UNIFORM_UP_TO * sizes.sum()
    if uniform:
        sizes[:] = largest
    order = np.argsort(flat, kind="stable")
    ranked = flat[order]
    slot = np.empty(len(flat), dtype=np.int64)
    slot[order] = np.arange(len(flat)) + (np.cumsum(sizes) - sizes - np.cumsum(found) + found)[ranked]
    pair = np.zeros(sizes.sum(), dtype=np.int64)
    pair[slot] = np.arange(len(flat))
    return Places(sizes.tolist(), uniform, torch.from_numpy(pair), torch.from_numpy(slot))


def _one_product(
    x: torch.Tensor, w: torch.Tensor, each: Sequence[torch.Tensor], sizes: list[int], law: RowLaw
) -> torch.Tensor:
    return batched_linear(x.view(len(w), sizes[0], -1), w, law).flatten(0, 1)


def _product_each(
    x: torch.Tensor, w: torch.Tensor, each: Sequence[torch.Tensor], sizes: list[int], law: RowLaw
) -> torch.Tensor:
    parts = torch.split(x, sizes)
    return torch.cat([linear(part, each[e], law) for e, part in enumerate(parts) if sizes[e]])
