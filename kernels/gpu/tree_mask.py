"""Ancestor masks and depths of a step's rows on the GPU, one program a sequence.

    mask[r] = mask[parent[r]] | 1 << j       row r is row j of its sequence; bit i: row i is it, or above it
    depth[r] = depth[parent[r]] + 1          0 at the anchor

Rows of all sequences lie one after another: sequence s has rows row_start[s] .. row_start[s + 1] - 1, the anchor first;
parents count from the anchor, -1 at the anchor. What follows row_start[S] is padding and gets mask 0, depth 0. So do
sequences of more than 64 rows: chunks of a prompt, which need no mask.

parents [R] int32, row_start [S + 1] int32 -> mask [R] int64, depth [R] int32.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.gpu.checks import expect
from kernels.gpu.follow import follow, followed
from kernels.tree_mask import tree_mask as mask_reference

TEST_SHAPES = [(1, 1), (2, 8), (3, 33), (2, 64)]  # (S, most rows of one sequence)
BENCH_SHAPES = [(1, 16), (8, 64), (64, 16), (64, 64)]
WORD = 64


class TreeMask(NamedTuple):
    """What attention and positions need of a tree."""

    mask: torch.Tensor  # [R] int64
    depth: torch.Tensor  # [R] int32


def reference(parents: torch.Tensor, row_start: torch.Tensor) -> TreeMask:
    """The same by torch ops, sequence by sequence."""
    mask, depth = torch.zeros_like(parents, dtype=torch.int64), torch.zeros_like(parents)
    for first, end in pairwise(row_start.tolist()):
        if 0 < end - first <= WORD:
            one = mask_reference.reference(parents[None, first:end].long())
            mask[first:end], depth[first:end] = one.mask[0], one.depth[0]
    return TreeMask(mask, depth)


@triton.jit(do_not_specialize=["sequences", "rows"])
def _tree_mask(parents_ptr, row_start_ptr, mask_ptr, depth_ptr, sequences, rows, PDL: tl.constexpr):
    follow(PDL)
    s = tl.program_id(0)
    i = tl.arange(0, 64)
    first = tl.load(row_start_ptr + s)
    if s == sequences:  # the last program: padding
        while first < rows:
            tl.store(mask_ptr + first + i, tl.zeros([64], tl.int64), mask=first + i < rows)
            tl.store(depth_ptr + first + i, tl.zeros([64], tl.int32), mask=first + i < rows)
            first += 64
    else:
        end = tl.load(row_start_ptr + s + 1)
        few = end - first <= 64
        real = (i < end - first) & few
        up = tl.load(parents_ptr + first + i, mask=real, other=-1)
        mask = tl.where(real, tl.full([64], 1, tl.int64) << i.to(tl.int64), 0)
        depth = tl.zeros([64], tl.int32)
        climbing = tl.max(up, 0) >= 0
        while climbing:  # one level a turn: every row looks at its next ancestor
            one = tl.full([64], 1, tl.int64) << tl.maximum(up, 0).to(tl.int64)
            mask |= tl.where(up >= 0, one, 0)
            depth += (up >= 0).to(tl.int32)
            up = tl.load(parents_ptr + first + up, mask=up >= 0, other=-1)
            climbing = tl.max(up, 0) >= 0
        while first < end:  # more than once only where rows are too many for a mask
            tl.store(mask_ptr + first + i, mask, mask=first + i < end)
            tl.store(depth_ptr + first + i, depth, mask=first + i < end)
            first += 64


def tree_mask(parents: torch.Tensor, row_start: torch.Tensor) -> TreeMask:
    """One launch, no host sync. Parents must not form a cycle: a tree is checked before it gets here."""
    expect("parents", parents, torch.int32, (None,))
    expect("row_start", row_start, torch.int32, (None,))
    rows, sequences = len(parents), len(row_start) - 1
    mask = torch.empty(rows, dtype=torch.int64, device=parents.device)
    depth = torch.empty(rows, dtype=torch.int32, device=parents.device)
    _tree_mask[(sequences + 1,)](parents, row_start, mask, depth, sequences, rows, num_warps=2, **followed())
    return TreeMask(mask, depth)
