"""Tree attention without the law of exact mode, for comparison: what equal bits cost.

The same loops as kernels/gpu's, with what exactness forbids: a tree's keys under a bitmask where they lie, splits as
even as the number of programs makes them (other bits in another batch, or at another length), row sums in any order,
float32 states of every split. Eight heads, latent 512, rope 64; each sequence has as many rows.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.gpu.follow import follow as follow_in_triton
from kernels.gpu.follow import followed
from kernels.gpu.mla_device import LOG2E, LOWEST, MASKED, fill, follow
from kernels.gpu.mla_launch import descriptors

HEADS, C = 8, 512


class Cut(NamedTuple):
    """How a launch is cut: lines a tile (16 narrow, 64 wide), pages under way, splits of a sequence."""

    lines: int
    stages: int
    splits: int


def cut_of(batch: int, rows: int, length: int) -> Cut:
    """The best that was found, by sizes that the host knows."""
    blocks, lines = -(-(length + rows) // 64), HEADS * rows
    if batch * rows <= 8 or (batch * rows <= 16 and blocks <= 32):
        tiles = batch * -(-lines // 16)
        splits = max(1, min(blocks, 264 // tiles))
        return Cut(16, 1, splits) if 2 * splits >= blocks else Cut(16, 2, max(1, 132 // tiles))
    return Cut(64, 2, max(1, min(blocks, 128 // (batch * -(-lines // 64)))))


@gluon.jit
def _share(LENS, T, NS, MT):
    """tile, split, sequence, its prefix, its keys, the first block of this program and how many."""
    pid = gl.program_id(0)
    follow(pid)
    tile = pid % MT
    split = (pid // MT) % NS
    b = pid // (MT * NS)
    length = gl.load(LENS + b)
    keys = length + T
    blocks = (keys + 63) // 64
    first = split * blocks // NS
    return tile, split, b, length, keys, first, (split + 1) * blocks // NS - first


@gluon.jit
def _unseen(scores, bits, pos0, length, T, KEYS: gl.constexpr, ACROSS: gl.constexpr):
    """Masks a block in which a tree's own rows lie; keys along axis ACROSS."""
    j = gl.expand_dims(pos0 - length + gl.arange(0, 64, KEYS), 1 - ACROSS)
    tree = ((gl.expand_dims(bits, ACROSS) >> gl.minimum(gl.maximum(j, 0), 63).to(gl.int64)) & 1) != 0
    return gl.where((j < 0) | (tree & (j < T)), scores, MASKED)


@gluon.jit
def _clear(kb, live, WARPS: gl.constexpr):
    """Zeros rows from `live` on: they may hold anything."""
    Z: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    keep = gl.arange(0, 64, gl.SliceLayout(1, Z)) < live
    for c in gl.static_range(8):
        part = kb.slice(c * 64, 64, dim=1)
        part.store(gl.where(keep[:, None], part.load(Z), 0.0))


@gluon.jit(do_not_specialize=["T", "NS", "MT", "stride"])
def _wide(qd, qed, kd, ked, PAGES, LENS, MASKS, SUMS, STATS, stride, T, NS, MT):
    QS: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16])  # noqa: E741
    tile, split, b, length, keys, first, n = _share(LENS, T, NS, MT)
    R = 8 * T
    q = gl.allocate_shared_memory(gl.bfloat16, [64, 512], QS)
    qe = gl.allocate_shared_memory(gl.bfloat16, [64, 64], QS)
    kb = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 512], QS)
    keb = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], QS)
    pbuf = gl.allocate_shared_memory(gl.bfloat16, [64, 64], QS)
    bar = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for ib in gl.static_range(2):
        mbarrier.init(bar.index(ib), count=1)
    fence_async_shared()
    gl.thread_barrier()
    page = PAGES + b * stride + first
    line = tile * 64 + gl.arange(0, 64, gl.SliceLayout(1, S))
    m = gl.full([64], LOWEST, gl.float32, gl.SliceLayout(1, S))
    lc = gl.zeros([64, 64], gl.float32, S)
    at_stats = STATS + (b * NS + split) * 2 * R + line
    if n > 0:
        row0 = gl.load(page) * 64
        row1 = gl.load(page + 1, mask=n > 1, other=0) * 64
        mbarrier.expect(bar.index(0), 2 * 64 * 576 * 2)
        tma.async_copy_global_to_shared(qed, [b * R + tile * 64, 512], bar.index(0), qe)
        tma.async_copy_global_to_shared(ked, [row0, 512], bar.index(0), keb.index(0))
        tma.async_copy_global_to_shared(kd, [row0, 0], bar.index(0), kb.index(0))
        tma.async_copy_global_to_shared(qd, [b * R + tile * 64, 0], bar.index(0), q)
        fill(kd, ked, row1, bar.index(1), kb.index(1), keb.index(1), 512, 64, n > 1)
        bits = gl.load(MASKS + b * T + line // 8, mask=line < R, other=0)
        acc = gl.zeros([64, 512], gl.float32, O)
        zs = gl.zeros([64, 64], gl.float32, S)
        mbarrier.wait(bar.index(0), 0)
        s0 = warpgroup_mma(qe, keb.index(0).permute((1, 0)), zs, use_acc=False, is_async=True)
        s0 = warpgroup_mma(q, kb.index(0).permute((1, 0)), s0, is_async=True)
        sc = warpgroup_mma_wait(0, deps=[s0])
        for i in range(n):
            cur = i & 1
            row2 = gl.load(page + i + 2, mask=i + 2 < n, other=0) * 64
            pos0 = (first + i) * 64
            if pos0 + 64 > length:
                sc = _unseen(sc, bits, pos0, length, T, gl.SliceLayout(0, S), 1)
                if pos0 + 64 > keys:
                    _clear(kb.index(cur), keys - pos0, 8)
            mn = gl.maximum(m, gl.max(sc, 1) * LOG2E)
            a = gl.exp2(m - mn)
            p = gl.exp2(sc * LOG2E - mn[:, None])
            lc = lc * a[:, None] + p
            m = mn
            pbuf.store(p.to(gl.bfloat16))
            acc = acc * gl.convert_layout(a, gl.SliceLayout(1, O))[:, None]
            fence_async_shared()
            gl.thread_barrier()
            at = warpgroup_mma(pbuf, kb.index(cur), acc, is_async=True)
            if i + 1 < n:  # the next scores are queued behind this product
                nxt = 1 - cur
                mbarrier.wait(bar.index(nxt), ((i + 1) >> 1) & 1)
                st = warpgroup_mma(qe, keb.index(nxt).permute((1, 0)), zs, use_acc=False, is_async=True)
                st = warpgroup_mma(q, kb.index(nxt).permute((1, 0)), st, is_async=True)
                acc = warpgroup_mma_wait(2, deps=[at])
                gl.thread_barrier()
                fill(kd, ked, row2, bar.index(cur), kb.index(cur), keb.index(cur), 512, 64, i + 2 < n)
                sc = warpgroup_mma_wait(0, deps=[st])
            else:
                acc = warpgroup_mma_wait(0, deps=[at])
        oline = tile * 64 + gl.arange(0, 64, gl.SliceLayout(1, O))
        column = gl.arange(0, 512, gl.SliceLayout(0, O))
        to = SUMS + ((b * NS + split) * R + oline)[:, None] * 512 + column[None, :]
        gl.store(to, acc, mask=(oline < R)[:, None])
    gl.store(at_stats, m, mask=line < R)
    gl.store(at_stats + R, gl.sum(lc, 1), mask=line < R)


@gluon.jit(do_not_specialize=["T", "NS", "MT", "stride"])
def _narrow(qd, qed, kd, ked, PAGES, LENS, MASKS, SUMS, STATS, stride, T, NS, MT, ST: gl.constexpr):
    QS: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    PS: gl.constexpr = gl.NVMMASharedLayout(32, 16, rank=2)
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16])
    LINE: gl.constexpr = gl.SliceLayout(0, S)
    tile, split, b, length, keys, first, n = _share(LENS, T, NS, MT)
    R = 8 * T
    q = gl.allocate_shared_memory(gl.bfloat16, [16, 512], QS)
    qe = gl.allocate_shared_memory(gl.bfloat16, [16, 64], QS)
    kb = gl.allocate_shared_memory(gl.bfloat16, [ST, 64, 512], QS)
    keb = gl.allocate_shared_memory(gl.bfloat16, [ST, 64, 64], QS)
    pbuf = gl.allocate_shared_memory(gl.bfloat16, [64, 16], PS)
    bar = gl.allocate_shared_memory(gl.int64, [ST, 1], mbarrier.MBarrierLayout())
    for ib in gl.static_range(ST):
        mbarrier.init(bar.index(ib), count=1)
    fence_async_shared()
    gl.thread_barrier()
    page = PAGES + b * stride + first
    line = tile * 16 + gl.arange(0, 16, LINE)
    acc = gl.zeros([512, 16], gl.float32, S)
    m = gl.full([16], LOWEST, gl.float32, LINE)
    lc = gl.zeros([64, 16], gl.float32, S)
    zs = gl.zeros([64, 16], gl.float32, S)
    if n > 0:
        row0 = gl.load(page) * 64
        mbarrier.expect(bar.index(0), (64 + 16) * 576 * 2)
        tma.async_copy_global_to_shared(qed, [b * R + tile * 16, 512], bar.index(0), qe)
        tma.async_copy_global_to_shared(ked, [row0, 512], bar.index(0), keb.index(0))
        tma.async_copy_global_to_shared(qd, [b * R + tile * 16, 0], bar.index(0), q)
        tma.async_copy_global_to_shared(kd, [row0, 0], bar.index(0), kb.index(0))
        if ST == 2:
            row1 = gl.load(page + 1, mask=n > 1, other=0) * 64
            fill(kd, ked, row1, bar.index(1), kb.index(1), keb.index(1), 512, 64, n > 1)
    bits = gl.load(MASKS + b * T + line // 8, mask=line < R, other=0)
    for i in range(n):
        cur = i % ST
        row2 = gl.load(page + i + ST, mask=i + ST < n, other=0) * 64
        mbarrier.wait(bar.index(cur), (i // ST) & 1)
        st = warpgroup_mma(keb.index(cur), qe.permute((1, 0)), zs, use_acc=False, is_async=True)
        st = warpgroup_mma(kb.index(cur), q.permute((1, 0)), st, is_async=True)
        sc = warpgroup_mma_wait(0, deps=[st])
        pos0 = (first + i) * 64
        if pos0 + 64 > length:
            sc = _unseen(sc, bits, pos0, length, T, gl.SliceLayout(1, S), 0)
            if pos0 + 64 > keys:
                _clear(kb.index(cur), keys - pos0, 4)
        mn = gl.maximum(m, gl.max(sc, 0) * LOG2E)
        a = gl.exp2(m - mn)
        p = gl.exp2(sc * LOG2E - mn[None, :])
        lc = lc * a[None, :] + p
        m = mn
        pbuf.store(p.to(gl.bfloat16))
        fence_async_shared()
        acc = acc * a[None, :]
        gl.thread_barrier()
        at = warpgroup_mma(kb.index(cur).permute((1, 0)), pbuf, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[at])
        gl.thread_barrier()
        fill(kd, ked, row2, bar.index(cur), kb.index(cur), keb.index(cur), 512, 64, i + ST < n)
    column = gl.arange(0, 512, gl.SliceLayout(1, S))
    to = SUMS + ((b * NS + split) * R + line)[None, :] * 512 + column[:, None]
    gl.store(to, acc, mask=(line < R)[None, :])
    at_stats = STATS + (b * NS + split) * 2 * R + line
    gl.store(at_stats, m, mask=line < R)
    gl.store(at_stats + R, gl.sum(lc, 0), mask=line < R)


@triton.jit(do_not_specialize=["R", "NS"])
def _merge(SUMS, STATS, OUT, R, NS, MOST: tl.constexpr, AHEAD: tl.constexpr, CW: tl.constexpr, PDL: tl.constexpr):
    follow_in_triton(PDL)
    row, b = tl.program_id(0) // (512 // CW), tl.program_id(1)
    c = (tl.program_id(0) % (512 // CW)) * CW + tl.arange(0, CW)
    few, every = tl.arange(0, AHEAD), tl.arange(0, MOST)
    sums, stats = SUMS + (b * NS * R + row) * 512, STATS + b * NS * 2 * R + row
    top = tl.max(tl.load(stats + every * 2 * R, mask=every < NS, other=-1e20), 0)
    total, out = tl.zeros([AHEAD], tl.float32), tl.zeros([AHEAD, CW], tl.float32)
    for g in tl.static_range(0, MOST, AHEAD):
        there = g + few < NS
        peak = tl.load(stats + (g + few) * 2 * R, mask=there, other=-1e20)
        weight = tl.exp2(peak - top)
        total += tl.load(stats + (g + few) * 2 * R + R, mask=there, other=0.0) * weight
        wrote = (there & (peak > -1e19))[:, None]  # a split without a block left its sums alone
        out += tl.load(sums + ((g + few) * R * 512)[:, None] + c[None, :], mask=wrote, other=0.0) * weight[:, None]
    tl.store(OUT + (b * R + row) * 512 + c, (tl.sum(out, 0) / tl.sum(total, 0)).to(tl.bfloat16))


def fast_tree(
    q: torch.Tensor,
    cache: torch.Tensor,
    table: torch.Tensor,
    lens: torch.Tensor,
    masks: torch.Tensor,
    out: torch.Tensor,
    space: torch.Tensor,
    cut: Cut,
) -> None:
    """q [B * T, 8, 576], cache [pages, 64, 576], table [B, n], lens [B], masks [B * T], out [B * T, 8, 512]; the scale
    is in q. space: float32, splits * B * T * 8 * 514 of them at least."""
    batch, rows = len(lens), len(q) // len(lens)
    lines, needed = HEADS * rows, batch * HEADS * rows * cut.splits
    assert len(space) >= needed * (C + 2), (len(space), needed)
    sums, stats = space[: needed * C], space[needed * C :]
    tiles = -(-lines // cut.lines)
    given = (table, lens, masks, sums, stats, table.stride(0), rows, cut.splits, tiles)
    grid = (batch * tiles * cut.splits,)
    boxes = descriptors(q, cache, C, cut.lines)
    if cut.lines == 64:
        _wide[grid](*boxes, *given, num_warps=8, launch_pdl=True)
    else:
        _narrow[grid](*boxes, *given, ST=cut.stages, num_warps=4, launch_pdl=True)
    columns = C
    while columns > 32 and lines * batch * (C // columns) < 185:
        columns //= 2
    most = triton.next_power_of_2(cut.splits)
    ahead = max(1, min(most, 16384 // columns))
    _merge[(lines * C // columns, batch)](
        sums, stats, out, lines, cut.splits, MOST=most, AHEAD=ahead, CW=columns,
        num_warps=8 if ahead * columns > 8192 else 4, **followed(),
    )  # fmt: skip
