"""Routed experts with INT4 weights.

    y[r] = sum_j weights[r, j] * D_e (silu(G_e x[r]) * (U_e x[r])),   e = chosen[r, j], j in ascending order

x [R', H], route of the first R rows, experts -> y [R, H].   Weights are (nibble - 8) * scale, never rounded; the
row's weight
is applied before the down product. R' >= R: the padding that the row law asks for.

The reference takes the experts unpacked, `ExpertWeights`: on a CPU the products are the cost, not the bytes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels.dispatch import op
from kernels.linear import RowLaw, batched_linear, linear
from kernels.moe_route import Route
from kernels.swiglu import swiglu

TEST_SHAPES = [(1, 64, 32, 8, 2), (5, 64, 32, 8, 2), (17, 96, 64, 16, 4)]  # (R, H, I, E, k)


class ExpertWeights(NamedTuple):
    """All experts of a layer, [K, N]: gate and up side by side."""

    gate_up: torch.Tensor  # [E, H, 2 I] float32
    down: torch.Tensor  # [E, I, H] float32


@op
def int4_moe(x: torch.Tensor, route: Route, experts: ExpertWeights, law: RowLaw) -> torch.Tensor:
    return _one_row(x, route, experts, law) if len(route.chosen) == 1 else _many_rows(x, route, experts, law)


def _one_row(x: torch.Tensor, route: Route, experts: ExpertWeights, law: RowLaw) -> torch.Tensor:
    """All rows of x are equal: a product for each chosen expert."""
    x = x[: law.padded(1)]
    chosen = route.chosen[0].tolist()
    act = swiglu(torch.stack([linear(x, experts.gate_up[e], law) for e in chosen]))
    act.mul_(route.weights.view(-1, 1, 1))
    return torch.stack([linear(a, experts.down[e], law)[:1] for a, e in zip(act, chosen, strict=True)], 1).sum(1)


def _many_rows(x: torch.Tensor, route: Route, experts: ExpertWeights, law: RowLaw) -> torch.Tensor:
    """All experts in one product, padded to the rows of the busiest."""
    rows, top_k = route.chosen.shape
    count = len(experts.down)
    flat = route.chosen.flatten()
    order = flat.argsort(stable=True)
    sizes = flat.bincount(minlength=count)
    starts = sizes.cumsum(0) - sizes
    capacity = law.padded(int(sizes.max()))
    expert = flat[order]
    slot = expert * capacity + torch.arange(rows * top_k) - starts[expert]  # of each pair, in order of experts
    pair = torch.zeros(count * capacity, dtype=torch.int64)
    pair[slot] = order
    gate_up = batched_linear(x.index_select(0, pair // top_k).view(count, capacity, -1), experts.gate_up, law)
    act = swiglu(gate_up).mul_(route.weights.flatten().index_select(0, pair).view(count, capacity, 1))
    back = torch.empty(rows * top_k, dtype=torch.int64)
    back[order] = slot
    out = batched_linear(act, experts.down, law).flatten(0, 1).index_select(0, back)
    return out.view(rows, top_k, -1).sum(1)
