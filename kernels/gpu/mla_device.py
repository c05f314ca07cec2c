"""Device code that the attention kernels share: who computes what, and the pieces of the one arithmetic.

Words. A *line* is one (row, head), number row * H + head. A *tile* is up to BM lines of one sequence, side by side. A
*split* is as many keys of a sequence, from a multiple on; the prefix's work is every split of every tile.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

LOG2E = gl.constexpr(1.4426950408889634)
LOWEST = gl.constexpr(-1e20)  # where a running maximum starts
MASKED = gl.constexpr(-1e30)  # a score that no maximum ever is: 2^(MASKED - LOWEST) is 0
FINEST = gl.constexpr(4294967296.0)  # 2^32


@gluon.jit
def follow(x):
    """Waits until the kernel before this one is done, then lets the next be launched (programmatic dependent launch).

    What a kernel reads before this call was written by the kernel before the last, or earlier.
    """
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; griddepcontrol.launch_dependents; mov.u32 $0, $1;",
        "=r,r",
        [x],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def at(values, index, lanes):
    """values[index], of a vector whose places are `lanes`."""
    return gl.sum(gl.where(lanes == index, values, 0), 0)


@gluon.jit
def row_sum(columns, axis: gl.constexpr):
    """Sum of 64 floats >= 0 in fixed point: integers have one sum in any order, so every layout gives the same bits."""
    whole = gl.sum((columns * FINEST).to(gl.int64), axis)
    return whole.to(gl.float32) * (1.0 / FINEST)


@triton.constexpr_function
def lane_layout(C):
    """[64, C] as the matrix unit leaves it in eight warps, once `by_lane` has put a lane's columns side by side."""
    columns = [[0, 32 << i] for i in range((C // 64).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0], *columns],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0], [0, C // 2]],
        block_bases=[],
        shape=[64, C],
    )


@gluon.jit
def by_lane(x):
    """x [N, C] with its columns (g, j, c, e) of [C/32, 4, 4, 2] in the order (g, c, j, e), in which sums are kept.

    A lane of the matrix unit's output [lines, columns] has (j, e) of its c: eight in a row, one 16-byte piece.
    """
    N: gl.constexpr = x.shape[0]
    C: gl.constexpr = x.shape[1]
    return x.reshape([N, C // 32, 4, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([N, C])


@gluon.jit
def real_column(c):
    """The column that `by_lane` put at c."""
    return c // 32 * 32 + (c // 2 % 4) * 8 + (c // 8 % 4) * 2 + c % 2


@gluon.jit
def fill(latents, ropes, row, bar, kb, keb, C: gl.constexpr, P: gl.constexpr, pred):
    """Asks for the 64 cache rows from `row` on; `bar` is signalled when they are there."""
    mbarrier.expect(bar, 64 * (C + P) * 2, pred=pred)
    tma.async_copy_global_to_shared(ropes, [row, C], bar, keb, pred=pred)
    tma.async_copy_global_to_shared(latents, [row, 0], bar, kb, pred=pred)


@gluon.jit
def uniform(a, b, c, d, e, f, g, W: gl.constexpr):
    """The same seven integers, by way of shared memory. The compiler takes what lanes shuffled for different in each,
    and keeps the descriptors of all products in vector registers if a loop ends on such a number.
    """
    ALL: gl.constexpr = gl.BlockedLayout([8], [32], [W], [0])  # every lane has them all
    i = gl.arange(0, 8, ALL)
    packed = gl.where(i == 0, a, gl.where(i == 1, b, gl.where(i == 2, c, gl.where(i == 3, d, gl.where(i == 4, e, f)))))
    room = gl.allocate_shared_memory(gl.int32, [8], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    room.store(gl.where(i == 6, g, packed))
    gl.thread_barrier()
    v = room.load(ALL)
    return at(v, 0, i), at(v, 1, i), at(v, 2, i), at(v, 3, i), at(v, 4, i), at(v, 5, i), at(v, 6, i)


@gluon.jit
def portion(
    pid, G, ROWS, LENS, WIDTHS, B, H, BM: gl.constexpr, BP: gl.constexpr, SPLITS: gl.constexpr, W: gl.constexpr
):
    """Program pid's part of the prefix: sequence, splits k0 .. k1-1, first line, the sequence's lines from there on,
    its full blocks, blocks a split. A program has one tile, and as many splits as make at most G programs of them all;
    k0 = k1: it has none.
    """
    if BP == 1:
        b = 0
        first = gl.load(ROWS)
        lines = (gl.load(ROWS + 1) - first) * H
        full = gl.load(LENS) // 64
        sbk = gl.load(WIDTHS) // 64
        tiles = (lines + BM - 1) // BM
        splits = (full + sbk - 1) // sbk
        most = gl.maximum(1, G // gl.maximum(1, tiles))
        share = gl.maximum(1, (splits + most - 1) // most)
        chunks = (splits + share - 1) // share
        place = pid
    else:
        GRID: gl.constexpr = gl.BlockedLayout([1, SPLITS // 32], [1, 32], [W, 1], [1, 0])
        ONE: gl.constexpr = gl.BlockedLayout([BP // 32 if BP > 32 else 1], [32], [W], [0])
        lane = gl.arange(0, BP, ONE)
        real = lane < B
        start = gl.load(ROWS + lane, mask=real, other=0)
        count = (gl.load(ROWS + lane + 1, mask=real, other=0) - start) * H
        blocks = gl.load(LENS + lane, mask=real, other=0) // 64
        step = gl.load(WIDTHS + lane, mask=real, other=64) // 64
        rows_of = (count + BM - 1) // BM
        parts = (blocks + step - 1) // step
        TALL: gl.constexpr = gl.SliceLayout(1, GRID)
        trial = gl.arange(1, SPLITS + 1, gl.SliceLayout(0, GRID))
        each = (gl.convert_layout(parts, TALL)[:, None] + trial[None, :] - 1) // trial[None, :]
        programs = gl.sum(each * gl.convert_layout(rows_of, TALL)[:, None], 0)
        share = gl.min(gl.where(programs <= G, trial, SPLITS), 0)
        held = rows_of * ((parts + share - 1) // share)
        through = gl.associative_scan(held, 0, _add)
        b = gl.sum((through <= pid).to(gl.int32), 0)
        place = pid - at(through - held, b, lane)
        first = at(start, b, lane)
        lines = at(count, b, lane)
        full = at(blocks, b, lane)
        sbk = at(step, b, lane)
        tiles = at(rows_of, b, lane)
        splits = at(parts, b, lane)
        chunks = (splits + share - 1) // share
    tile = place // gl.maximum(1, chunks)
    k0 = gl.where((tile < tiles) & (b < B), place % gl.maximum(1, chunks) * share, splits)
    k1 = gl.minimum(splits, k0 + share)
    line0 = first * H + tile * BM
    left = lines - tile * BM
    if BP > 1:
        b, k0, k1, line0, left, full, sbk = uniform(b, k0, k1, line0, left, full, sbk, W)
    return b, k0, k1, line0, left, full, sbk


@gluon.jit
def sequence_of(row, ROWS, B, BP: gl.constexpr, W: gl.constexpr):
    """Rows in use, and the row's sequence."""
    used = gl.load(ROWS + B)
    b = 0
    if BP > 1:
        ONE: gl.constexpr = gl.BlockedLayout([BP // 32 if BP > 32 else 1], [32], [W], [0])
        lane = gl.arange(0, BP, ONE)
        ends = gl.load(ROWS + lane + 1, mask=lane < B, other=2147483647)
        b = gl.minimum(gl.sum((ends <= row).to(gl.int32), 0), B - 1)
        b, _, _, _, _, _, _ = uniform(b, 0, 0, 0, 0, 0, 0, W)
    return used, b
