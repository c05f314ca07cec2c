"""The work list of many rows: what `expert_tiles` (moe_tiles.py) makes, in two launches whose programs share the pairs.

Of few rows every program counts all pairs, which costs more with every row. Here a program has 1,024 of them: the first
launch counts them by expert, the second adds up what stands before, sorts its own by expert and pair, and so knows each
one's place. Integers only, no atomics: the list is the same whichever program is first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.follow import follow, followed
from kernels.gpu.moe_tiles import WIDE, Tiles, most_tiles
from kernels.gpu.shapes import check

TEST_SHAPES = [(1, 8, 8), (300, 24, 8)]  # (R, E, K)
BLOCK = 1024  # pairs of a program
TOGETHER = 16  # programs whose counts are added up at a time


@triton.jit
def _expert(chosen, p, total, EB: tl.constexpr):
    """Whose pair it is; EB - 1: nobody's."""
    here = tl.load(chosen + p, mask=p < total, other=-1)
    return tl.where(here >= 0, here, EB - 1)


@triton.jit(do_not_specialize=["total"])
def _counts(chosen, counts, total, EB: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    follow(PDL)
    e = _expert(chosen, tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), total, EB)
    tl.store(counts + tl.program_id(0) * EB + tl.arange(0, EB), tl.histogram(e, EB))


@triton.jit(do_not_specialize=["total", "blocks"])
def _places(
    chosen, counts, expert, pairs, number, total, blocks,
    E: tl.constexpr, EB: tl.constexpr, V: tl.constexpr, OWN: tl.constexpr, TOGETHER: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """OWN experts or more a program: whose tiles are named, and filled up with -1, by it."""
    follow(PDL)
    c = tl.program_id(0)
    ids = tl.arange(0, EB)
    found, before = tl.zeros((EB,), tl.int32), tl.zeros((EB,), tl.int32)
    begin = 0
    while begin < blocks:
        b = begin + tl.arange(0, TOGETHER)
        v = tl.load(counts + b[:, None] * EB + ids[None, :], mask=(b < blocks)[:, None], other=0)
        found += tl.sum(v, 0)
        before += tl.sum(tl.where((b < c)[:, None], v, 0), 0)
        begin += TOGETHER
    found = tl.where(ids < E, found, 0)
    tiles = (found + V - 1) // V
    first = tl.cumsum(tiles, 0) - tiles
    if c == 0:
        tl.store(number, tl.sum(tiles, 0))
    mine = tl.load(counts + c * EB + ids)
    start = tl.cumsum(mine, 0) - mine
    i = tl.arange(0, BLOCK)
    key = tl.sort(_expert(chosen, c * BLOCK + i, total, EB) * BLOCK + i)
    e = key // BLOCK
    at = tl.gather(first * V + before - start, e, 0) + i  # an expert's tiles stand one behind the other
    tl.store(pairs + at, c * BLOCK + key % BLOCK, mask=e < E)
    own = c + tl.arange(0, OWN) * blocks
    here = own < E
    own = tl.minimum(own, EB - 1)
    place, had, n = tl.gather(first, own, 0), tl.gather(found, own, 0), 0
    most = tl.max(tl.where(here, (had + V - 1) // V, 0), 0)
    while n < most:
        tl.store(expert + place + n, own, mask=here & (n * V < had))
        n += 1
    left = had[:, None] + tl.arange(0, V)[None, :]
    tl.store(pairs + place[:, None] * V + left, -1, mask=here[:, None] & (left < ((had + V - 1) // V * V)[:, None]))


def room(rows: int, top_k: int, experts: int, device: str | torch.device) -> torch.Tensor:
    """For the counts of up to so many rows."""
    return torch.empty(
        triton.cdiv(rows * top_k, BLOCK), triton.next_power_of_2(experts + 1), dtype=torch.int32, device=device
    )


def many_tiles(chosen: torch.Tensor, experts: int, counts: torch.Tensor, tiles: Tiles) -> None:
    """Fills `tiles`, of up to 64 pairs each. ValueError names what does not fit."""
    rows, top_k = chosen.shape
    most, total = most_tiles(rows, top_k, experts, WIDE), rows * top_k
    blocks, wide = triton.cdiv(total, BLOCK), triton.next_power_of_2(experts + 1)
    check("chosen", chosen, (rows, top_k), torch.int32)
    check("expert", tiles.expert, (most,), torch.int32)
    check("pairs", tiles.pairs, (most, WIDE), torch.int32)
    check("number", tiles.number, (1,), torch.int32)
    check("counts", counts, (None, wide), torch.int32)
    if len(counts) < blocks:
        raise ValueError(f"counts has {len(counts)} lines, {blocks} were expected")
    _counts[(blocks,)](chosen, counts, total, EB=wide, BLOCK=BLOCK, num_warps=4, **followed())
    _places[(blocks,)](
        chosen, counts, *tiles, total, blocks, E=experts, EB=wide, V=WIDE,
        OWN=triton.next_power_of_2(triton.cdiv(experts, blocks)), TOGETHER=TOGETHER, BLOCK=BLOCK, num_warps=8,
        **followed(),
    )  # fmt: skip
