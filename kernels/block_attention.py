"""Attention of a drafter's block over its sequence's context and the block itself, grouped-query.

    o[g, i] = softmax_j(q[g, i] . k[g, j] / sqrt(D) + mask[i, j]) v[g, j]

q [G, Q, D] (the query heads of a KV head one after another: Q = heads / G * block), k, v [G, N, D] -> o [G, Q, D];
mask [Q, N] 0 or -inf, or None.
"""

from __future__ import annotations

import torch

from kernels.dispatch import op

TEST_SHAPES = [(2, 24, 8, 64), (1, 8, 40, 16), (2, 16, 300, 32)]  # (G, Q, N, D)


@op
def block_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    scores = torch.bmm(q * q.shape[-1] ** -0.5, k.mT)
    if mask is not None:
        scores += mask  # baddbmm would take ten times as long here
    return torch.bmm(scores.softmax(-1), v)
