"""Which rows of a draft tree each row may attend to, as one bitmask a row, and how deep each row lies.

    mask[i] = mask[parent[i]] | 1 << i        bit j set: row j is i, or an ancestor of i
    depth[i] = depth[parent[i]] + 1           0 at the anchor; row i stands at position P + depth[i]

parents [S, n] int64, rows of the tree with the anchor as row 0 and parent -1 -> mask [S, n] int64, depth [S, n] int64.
n <= 64: row 63 sits in the sign bit, so shift masks right with care (>> copies the sign) and compare them as bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels.dispatch import op

TEST_SHAPES = [(1, 1), (2, 8), (3, 33), (2, 64)]  # (S, n)
WORD = 64
BITS = tuple(1 << i if i < 63 else -(1 << 63) for i in range(WORD))  # as signed words


class TreeMask(NamedTuple):
    """Both are [S, n] int64."""

    mask: torch.Tensor
    depth: torch.Tensor


@op
def tree_mask(parents: torch.Tensor) -> TreeMask:
    """Parents may lie anywhere before or after their children; -1 ends a path. Cycles are the caller's mistake."""
    sequences, n = parents.shape
    assert n <= WORD, "one word a row"
    # a last row stands for "above the anchor": it is its own parent and adds nothing
    above = torch.full((sequences, 1), n, dtype=torch.int64, device=parents.device)
    up = torch.cat([torch.where(parents < 0, n, parents), above], 1)
    bits = torch.tensor((*BITS[:n], 0), device=parents.device)
    mask = bits.repeat(sequences, 1)
    depth = (up < n).to(torch.int64)
    for _ in range((n - 1).bit_length()):  # a path doubles its known length each turn
        mask = mask | mask.gather(1, up)
        depth = depth + depth.gather(1, up)
        up = up.gather(1, up)
    return TreeMask(mask[:, :n], depth[:, :n])
