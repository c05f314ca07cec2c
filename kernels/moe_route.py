"""The router: sigmoid scores, a bias that only selects, weights from the unbiased scores (arXiv 2412.19437 §2.1.2).

    s = sigmoid(l);  chosen = top-k of s + bias;  w = s[chosen] / (sum + 1e-20) * scale

l [R, E'], bias [E'] -> chosen [R, k] int64, weights [R, k].   E' is the number of experts padded to a multiple of 32,
because torch rounds a sigmoid differently past the last whole vectors; the bias of the padding is -inf.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels.dispatch import op
from kernels.row_blocks import by_row_blocks

TEST_SHAPES = [(1, 8, 2), (4, 16, 4), (33, 384, 8)]  # (R, E, k)
ROUTER_MULTIPLE = 32


class Route(NamedTuple):
    """Which experts a row goes to, and with which weights."""

    chosen: torch.Tensor  # [R, k] int64
    weights: torch.Tensor  # [R, k] float32


@op
def moe_route(logits: torch.Tensor, bias: torch.Tensor, top_k: int, normalise: bool, scale: float) -> Route:
    scores = by_row_blocks(torch.sigmoid, logits)
    chosen = (scores + bias).topk(top_k, -1).indices
    weights = scores.gather(1, chosen)
    if normalise:
        weights.div_(weights.sum(-1, keepdim=True).add_(1e-20))
    return Route(chosen, weights.mul_(scale))
