"""The loop of the wide attention kernels: 64 lines, eight warps, a block of 64 keys a turn.

Each warpgroup has half of a block's keys and of the output. While one block's P V is under way the next block's Q K^T
is queued behind it; pages come two ahead. mla_prefix_wide.py and mla_prefill_attention.py differ in what they mask,
where they begin and what they keep.
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

from kernels.gpu.mla_device import LOG2E, fill


@gluon.jit
def rooms(C: gl.constexpr, P: gl.constexpr):
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
def begin(page, n, line0, q_latents, q_ropes, latents, ropes, q, qe, kb, keb, bar, C: gl.constexpr, P: gl.constexpr):
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
def queue(at, phase, q, qe, kb, keb, bar, zs):
    """Scores of the block in place `at`, when its page is there: rotated part, then latents."""
    mbarrier.wait(bar.index(at), phase)
    st = warpgroup_mma(qe, keb.index(at).permute((1, 0)), zs, use_acc=False, is_async=True)
    return warpgroup_mma(q, kb.index(at).permute((1, 0)), st, is_async=True)


@gluon.jit
def weigh(s, m, lc, acc, pbuf, OLINE: gl.constexpr):
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
def turn(
    it, n, row2, s, m, lc, acc, latents, ropes, q, qe, kb, keb, pbuf, bar, zs,
    OLINE: gl.constexpr, C: gl.constexpr, P: gl.constexpr,
):  # fmt: skip
    """Block `it`, with the next one's scores; then its page is free for that of block it + 2, rows from `row2` on."""
    cur = it & 1
    m, lc, acc = weigh(s, m, lc, acc, pbuf, OLINE)
    pv = warpgroup_mma(pbuf, kb.index(cur), acc, is_async=True)
    st = queue(1 - cur, ((it + 1) >> 1) & 1, q, qe, kb, keb, bar, zs)
    acc = warpgroup_mma_wait(2, deps=[pv])
    gl.thread_barrier()
    fill(latents, ropes, row2, bar.index(cur), kb.index(cur), keb.index(cur), C, P, it + 2 < n)
    return warpgroup_mma_wait(0, deps=[st]), m, lc, acc
