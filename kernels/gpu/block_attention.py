"""A drafter's block over a long context, its keys split among programs: kernels/gpu/draft_block.py's `draft_attention`.

    o[i] = softmax_j(q[i] . k_j / sqrt(D)) v_j        arguments and meaning as there

One program takes SPLIT positions of the context (more, where the grid would be too large) for one sequence and KV head,
and leaves maximum, sum and product; the block itself is a split of its own. A second launch merges them in order. The
grid is made for the most pages a sequence can have; a program whose positions are not there, or not in the window,
leaves at once and is not merged. For a short context, or many sequences, `draft_attention` in one launch is as good.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.gpu.checks import FLOATS, expect
from kernels.gpu.draft_block import PAGE, attend
from kernels.gpu.draft_block import attention_reference as reference
from kernels.gpu.follow import follow, followed

__all__ = ["BENCH_SHAPES", "TEST_SHAPES", "block_attention", "cut", "reference", "words"]

TEST_SHAPES = [(1, 2, 1, 16, 8), (3, 6, 2, 64, 8), (2, 8, 1, 128, 8)]  # (S, heads, KV heads, D, block)
# (S, heads, KV heads, D, block, context, window): the bundled drafter, and K2.6's whole and a rank's part of eight
BENCH_SHAPES = [
    (8, 6, 2, 64, 8, 4096, 256), (8, 6, 2, 64, 8, 4096, 0), (1, 64, 8, 128, 8, 8192, 0), (1, 64, 8, 128, 8, 32768, 0),
    (8, 64, 8, 128, 8, 8192, 0), (1, 8, 1, 128, 8, 32768, 0),
]  # fmt: skip
SPLIT = 512  # positions, at least
PROGRAMS = 1056  # eight a processor: more splits than this only cost memory
LEAST_SPLITS = 4


@triton.jit
def _block_split(
    q, own, pool, pages, start, end, anchor, sums, peaks, totals, scale,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr, PAGES: tl.constexpr, SPLITS: tl.constexpr, PAGES_OF_SPLIT: tl.constexpr, MB: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    follow(PDL)
    split, g, s = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    m, d, j = tl.arange(0, MB), tl.arange(0, D), tl.arange(0, 64)
    row, head = m % BLOCK, g * (HEADS // GROUPS) + m // BLOCK
    live = (m < HEADS // GROUPS * BLOCK)[:, None]
    begin, stop, place = tl.load(start + s), tl.load(end + s), tl.load(anchor + s)
    base = begin // 64 + split * PAGES_OF_SPLIT  # the first page of this split
    page, last = base, tl.minimum(base + PAGES_OF_SPLIT, (stop + 63) // 64)
    if WINDOW:
        page = tl.maximum(page, tl.maximum(place - WINDOW + 1, 0) // 64)
    line = ((s * GROUPS + g) * SPLITS + split).to(tl.int64) * MB + m
    if (split < SPLITS - 1) & (page >= last):
        tl.store(peaks + line, tl.full([MB], -2e30, tl.float32))  # nothing was seen: not merged
    else:
        at = ((s * BLOCK + row).to(tl.int64) * HEADS + head)[:, None] * D + d[None, :]
        query = tl.load(q + at, mask=live, other=0.0)
        query = (query.to(tl.float32) * scale).to(query.dtype)
        peak, total = tl.full((MB,), -1e20, tl.float32), tl.zeros((MB,), tl.float32)
        acc = tl.zeros((MB, D), tl.float32)
        if split == SPLITS - 1:  # the block itself, one turn
            page, last = 0, 1
        while page < last:
            p = page * 64 + j
            here = (p >= begin) & (p < stop)
            if split == SPLITS - 1:
                p, here = place + j, j < BLOCK
                k_at = own + ((s * BLOCK + j).to(tl.int64) * (2 * GROUPS) + g)[:, None] * D + d[None, :]
            else:
                slot = tl.load(pages + s * PAGES + page - begin // 64).to(tl.int64) * 64 + j
                k_at = pool + (slot * (2 * GROUPS) + g)[:, None] * D + d[None, :]
            k = tl.load(k_at, mask=here[:, None], other=0.0)
            v = tl.load(k_at + GROUPS * D, mask=here[:, None], other=0.0)
            apart = place + row[:, None] - p[None, :]
            seen = here[None, :] & (row[:, None] >= 0)
            if WINDOW:
                seen = seen & (apart < WINDOW) & (apart > -WINDOW)
            if CAUSAL:
                seen = seen & (apart >= 0)
            peak, total, acc = attend(query, k, v, seen, peak, total, acc)
            page += 1
        tl.store(sums + line[:, None] * D + d[None, :], acc)
        tl.store(peaks + line, peak)
        tl.store(totals + line, total)


@triton.jit
def _block_merge(
    sums, peaks, totals, out,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
    MB: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    follow(PDL)
    m, g, s = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    d = tl.arange(0, D)
    line = ((s * GROUPS + g) * SPLITS).to(tl.int64) * MB + m
    peak, total = tl.full([], -1e20, tl.float32), tl.full([], 0.0, tl.float32)
    acc = tl.zeros([D], tl.float32)
    for split in tl.range(SPLITS):
        one = tl.load(peaks + line + split * MB)
        if one > -1e30:
            above = tl.maximum(peak, one)
            fade, share = tl.exp2(peak - above), tl.exp2(one - above)
            acc = acc * fade + tl.load(sums + (line + split * MB) * D + d) * share
            total = total * fade + tl.load(totals + line + split * MB) * share
            peak = above
    head = g * (HEADS // GROUPS) + m // BLOCK
    at = ((s * BLOCK + m % BLOCK).to(tl.int64) * HEADS + head) * D + d
    tl.store(out + at, (acc / total).to(out.dtype.element_ty))


class Cut(NamedTuple):
    """How a launch is divided."""

    splits: int  # of a sequence and KV head, the block's own among them
    pages: int  # of a split
    lines: int  # (row, head) pairs of a program


def cut(sequences: int, heads: int, groups: int, block: int, most: int) -> Cut:
    """For up to `most` pages a sequence."""
    pages = max(SPLIT // PAGE, -(-most // max(LEAST_SPLITS, PROGRAMS // (sequences * groups))))
    return Cut(-(-most // pages) + 1, pages, max(16, triton.next_power_of_2(heads // groups * block)))


def words(sequences: int, heads: int, groups: int, width: int, block: int, most: int) -> int:
    """Floats that the splits' states take."""
    splits, _, lines = cut(sequences, heads, groups, block, most)
    return sequences * groups * splits * lines * (width + 2)


def block_attention(
    q: torch.Tensor,
    own: torch.Tensor,
    pool: torch.Tensor,
    pages: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    anchor: torch.Tensor,
    out: torch.Tensor,
    window: int | None,
    causal: bool,
    states: torch.Tensor | None = None,
) -> None:
    """Fills out as q [S * block, heads, D] from own [S * block, 2, G, D] and pool [slots, 2, G, D]; two launches.

    start, end, anchor [S] and pages [S, P], int32; start <= end <= anchor: not checked here. Blocks of 64 at most. No
    host sync. states: `words` float32 for what the splits leave; None: allocated. ValueError names what does not fit.
    """
    expect("q", q, FLOATS, (None, None, None))
    (rows, heads, width), (sequences, most) = q.shape, pages.shape
    groups = own.shape[2]
    expect("own", own, q.dtype, (rows, 2, groups, width))
    expect("pool", pool, q.dtype, (None, 2, groups, width))
    expect("out", out, q.dtype, (rows, heads, width))
    expect("pages", pages, torch.int32, (sequences, most))
    for name, tensor in (("start", start), ("end", end), ("anchor", anchor)):
        expect(name, tensor, torch.int32, (sequences,))
    if not sequences or rows % sequences or heads % groups or rows // sequences > PAGE:
        raise ValueError(f"q has {rows} rows and {heads} heads, expected multiples of {sequences} and {groups}")
    if width < 16 or width & (width - 1):
        raise ValueError(f"q has heads {width} wide, expected a power of two from 16 on")
    block = rows // sequences
    splits, pages_of_split, lines = cut(sequences, heads, groups, block, most)
    needed, states_of = words(sequences, heads, groups, width, block, most), sequences * groups * splits * lines
    if states is None:
        states = torch.empty(needed, dtype=torch.float32, device=q.device)
    expect("states", states, torch.float32, (None,))
    if len(states) < needed:
        raise ValueError(f"states has {len(states)} words, {needed} are needed")
    sums, peaks, totals = states[:needed].split([states_of * width, states_of, states_of])
    _block_split[(splits, groups, sequences)](
        q, own, pool, pages, start, end, anchor, sums, peaks, totals, width**-0.5 * 1.4426950408889634, HEADS=heads,
        GROUPS=groups, D=width, BLOCK=block, WINDOW=window or 0, CAUSAL=causal, PAGES=most, SPLITS=splits,
        PAGES_OF_SPLIT=pages_of_split, MB=lines, num_warps=8 if lines * width > 4096 else 4, num_stages=2, **followed(),
    )  # fmt: skip
    _block_merge[(heads // groups * block, groups, sequences)](
        sums, peaks, totals, out, HEADS=heads, GROUPS=groups, D=width, BLOCK=block, SPLITS=splits, MB=lines,
        num_warps=1, **followed(),
    )  # fmt: skip
