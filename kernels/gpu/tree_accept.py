"""The acceptance walk on the GPU, behind the draws of kernels/gpu/draw.py: two launches, no host sync.

    path  = the anchor's row and the rows whose token was drawn at their parent, with all rows above them
    bonus = drawn[last row of the path]

One draw a node, as kernels/tree_accept.py: what is emitted has the law of plain decoding for every tree. A row is on
the path if its ancestor mask has no bit that does not match, so all rows are judged at once, one program a sequence.

logits [R, V], parents, tokens, depth [R] int32, mask [R] int64 (kernels/gpu/tree_mask.py), row_start [S + 1] int32: the
rows of sequence s, 64 at most, are row_start[s] .. row_start[s + 1] - 1, the anchor first; parents count from it.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.gpu import checks
from kernels.gpu.checks import at_most, expect
from kernels.gpu.draw import Laws, draw
from kernels.sample import Law
from kernels.tree_accept import WalkRows, walk_trees

TEST_SHAPES = [(1, 1, 7), (2, 8, 50), (3, 33, 64), (1, 64, 20)]  # (S, most rows of one sequence, V)
BENCH_SHAPES = [(8, 16, 20480), (2, 64, 20480), (1, 16, 20480), (1, 1, 20480)]
MOST_ROWS = 64


class Accepted(NamedTuple):
    """Where the draws led. Behind a sequence's length: -1. A sequence without rows: length 0, bonus -1."""

    path: torch.Tensor  # [S, D] int32, rows counted from the anchor, ascending; the anchor first
    length: torch.Tensor  # [S] int32, the anchor counted: as many tokens are emitted
    bonus: torch.Tensor  # [S] int32, the last token of `emitted`; -1: its row has no largest finite logit, or a NaN
    emitted: torch.Tensor  # [S, D] int32: the path's tokens below the anchor, then the bonus


def reference(
    logits: torch.Tensor, parents: torch.Tensor, tokens: torch.Tensor, row_start: torch.Tensor, laws: list[Law]
) -> list[list[int]]:
    """The tokens that each sequence emits, by the CPU's ops."""
    rows = [slice(a, b) for a, b in pairwise(row_start.tolist())]
    trees = [
        WalkRows(at.start, parents[at].tolist(), tokens[at].tolist(), law)
        for at, law in zip(rows, laws, strict=True)
        if at.stop > at.start
    ]
    walked = iter(walk_trees(logits.float().cpu(), trees))
    emitted = []
    for at in rows:
        if at.stop == at.start:
            emitted.append(list[int]())
            continue
        path, bonus = next(walked)
        emitted.append([int(tokens[at.start + row]) for row in path[1:]] + [bonus])
    return emitted


@triton.jit
def _walk(
    parents_ptr,
    tokens_ptr,
    mask_ptr,
    drawn_ptr,
    row_start_ptr,
    out_path,
    out_length,
    out_bonus,
    out_emitted,
    deepest,
    PDL: tl.constexpr,
):
    s = tl.program_id(0)
    i = tl.arange(0, 64)
    first = tl.load(row_start_ptr + s)
    rows = tl.load(row_start_ptr + s + 1) - first
    real = i < rows
    parent = tl.load(parents_ptr + first + i, mask=real, other=-1)
    token = tl.load(tokens_ptr + first + i, mask=real, other=-1)
    mask = tl.load(mask_ptr + first + i, mask=real, other=0)
    if PDL:  # what is above was there before the draws began
        tl.extra.cuda.gdc_wait()
    wanted = tl.load(drawn_ptr + first + parent, mask=parent >= 0, other=-1)
    matches = real & ((i == 0) | ((parent >= 0) & (token == wanted) & (wanted >= 0)))
    bits = tl.where(matches, tl.full([64], 1, tl.int64) << i.to(tl.int64), 0)
    on_path = real & ((mask & ~tl.sum(bits, 0)) == 0)  # distinct bits: the sum is their union
    length = tl.sum(on_path.to(tl.int32), 0)
    end = tl.max(tl.where(on_path, i, 0), 0)
    bonus = tl.load(drawn_ptr + first + end, mask=rows > 0, other=-1)
    place = tl.cumsum(on_path.to(tl.int32), 0) - 1
    at = s * deepest
    tl.store(out_path + at + place, i, mask=on_path & (place < deepest))
    tl.store(out_path + at + i, tl.full([64], -1, tl.int32), mask=(i >= length) & (i < deepest))
    tl.store(out_emitted + at + place - 1, token, mask=on_path & (place > 0) & (place <= deepest))
    tl.store(out_emitted + at + i, tl.where(i == length - 1, bonus, -1), mask=(i >= length - 1) & (i < deepest))
    tl.store(out_length + s, length)
    tl.store(out_bonus + s, bonus)


def accept(
    parents: torch.Tensor,
    tokens: torch.Tensor,
    mask: torch.Tensor,
    drawn: torch.Tensor,
    row_start: torch.Tensor,
    deepest: int,
    behind_draw: bool = False,
) -> Accepted:
    """The walk alone, of draws that are there: drawn [R] int32. `deepest`: D, rows of the longest path that can be.

    `behind_draw`: the launch before this one, on this stream, is `draw`, and what else is read here was there before
    that began; then the walk is launched while the draws run.
    """
    rows, sequences = len(parents), len(row_start) - 1
    expect("parents", parents, torch.int32, (None,))
    expect("tokens", tokens, torch.int32, (rows,))
    expect("mask", mask, torch.int64, (rows,))
    expect("drawn", drawn, torch.int32, (rows,))
    expect("row_start", row_start, torch.int32, (None,))
    at_most("deepest", deepest, MOST_ROWS)
    device = parents.device
    path, emitted = (torch.empty((sequences, deepest), dtype=torch.int32, device=device) for _ in range(2))
    length, bonus = (torch.empty(sequences, dtype=torch.int32, device=device) for _ in range(2))
    if sequences:
        pdl = behind_draw and not checks.INTERPRETED
        _walk[(sequences,)](
            parents, tokens, mask, drawn, row_start, path, length, bonus, emitted, deepest, PDL=pdl, num_warps=2,
            launch_pdl=pdl,
        )  # fmt: skip
    return Accepted(path, length, bonus, emitted)


def tree_accept(
    logits: torch.Tensor,
    parents: torch.Tensor,
    tokens: torch.Tensor,
    depth: torch.Tensor,
    mask: torch.Tensor,
    row_start: torch.Tensor,
    laws: Laws,
    deepest: int,
) -> Accepted:
    """Draws a token at every row and follows the draws down every tree. Greedy and seeded sequences in one batch."""
    drawn = draw(logits, laws, depth, row_start)
    return accept(parents, tokens, mask, drawn, row_start, deepest, behind_draw=True)
