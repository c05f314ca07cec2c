"""The prefix of few lines: tiles of 16 lines, keys on the M side of the products (S^T = K Q^T, O^T += V^T P^T).

Only blocks of 64 keys that lie wholly in the prefix are done here, so there is no mask. A page is one copy of 64 rows;
with one stage two programs share an SM, with two the next page comes while this one is computed.
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

from kernels.gpu.mla_device import LOG2E, LOWEST, by_lane, fill, follow, portion, row_sum


@gluon.jit(do_not_specialize=["B", "G", "H", "pt_stride"])
def prefix_narrow(
    q_latents,  # descriptors of q and cache as [lines, C+P] and [slots, C+P], boxes of C and of P columns
    q_ropes,
    latents,
    ropes,
    PAGES,
    LENS,
    ROWS,
    WIDTHS,
    SUMS,  # [lines, SPLITS, C] bf16: acc of a split that is complete, columns in the order of `by_lane`
    SCALARS,  # [lines, SPLITS, 2] fp32: its maximum and row sum
    OPEN,  # [lines, 64] fp32: of the split that the prefix leaves unfinished, the row sum's 64 terms,
    OPEN_SUMS,  # [lines, C] fp32: and acc
    B,
    G,
    H,
    pt_stride,
    C: gl.constexpr,
    P: gl.constexpr,
    SPLITS: gl.constexpr,
    BM: gl.constexpr,
    STAGES: gl.constexpr,
    EARLY: gl.constexpr,  # all but the queries is older than the kernel before this one
    BP: gl.constexpr,
):
    WIDE: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    ROPE: gl.constexpr = gl.NVMMASharedLayout(2 * P, 16, rank=2)
    PROB: gl.constexpr = gl.NVMMASharedLayout(2 * BM, 16, rank=2)
    M: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])  # [64 keys or C columns, BM lines]
    LINE: gl.constexpr = gl.SliceLayout(0, M)
    SUM: gl.constexpr = gl.BlockedLayout([8, 1], [32, 1] if C >= 256 else [16, 2], [2, 2], [0, 1])
    pid = gl.program_id(0)
    if not EARLY:
        follow(pid)
    b, k0, k1, line0, lines, full, sbk = portion(pid, G, ROWS, LENS, WIDTHS, B, H, BM, BP, SPLITS, 4)
    n = gl.minimum(k1 * sbk, full) - k0 * sbk
    q = gl.allocate_shared_memory(gl.bfloat16, [BM, C], WIDE)
    qe = gl.allocate_shared_memory(gl.bfloat16, [BM, P], ROPE)
    kb = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, C], WIDE)
    keb = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, P], ROPE)
    pbuf = gl.allocate_shared_memory(gl.bfloat16, [64, BM], PROB)
    bar = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for ib in gl.static_range(STAGES):
        mbarrier.init(bar.index(ib), count=1)
    fence_async_shared()
    gl.thread_barrier()

    column = gl.arange(0, C, gl.SliceLayout(1, M))
    key = gl.arange(0, 64, gl.SliceLayout(1, M))
    zs = gl.zeros([64, BM], gl.float32, M)
    acc = gl.zeros([C, BM], gl.float32, M)
    m = gl.full([BM], LOWEST, gl.float32, LINE)
    lc = gl.zeros([64, BM], gl.float32, M)
    page = PAGES + b * pt_stride + k0 * sbk
    if n > 0:
        row0 = gl.load(page) * 64
        mbarrier.expect(bar.index(0), (64 + BM) * (C + P) * 2)
        tma.async_copy_global_to_shared(ropes, [row0, C], bar.index(0), keb.index(0))
        tma.async_copy_global_to_shared(latents, [row0, 0], bar.index(0), kb.index(0))
        if STAGES == 2:
            row1 = gl.load(page + 1, mask=n > 1, other=0) * 64
            fill(latents, ropes, row1, bar.index(1), kb.index(1), keb.index(1), C, P, n > 1)
    if EARLY:
        follow(pid)
    if n > 0:
        tma.async_copy_global_to_shared(q_ropes, [line0, C], bar.index(0), qe)
        tma.async_copy_global_to_shared(q_latents, [line0, 0], bar.index(0), q)
    line = gl.arange(0, BM, LINE)
    sline = gl.arange(0, BM, gl.SliceLayout(0, SUM))
    scolumn = gl.arange(0, C, gl.SliceLayout(1, SUM))
    for i in range(n):
        cur = i % STAGES
        row2 = gl.load(page + i + STAGES, mask=i + STAGES < n, other=0) * 64
        m = gl.where(i % sbk == 0, LOWEST, m)  # a new split: a is 0 and clears lc and acc
        mbarrier.wait(bar.index(cur), (i // STAGES) & 1)
        st = warpgroup_mma(keb.index(cur), qe.permute((1, 0)), zs, use_acc=False, is_async=True)
        st = warpgroup_mma(kb.index(cur), q.permute((1, 0)), st, is_async=True)
        s = warpgroup_mma_wait(0, deps=[st])
        mn = gl.maximum(m, gl.max(s, 0) * LOG2E)
        a = gl.exp2(m - mn)
        p = gl.exp2(gl.fma(s, LOG2E, -mn[None, :]))
        lc = gl.fma(lc, a[None, :], p)
        m = mn
        pbuf.store(p.to(gl.bfloat16))
        fence_async_shared()
        acc = acc * a[None, :]
        gl.thread_barrier()
        pv = warpgroup_mma(kb.index(cur).permute((1, 0)), pbuf, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[pv])
        gl.thread_barrier()
        fill(latents, ropes, row2, bar.index(cur), kb.index(cur), keb.index(cur), C, P, i + STAGES < n)
        if ((i + 1) % sbk == 0) | (i == n - 1):
            k = k0 + i // sbk
            keep = (line < lines) & (k < SPLITS)
            place = line0.to(gl.int64) * SPLITS + k
            sums = gl.convert_layout(gl.permute(by_lane(gl.permute(acc.to(gl.bfloat16), (1, 0))), (1, 0)), SUM)
            kept = (sline < lines) & (k < SPLITS)
            gl.store(SUMS + place * C + sline[None, :] * (SPLITS * C) + scolumn[:, None], sums, mask=kept[None, :])
            gl.store(SCALARS + place * 2 + line * (2 * SPLITS), m, mask=keep)
            gl.store(SCALARS + place * 2 + line * (2 * SPLITS) + 1, row_sum(lc, 0), mask=keep)
    # what the rows' own keys go on from; only the sequence's last program can end inside a split
    unfinished = (line < lines) & (n % sbk != 0)
    gl.store(OPEN + line0 * 64 + line[None, :] * 64 + key[:, None], lc, mask=unfinished[None, :])
    gl.store(OPEN_SUMS + line0 * C + line[None, :] * C + column[:, None], acc, mask=unfinished[None, :])
