"""Which pairs are computed together: the work list of the experts' products, made on the device.

chosen [R, K] int32 (an expert, or -1: none) -> of up to `most` tiles: expert [most] int32, pairs [most, 16] int32
(row * K + slot in ascending order, or -1; 64 places if `capacity` is more than 16), number [1] int32. A tile is up to
`capacity` pairs of one expert; experts ascend.

halves: an expert with more pairs than `capacity`, which is 4 then, has tiles of 8 instead, each twice in a row: for the
first half of its output rows (expert + 65536) and for the second (expert + 131072). What a product does with few pairs
is cheaper per tile, with many it is cheaper per pair; no bit of a row depends on which.

Every program counts all pairs, so that none waits for another; integers only, no atomics. Where there is CUDA C++, up
to 512 pairs are one program's work (moe_few_tiles.cu): the same list.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.gpu.follow import follow, followed
from kernels.gpu.moe_few_tiles import few_tiles_cuda
from kernels.gpu.shapes import check

TEST_SHAPES = [  # (R, E, K, capacity)
    (1, 8, 2, 1), (5, 16, 4, 2), (33, 24, 8, 8), (70, 24, 8, 4), (600, 40, 8, 16), (300, 24, 8, 64),
]  # fmt: skip
WIDTH, WIDE = 16, 64  # places of a tile
HALF = 65536  # what marks a half
BLOCK = 1024  # pairs that are looked at together
ONE_WARP = 256  # pairs: up to here a program is one warp, whose sums need no barrier


class Tiles(NamedTuple):
    """Views of a work list's room, for one step's rows."""

    expert: torch.Tensor
    pairs: torch.Tensor
    number: torch.Tensor


def width_of(capacity: int) -> int:
    """Places of a tile."""
    return WIDTH if capacity <= WIDTH else WIDE


def most_tiles(rows: int, top_k: int, experts: int, capacity: int, halves: bool = False) -> int:
    """As many as there can be."""
    pairs = rows * top_k
    return min(pairs, (2 if halves else 1) * experts + pairs // capacity)


def reference(chosen: torch.Tensor, experts: int, capacity: int, halves: bool = False) -> list[tuple[int, list[int]]]:
    """(expert, with its mark, pairs) of each tile."""
    flat, out = chosen.flatten().tolist(), []
    for e in range(experts):
        mine = [pair for pair, found in enumerate(flat) if found == e]
        split = halves and len(mine) > capacity
        size = 8 if split else capacity
        for begin in range(0, len(mine), size):
            out += [(e + HALF * mark, mine[begin : begin + size]) for mark in ((1, 2) if split else (0,))]
    return out


@triton.jit(do_not_specialize=["total"])
def _tiles(
    chosen, expert, pairs, number, total,
    E: tl.constexpr, EB: tl.constexpr, V: tl.constexpr, HALVES: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    follow(PDL)
    e = tl.program_id(0)
    ids = tl.arange(0, EB)
    found = tl.zeros((EB,), tl.int32)
    begin = 0
    while begin < total:  # of a `range` over a value the interpreter knows nothing
        p = begin + tl.arange(0, BLOCK)
        here = tl.load(chosen + p, mask=p < total, other=-1)
        found += tl.histogram(tl.where(here >= 0, here, EB - 1), EB)  # EB > E: what is nobody's is counted last
        begin += BLOCK
    found = tl.where(ids < E, found, 0)
    tiles = (found + V - 1) // V
    if HALVES:
        tiles = tl.where(found > V, (found + 7) // 8 * 2, tiles)
    mine, first = tl.sum(tl.where(ids == e, found, 0), 0), tl.sum(tl.where(ids < e, tiles, 0), 0)
    if e == 0:
        tl.store(number, tl.sum(tiles, 0))
    halved = HALVES and mine > V
    size = tl.where(halved, 8, V)
    copies = tl.where(halved, 2, 1)
    own = tl.sum(tl.where(ids == e, tiles, 0), 0)
    place = tl.arange(0, WIDTH)
    n = 0
    while n < own:
        mark = tl.where(halved, e + HALF * (1 + n % 2), e)
        tl.store(expert + first + n, mark)
        left = mine - n // copies * size
        tl.store(pairs + (first + n) * WIDTH + place, -1, mask=(place >= left) | (place >= size))
        n += 1
    seen, begin = 0, 0
    while (begin < total) & (mine > 0):
        p = begin + tl.arange(0, BLOCK)
        here = tl.load(chosen + p, mask=p < total, other=-1) == e
        rank = seen + tl.cumsum(here.to(tl.int32), 0) - 1
        at = pairs + (first + rank // size * copies) * WIDTH + rank % size
        tl.store(at, p, mask=here)
        tl.store(at + WIDTH, p, mask=here & halved)
        seen += tl.sum(here.to(tl.int32), 0)
        begin += BLOCK


def expert_tiles(chosen: torch.Tensor, experts: int, capacity: int, tiles: Tiles, halves: bool = False) -> None:
    """Fills `tiles`. ValueError names what does not fit."""
    rows, top_k = chosen.shape
    most = most_tiles(rows, top_k, experts, capacity, halves)
    check("chosen", chosen, (rows, top_k), torch.int32)
    check("expert", tiles.expert, (most,), torch.int32)
    width = width_of(capacity)
    check("pairs", tiles.pairs, (most, width), torch.int32)
    check("number", tiles.number, (1,), torch.int32)
    total = rows * top_k
    if few_tiles_cuda(chosen, experts, capacity, tiles, halves, width):
        return
    _tiles[(experts,)](
        chosen, *tiles, total, E=experts, EB=triton.next_power_of_2(experts + 1), V=capacity, HALVES=halves,
        WIDTH=width, HALF=HALF, BLOCK=min(BLOCK, max(32, triton.next_power_of_2(total))),
        num_warps=1 if total <= ONE_WARP else 4, **followed(),
    )  # fmt: skip
