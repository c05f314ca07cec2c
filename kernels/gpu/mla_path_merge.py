"""Every row's own keys, and the merge of its splits. One program: one row, eight heads, CT columns.

The prefix kernels did the blocks of 64 that lie wholly in the prefix. What is left of the row's path, the prefix's last
keys and the row's ancestors, is gathered here in path order and goes on from the state of the split it falls in: the
same products, in the same groups of 16 keys, with the same block borders as when the row is decoded alone. (The matrix
unit gives the same bits for mma.sync as for wgmma; the tests on the device hold it to that.)
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mma_v2

from kernels.gpu.mla_device import LOG2E, LOWEST, MASKED, by_lane, follow, real_column, row_sum, sequence_of


@gluon.jit
def _ones(x):
    return gl.inline_asm_elementwise("popc.b64 $0, $1;", "=r,l", [x], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _halve(rest, rank, node, half: gl.constexpr):
    """One step in the search of the rank-th bit of `rest` that is set, node bits into the mask."""
    count = _ones(rest & ((1 << half) - 1))
    upper = rank >= count
    return gl.where(upper, rest >> half, rest), gl.where(upper, rank - count, rank), gl.where(upper, node + half, node)


@gluon.jit
def _gather(j0, L, p, bits, pages, CACHE, column, sK, sKe, sV, C: gl.constexpr, P: gl.constexpr, W: gl.constexpr):
    """Asks for the keys at positions j0 .. j0+63 of the path; past p: zeros."""
    KEY: gl.constexpr = gl.BlockedLayout([1], [32], [W], [0])
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32] if C >= 256 else [2, 16], [W, 1], [1, 0])
    SLIM: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8] if P >= 64 else [8, 4], [W, 1], [1, 0])
    CUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [W, 1], [1, 0])
    CT: gl.constexpr = sV.shape[1]
    position = j0 + gl.arange(0, 64, KEY)
    live = position <= p
    # the (position - L)-th of the mask's bits that are set, by halves
    rest = gl.zeros([64], gl.int64, KEY) + bits
    rank = position - L
    node = gl.zeros([64], gl.int32, KEY)
    for level in gl.static_range(6):
        rest, rank, node = _halve(rest, rank, node, 32 >> level)
    slot = gl.where(live, gl.where(position < L, position, L + node), 0)
    page = gl.load(pages + slot // 64, mask=live, other=0)
    where = (page.to(gl.int64) * 64 + slot % 64) * (C + P)
    WIDE1: gl.constexpr = gl.SliceLayout(1, WIDE)
    SLIM1: gl.constexpr = gl.SliceLayout(1, SLIM)
    CUT1: gl.constexpr = gl.SliceLayout(1, CUT)
    c = gl.arange(0, C, gl.SliceLayout(0, WIDE))
    e = gl.arange(0, P, gl.SliceLayout(0, SLIM))
    key = CACHE + gl.convert_layout(where, WIDE1)[:, None] + c[None, :]
    rope = CACHE + gl.convert_layout(where, SLIM1)[:, None] + C + e[None, :]
    async_copy.async_copy_global_to_shared(sKe, rope, gl.convert_layout(live, SLIM1)[:, None])
    async_copy.async_copy_global_to_shared(sK, key, gl.convert_layout(live, WIDE1)[:, None])
    if CT < C:
        v = column + gl.arange(0, CT, gl.SliceLayout(0, CUT))
        value = CACHE + gl.convert_layout(where, CUT1)[:, None] + v[None, :]
        async_copy.async_copy_global_to_shared(sV, value, gl.convert_layout(live, CUT1)[:, None])
    async_copy.commit_group()


@gluon.jit
def _in_order(x, V: gl.constexpr):
    """[columns, heads] in the order in which sums are kept."""
    return gl.convert_layout(gl.permute(by_lane(gl.permute(x, (1, 0))), (1, 0)), V)


@gluon.jit
def _scores(j0, p, sQ, sQe, sK, sKe, C: gl.constexpr, W: gl.constexpr):
    """[64 keys, 8 heads], in the order of the prefix kernels: rotated part, then latents."""
    M: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1], [16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, M, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, M, 2)
    async_copy.wait_group(0)
    gl.thread_barrier()
    s = mma_v2(sKe.load(A), sQe.permute((1, 0)).load(B), gl.zeros([64, 8], gl.float32, M))
    for c in gl.static_range(C // 64):
        s = mma_v2(sK.slice(c * 64, 64, dim=1).load(A), sQ.slice(c * 64, 64, dim=1).permute((1, 0)).load(B), s)
    live = j0 + gl.arange(0, 64, gl.SliceLayout(1, M)) <= p
    return gl.where(live[:, None], s, MASKED)


@gluon.jit(do_not_specialize=["B", "H", "pt_stride"])
def path_merge(
    Q,
    CACHE,
    PAGES,
    LENS,
    ROWS,
    WIDTHS,
    ANCESTORS,
    OUT,
    SUMS,
    SCALARS,
    OPEN,
    OPEN_SUMS,
    B,
    H,
    pt_stride,
    C: gl.constexpr,
    P: gl.constexpr,
    SPLITS: gl.constexpr,
    CT: gl.constexpr,  # 64 or C
    BP: gl.constexpr,
    W: gl.constexpr,  # warps
    AHEAD: gl.constexpr,  # splits whose loads are under way at a time
):
    LATENT: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    ROPE: gl.constexpr = gl.NVMMASharedLayout(2 * P, 16, rank=2)
    M: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1], [16, 8])  # [64 keys or CT columns, 8 heads]
    A: gl.constexpr = gl.DotOperandLayout(0, M, 2)
    X: gl.constexpr = gl.DotOperandLayout(1, M, 2)
    HEAD: gl.constexpr = gl.SliceLayout(0, M)
    # [CT columns, 8 heads], 8 or 16 bytes a lane
    V: gl.constexpr = gl.BlockedLayout([8, 1] if CT > 128 else [4, 1], [16, 2] if CT == 64 else [32, 1], [1, W], [0, 1])
    VHEAD: gl.constexpr = gl.SliceLayout(0, V)
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32] if C >= 256 else [2, 16], [W, 1], [1, 0])
    SLIM: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8] if P >= 64 else [8, 4], [W, 1], [1, 0])
    pid = gl.program_id(0)
    parts = C // CT
    groups = (H + 7) // 8
    column = pid % parts * CT
    head0 = pid // parts % groups * 8
    row = pid // (parts * groups)
    used, b = sequence_of(row, ROWS, B, BP, W)
    vhead = gl.arange(0, 8, VHEAD)
    vcolumn = column + gl.arange(0, CT, gl.SliceLayout(1, V))
    vline = row.to(gl.int64) * H + head0
    target = OUT + vline * C + vhead[None, :] * C + real_column(vcolumn)[:, None]
    real = (head0 + vhead < H)[None, :] & (vcolumn >= 0)[:, None]
    if row < used:
        sQ = gl.allocate_shared_memory(gl.bfloat16, [8, C], LATENT)
        sQe = gl.allocate_shared_memory(gl.bfloat16, [8, P], ROPE)
        sK = gl.allocate_shared_memory(gl.bfloat16, [64, C], LATENT)
        sKe = gl.allocate_shared_memory(gl.bfloat16, [64, P], ROPE)
        sP = gl.allocate_shared_memory(gl.bfloat16, [8, 64], LATENT)
        sV = gl.allocate_shared_memory(gl.bfloat16, [64, CT], LATENT) if CT < C else sK
        L = gl.load(LENS + b)
        sbk = gl.load(WIDTHS + b) // 64
        bits = gl.load(ANCESTORS + row)
        depth = _ones(bits)
        p = L + depth - 1
        full = L // 64
        pages = PAGES + b * pt_stride
        qh = gl.arange(0, 8, gl.SliceLayout(1, WIDE))
        qeh = gl.arange(0, 8, gl.SliceLayout(1, SLIM))
        qrow = Q + vline * (C + P)
        qat = qrow + qh[:, None] * (C + P) + gl.arange(0, C, gl.SliceLayout(0, WIDE))[None, :]
        qeat = qrow + qeh[:, None] * (C + P) + C + gl.arange(0, P, gl.SliceLayout(0, SLIM))[None, :]
        async_copy.async_copy_global_to_shared(sQ, qat, (head0 + qh < H)[:, None])
        async_copy.async_copy_global_to_shared(sQe, qeat, (head0 + qeh < H)[:, None])
        j0 = full * 64
        _gather(j0, L, p, bits, pages, CACHE, column, sK, sKe, sV, C, P, W)
        s = _scores(j0, p, sQ, sQe, sK, sKe, C, W)
        # all of the above reads the step's inputs only: it is done while the prefix kernel still runs
        follow(pid)
        head = gl.arange(0, 8, HEAD)
        key = gl.arange(0, 64, gl.SliceLayout(1, M))
        mcolumn = column + gl.arange(0, CT, gl.SliceLayout(1, M))
        done = full // sbk  # splits complete in memory
        goes_on = (full % sbk != 0) & (head0 + head < H) & (done < SPLITS)
        at = vline * SPLITS + done
        m = gl.load(SCALARS + at * 2 + head * (2 * SPLITS), mask=goes_on, other=LOWEST, cache_modifier=".cg")
        lc = gl.load(
            OPEN + vline * 64 + head[None, :] * 64 + key[:, None],
            mask=goes_on[None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        acc = gl.load(
            OPEN_SUMS + vline * C + head[None, :] * C + mcolumn[:, None],
            mask=goes_on[None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        m0 = gl.full([8], LOWEST, gl.float32, HEAD)  # of the split that the path leaves, if it leaves one
        sum0 = gl.zeros([8], gl.float32, HEAD)
        acc0 = gl.zeros([CT, 8], gl.float32, M)
        for i in range((p - j0) // 64 + 1):
            if i > 0:
                if (full + i) % sbk == 0:
                    m0 = m
                    sum0 = row_sum(lc, 0)
                    acc0 = acc.to(gl.bfloat16).to(gl.float32)  # as every split is kept but a row's last
                    m = gl.full([8], LOWEST, gl.float32, HEAD)
                    lc = gl.zeros([64, 8], gl.float32, M)
                    acc = gl.zeros([CT, 8], gl.float32, M)
                gl.thread_barrier()
                _gather(j0 + i * 64, L, p, bits, pages, CACHE, column, sK, sKe, sV, C, P, W)
                s = _scores(j0 + i * 64, p, sQ, sQe, sK, sKe, C, W)
            mn = gl.maximum(m, gl.max(s, 0) * LOG2E)
            a = gl.exp2(m - mn)
            pr = gl.exp2(gl.fma(s, LOG2E, -mn[None, :]))
            lc = gl.fma(lc, a[None, :], pr)
            m = mn
            sP.permute((1, 0)).store(pr.to(gl.bfloat16))
            acc = acc * a[None, :]
            gl.thread_barrier()
            for g in gl.static_range(4):  # sixteen keys at a time, or their values fill the registers
                values = sV.slice(g * 16, 16, dim=0).permute((1, 0)).load(A)
                acc = mma_v2(values, sP.slice(g * 16, 16, dim=1).permute((1, 0)).load(X), acc)
        sum1 = row_sum(lc, 0)
        # merge: the maximum first, then left to right
        mv = gl.convert_layout(m, VHEAD)
        mv0 = gl.convert_layout(m0, VHEAD)
        LIST: gl.constexpr = gl.BlockedLayout([1, SPLITS // 32], [1, 32], [W, 1], [1, 0])
        lh = gl.arange(0, 8, gl.SliceLayout(1, LIST))
        lk = gl.arange(0, SPLITS, gl.SliceLayout(0, LIST))
        listed = (head0 + lh < H)[:, None] & (lk < done)[None, :]
        stats = SCALARS + vline * (2 * SPLITS)
        tops = gl.load(
            stats + lh[:, None] * (2 * SPLITS) + lk[None, :] * 2, mask=listed, other=LOWEST, cache_modifier=".cg"
        )
        top = gl.maximum(gl.maximum(mv, mv0), gl.convert_layout(gl.max(tops, 1), VHEAD))
        o = gl.zeros([CT, 8], gl.float32, V)
        total = gl.zeros([8], gl.float32, VHEAD)
        split = SUMS + vline * (SPLITS * C) + vhead[None, :] * (SPLITS * C) + vcolumn[:, None]
        stat = stats + vhead * (2 * SPLITS)
        for k in range(0, gl.minimum(done, SPLITS), AHEAD):
            for g in gl.static_range(AHEAD):
                ok = (head0 + vhead < H) & (k + g < done)
                mk = gl.load(stat + (k + g) * 2, mask=ok, other=LOWEST, cache_modifier=".cg")
                lk1 = gl.load(stat + (k + g) * 2 + 1, mask=ok, other=0.0, cache_modifier=".cg")
                ak = gl.load(split + (k + g) * C, mask=ok[None, :], other=0.0, cache_modifier=".cg")
                w = gl.exp2(mk - top)
                o = gl.fma(ak.to(gl.float32), w[None, :], o)
                total = gl.fma(lk1, w, total)
        w = gl.exp2(mv0 - top)
        o = gl.fma(_in_order(acc0, V), w[None, :], o)
        total = gl.fma(gl.convert_layout(sum0, VHEAD), w, total)
        w = gl.exp2(mv - top)
        o = gl.fma(_in_order(acc, V), w[None, :], o)
        total = gl.fma(gl.convert_layout(sum1, VHEAD), w, total)
        scale = gl.where(total > 0.0, 1.0 / gl.where(total > 0.0, total, 1.0), 0.0)
        scale = gl.where(gl.maximum(p, 0) // (sbk * 64) < SPLITS, scale, float("nan"))
        gl.store(target, (o * scale[None, :]).to(gl.bfloat16), mask=real)
    else:
        follow(pid)
        gl.store(target, gl.zeros([CT, 8], gl.bfloat16, V), mask=real)
