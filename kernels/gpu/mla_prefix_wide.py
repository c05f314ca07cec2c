"""The prefix of many lines: tiles of 64, eight warps, a block of 64 keys a turn.

Each warpgroup has half of a block's keys and of the output. While one block's P V is under way the next block's Q K^T
is queued behind it; pages come two ahead. Only blocks of 64 keys that lie wholly in the prefix are done here, so there
is no mask.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.gpu.mla_device import LOG2E, LOWEST, by_lane, fill, follow, lane_layout, portion, row_sum


@gluon.jit
def _rooms(C: gl.constexpr, P: gl.constexpr):
    """Shared memory: queries, two pages of keys, a block's weights, a barrier a page."""
    WIDE: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    ROPE: gl.constexpr = gl.NVMMASharedLayout(2 * P, 16, rank=2)
    q = gl.allocate_shared_memory(gl.bfloat16, [64, C], WIDE)
    qe = gl.allocate_shared_memory(gl.bfloat16, [64, P], ROPE)
    kb = gl.allocate_shared_memory(gl.bfloat16, [2, 64, C], WIDE)
    keb = gl.allocate_shared_memory(gl.bfloat16, [2, 64, P], ROPE)
    pbuf = gl.allocate_shared_memory(gl.bfloat16, [64, 64], WIDE)
    bar = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for ib in gl.static_range(2):
        mbarrier.init(bar.index(ib), count=1)
    fence_async_shared()
    gl.thread_barrier()
    return q, qe, kb, keb, pbuf, bar


@gluon.jit
def _begin(page, n, line0, q_latents, q_ropes, latents, ropes, q, qe, kb, keb, bar, C: gl.constexpr, P: gl.constexpr):
    """Asks for the queries and the first two pages of n >= 1."""
    row0 = gl.load(page) * 64
    row1 = gl.load(page + 1, mask=n > 1, other=0) * 64
    mbarrier.expect(bar.index(0), 2 * 64 * (C + P) * 2)
    tma.async_copy_global_to_shared(q_ropes, [line0, C], bar.index(0), qe)
    tma.async_copy_global_to_shared(ropes, [row0, C], bar.index(0), keb.index(0))
    tma.async_copy_global_to_shared(latents, [row0, 0], bar.index(0), kb.index(0))
    tma.async_copy_global_to_shared(q_latents, [line0, 0], bar.index(0), q)
    fill(latents, ropes, row1, bar.index(1), kb.index(1), keb.index(1), C, P, n > 1)


@gluon.jit
def _queue(at, phase, q, qe, kb, keb, bar, zs):
    """Scores of the block in place `at`, when its page is there: rotated part, then latents."""
    mbarrier.wait(bar.index(at), phase)
    st = warpgroup_mma(qe, keb.index(at).permute((1, 0)), zs, use_acc=False, is_async=True)
    return warpgroup_mma(q, kb.index(at).permute((1, 0)), st, is_async=True)


@gluon.jit
def _weigh(s, m, lc, acc, pbuf, OLINE: gl.constexpr):
    """A block's scores into the running maximum, the row sum's 64 terms, and weights in shared memory."""
    mn = gl.maximum(m, gl.max(s, 1) * LOG2E)
    a = gl.exp2(m - mn)
    p = gl.exp2(gl.fma(s, LOG2E, -mn[:, None]))
    lc = gl.fma(lc, a[:, None], p)
    pbuf.store(p.to(gl.bfloat16))
    acc = acc * gl.convert_layout(a, OLINE)[:, None]
    fence_async_shared()
    gl.thread_barrier()
    return mn, lc, acc


@gluon.jit
def _turn(
    it, n, row2, s, m, lc, acc, latents, ropes, q, qe, kb, keb, pbuf, bar, zs,
    OLINE: gl.constexpr, C: gl.constexpr, P: gl.constexpr,
):  # fmt: skip
    """Block `it`, with the next one's scores; then its page is free for that of block it + 2, rows from `row2` on."""
    cur = it & 1
    m, lc, acc = _weigh(s, m, lc, acc, pbuf, OLINE)
    pv = warpgroup_mma(pbuf, kb.index(cur), acc, is_async=True)
    st = _queue(1 - cur, ((it + 1) >> 1) & 1, q, qe, kb, keb, bar, zs)
    acc = warpgroup_mma_wait(2, deps=[pv])
    gl.thread_barrier()
    fill(latents, ropes, row2, bar.index(cur), kb.index(cur), keb.index(cur), C, P, it + 2 < n)
    return warpgroup_mma_wait(0, deps=[st]), m, lc, acc


@gluon.jit(do_not_specialize=["B", "G", "H", "pt_stride"])
def prefix_wide(
    q_latents,  # as prefix_narrow
    q_ropes,
    latents,
    ropes,
    PAGES,
    LENS,
    ROWS,
    WIDTHS,
    SUMS,
    SCALARS,
    OPEN,
    OPEN_SUMS,
    B,
    G,
    H,
    pt_stride,
    C: gl.constexpr,
    P: gl.constexpr,
    SPLITS: gl.constexpr,
    BP: gl.constexpr,
):
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16])  # [64 lines, 64 keys]
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, C // 2, 16])  # [64 lines, C columns]
    LINE: gl.constexpr = gl.SliceLayout(1, S)
    OLINE: gl.constexpr = gl.SliceLayout(1, ACC)
    pid = gl.program_id(0)
    follow(pid)
    b, k0, k1, line0, lines, full, sbk = portion(pid, G, ROWS, LENS, WIDTHS, B, H, 64, BP, SPLITS, 8)
    n = gl.minimum(k1 * sbk, full) - k0 * sbk

    q, qe, kb, keb, pbuf, bar = _rooms(C, P)
    zs = gl.zeros([64, 64], gl.float32, S)
    page = PAGES + b * pt_stride + k0 * sbk
    if n > 0:
        _begin(page, n, line0, q_latents, q_ropes, latents, ropes, q, qe, kb, keb, bar, C, P)
    it = 0  # blocks done
    lc = zs
    acc = gl.zeros([64, C], gl.float32, ACC)
    for k in range(k0, k1):
        acc = gl.zeros([64, C], gl.float32, ACC)
        m = gl.full([64], LOWEST, gl.float32, LINE)
        lc = gl.zeros([64, 64], gl.float32, S)
        s = warpgroup_mma_wait(0, deps=[_queue(it & 1, (it >> 1) & 1, q, qe, kb, keb, bar, zs)])
        for _ in range(gl.minimum(sbk, full - k * sbk) - 1):
            row2 = gl.load(page + it + 2, mask=it + 2 < n, other=0) * 64
            s, m, lc, acc = _turn(
                it, n, row2, s, m, lc, acc, latents, ropes, q, qe, kb, keb, pbuf, bar, zs, OLINE, C, P
            )
            it += 1
        last = it & 1
        row2 = gl.load(page + it + 2, mask=it + 2 < n, other=0) * 64
        m, lc, acc = _weigh(s, m, lc, acc, pbuf, OLINE)
        pv = warpgroup_mma(pbuf, kb.index(last), acc, is_async=True)
        total = row_sum(lc, 1)
        acc = warpgroup_mma_wait(0, deps=[pv])
        gl.thread_barrier()
        fill(latents, ropes, row2, bar.index(last), kb.index(last), keb.index(last), C, P, it + 2 < n)
        it += 1
        line = gl.arange(0, 64, LINE)
        place = line0.to(gl.int64) * SPLITS + k
        SUM: gl.constexpr = lane_layout(C)
        sums = gl.convert_layout(by_lane(acc.to(gl.bfloat16)), SUM, assert_trivial=True)
        oline = gl.arange(0, 64, gl.SliceLayout(1, SUM))
        column = gl.arange(0, C, gl.SliceLayout(0, SUM))
        keep = (oline < lines) & (k < SPLITS)
        gl.store(SUMS + place * C + oline[:, None] * (SPLITS * C) + column[None, :], sums, mask=keep[:, None])
        keep = (line < lines) & (k < SPLITS)
        gl.store(SCALARS + place * 2 + line * (2 * SPLITS), m, mask=keep)
        gl.store(SCALARS + place * 2 + line * (2 * SPLITS) + 1, total, mask=keep)
    # what the rows' own keys go on from; only the sequence's last program can end inside a split
    line = gl.arange(0, 64, LINE)
    key = gl.arange(0, 64, gl.SliceLayout(0, S))
    unfinished = (line < lines) & (n % sbk != 0)
    gl.store(OPEN + line0 * 64 + line[:, None] * 64 + key[None, :], lc, mask=unfinished[:, None])
    oline = gl.arange(0, 64, OLINE)
    column = gl.arange(0, C, gl.SliceLayout(0, ACC))
    unfinished = (oline < lines) & (n % sbk != 0)
    gl.store(OPEN_SUMS + line0 * C + oline[:, None] * C + column[None, :], acc, mask=unfinished[:, None])
