"""The prefix for cards without Hopper's matrix unit: mma.sync and cp.async, under 99 KB of shared memory.

Tiles of 16 lines, keys on the M side as in mla_prefix_narrow.py (S^T = K Q^T, O^T += V^T P^T), one page in shared
memory at a time. It is made to have the bits of prefix_narrow and prefix_wide: products agree between matrix units, a
maximum has no order, row sums are in fixed point.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from kernels.gpu.mla_device import LOG2E, LOWEST, follow, portion, real_column, row_sum

LINES = 16  # a tile
WARPS = 4


@gluon.jit
def _ask(CACHE, first, live, sK, sKe, C: gl.constexpr, P: gl.constexpr):
    """Asks for the rows of [rows, C+P] from CACHE + first on into shared memory; from row `live` on: zeros."""
    N: gl.constexpr = sK.shape[0]
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32] if C >= 256 else [2, 16], [4, 1], [1, 0])
    SLIM: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8] if P >= 64 else [8, 4], [4, 1], [1, 0])
    row = gl.arange(0, N, gl.SliceLayout(1, WIDE))
    slim = gl.arange(0, N, gl.SliceLayout(1, SLIM))
    c = gl.arange(0, C, gl.SliceLayout(0, WIDE))
    e = gl.arange(0, P, gl.SliceLayout(0, SLIM))
    at = CACHE + first.to(gl.int64) * (C + P)
    async_copy.async_copy_global_to_shared(sKe, at + slim[:, None] * (C + P) + C + e[None, :], (slim < live)[:, None])
    async_copy.async_copy_global_to_shared(sK, at + row[:, None] * (C + P) + c[None, :], (row < live)[:, None])
    async_copy.commit_group()


@gluon.jit
def _scores(sQ, sQe, sK, sKe, M: gl.constexpr, C: gl.constexpr):
    """[64 keys, 16 lines], in the order of the other forms: rotated part, then latents."""
    A: gl.constexpr = gl.DotOperandLayout(0, M, 2)
    X: gl.constexpr = gl.DotOperandLayout(1, M, 2)
    async_copy.wait_group(0)
    gl.thread_barrier()
    s = mma_v2(sKe.load(A), sQe.permute((1, 0)).load(X), gl.zeros([64, 16], gl.float32, M))
    for c in gl.static_range(C // 64):
        s = mma_v2(sK.slice(c * 64, 64, dim=1).load(A), sQ.slice(c * 64, 64, dim=1).permute((1, 0)).load(X), s)
    return s


@gluon.jit
def _weigh(s, m, lc, acc, sP, sK, M: gl.constexpr):
    """One block of 64 keys into the running softmax."""
    A: gl.constexpr = gl.DotOperandLayout(0, M, 2)
    X: gl.constexpr = gl.DotOperandLayout(1, M, 2)
    mn = gl.maximum(m, gl.max(s, 0) * LOG2E)
    a = gl.exp2(m - mn)
    p = gl.exp2(gl.fma(s, LOG2E, -mn[None, :]))
    sP.permute((1, 0)).store(p.to(gl.bfloat16))
    lc = gl.fma(lc, a[None, :], p)
    acc = acc * a[None, :]
    gl.thread_barrier()
    for g in gl.static_range(4):  # sixteen keys at a time, or their values fill the registers
        values = sK.slice(g * 16, 16, dim=0).permute((1, 0)).load(A)
        acc = mma_v2(values, sP.slice(g * 16, 16, dim=1).permute((1, 0)).load(X), acc)
    gl.thread_barrier()
    return mn, lc, acc


@gluon.jit(do_not_specialize=["B", "G", "H", "pt_stride"])
def prefix_portable(
    Q,
    CACHE,
    PAGES,  # from here on as prefix_narrow
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
    LATENT: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    ROPE: gl.constexpr = gl.NVMMASharedLayout(2 * P, 16, rank=2)
    M: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])  # [64 keys or C columns, 16 lines]
    pid = gl.program_id(0)
    follow(pid)
    b, k0, k1, line0, lines, full, sbk = portion(pid, G, ROWS, LENS, WIDTHS, B, H, 16, BP, SPLITS, 4)
    n = gl.minimum(k1 * sbk, full) - k0 * sbk
    sQ = gl.allocate_shared_memory(gl.bfloat16, [16, C], LATENT)
    sQe = gl.allocate_shared_memory(gl.bfloat16, [16, P], ROPE)
    sK = gl.allocate_shared_memory(gl.bfloat16, [64, C], LATENT)
    sKe = gl.allocate_shared_memory(gl.bfloat16, [64, P], ROPE)
    sP = gl.allocate_shared_memory(gl.bfloat16, [16, 64], LATENT)
    column = gl.arange(0, C, gl.SliceLayout(1, M))
    key = gl.arange(0, 64, gl.SliceLayout(1, M))
    line = gl.arange(0, 16, gl.SliceLayout(0, M))
    acc = gl.zeros([C, 16], gl.float32, M)
    m = gl.full([16], LOWEST, gl.float32, gl.SliceLayout(0, M))
    lc = gl.zeros([64, 16], gl.float32, M)
    page = PAGES + b * pt_stride + k0 * sbk
    if n > 0:
        _ask(Q, line0, lines, sQ, sQe, C, P)
    for i in range(n):
        _ask(CACHE, gl.load(page + i).to(gl.int64) * 64, 64, sK, sKe, C, P)
        m = gl.where(i % sbk == 0, LOWEST, m)  # a new split: a is 0 and clears lc and acc
        s = _scores(sQ, sQe, sK, sKe, M, C)
        m, lc, acc = _weigh(s, m, lc, acc, sP, sK, M)
        if ((i + 1) % sbk == 0) | (i == n - 1):
            k = k0 + i // sbk
            keep = (line < lines) & (k < SPLITS)
            place = line0.to(gl.int64) * SPLITS + k
            kept = SUMS + place * C + line[None, :] * (SPLITS * C) + real_column(column)[:, None]
            gl.store(kept, acc.to(gl.bfloat16), mask=keep[None, :])
            gl.store(SCALARS + place * 2 + line * (2 * SPLITS), m, mask=keep)
            gl.store(SCALARS + place * 2 + line * (2 * SPLITS) + 1, row_sum(lc, 0), mask=keep)
    # what the rows' own keys go on from; only the sequence's last program can end inside a split
    unfinished = (line < lines) & (n % sbk != 0)
    gl.store(OPEN + line0 * 64 + line[None, :] * 64 + key[:, None], lc, mask=unfinished[None, :])
    gl.store(OPEN_SUMS + line0 * C + line[None, :] * C + column[:, None], acc, mask=unfinished[None, :])
