"""The shared expert's last product and the sum of a row's routed slots, in one launch: the end of a sparse block.

    out[r] = base[r] + ((p0 + p2) + (p1 + p3)),   base[r, n] = sum_k act[r, k] w[n, k]          p_i as moe_combine.py

Bits are those of `linear` (one chain of MMA steps of 16 products, ascending in k) and of `combine`. act [R, 256], w
[H, 256], y [R * 8, H], weights [R, 8] float32, chosen [R, 8] int32 -> out [R, H]. All but y must be older than the
launch before this one: the product is made before the wait. So no launch of its own stands in the chain.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mma_v2

from kernels.gpu.follow import ROOMY, followed
from kernels.gpu.linear_held import follow_eagerly
from kernels.gpu.shapes import check

K, SLOTS = 256, 8
ROWS, COLUMNS, WARPS = 16, 64, 4  # of a program


@gluon.jit
def _slot(weights, chosen, p, live):
    return gl.load(chosen + p, mask=live, other=-1) >= 0, gl.load(weights + p, mask=live, other=0.0)


@gluon.jit
def _load(y, at, p, of, H: gl.constexpr):
    return gl.load(y + p.to(gl.int64)[:, None] * H + at[None, :], mask=of[0][:, None] & (at >= 0)[None, :], other=0.0)


@gluon.jit
def _two(y0, y1, of0, of1):
    return y0.to(gl.float32) * of0[1][:, None] + y1.to(gl.float32) * of1[1][:, None]


@gluon.jit(do_not_specialize=["count"])
def shared_combine(
    act, w, y, weights, chosen, out, count,
    H: gl.constexpr, K: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, W: gl.constexpr, EAGER: gl.constexpr,
):  # fmt: skip
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [W, 1], [1, 0])
    M: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, W], [16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, M, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, M, 2)
    AT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BN, BN // 8], [W, 1], [1, 0])
    n0 = gl.program_id(0) * BN
    m0 = gl.program_id(1) * BM
    k = gl.arange(0, K, gl.SliceLayout(0, WIDE))
    line = n0 + gl.arange(0, BN, gl.SliceLayout(1, WIDE))
    row = m0 + gl.arange(0, BM, gl.SliceLayout(1, WIDE))
    held = gl.allocate_shared_memory(gl.bfloat16, [BN, K], SHARED)
    given = gl.allocate_shared_memory(gl.bfloat16, [BM, K], SHARED)
    async_copy.async_copy_global_to_shared(held, w + line.to(gl.int64)[:, None] * K + k[None, :])
    async_copy.async_copy_global_to_shared(
        given, act + row.to(gl.int64)[:, None] * K + k[None, :], (row < count)[:, None]
    )
    async_copy.commit_group()
    r = m0 + gl.arange(0, BM, gl.SliceLayout(1, AT))
    at = n0 + gl.arange(0, BN, gl.SliceLayout(0, AT))
    live = r < count
    p = r * 8
    s0, s1 = _slot(weights, chosen, p, live), _slot(weights, chosen, p + 1, live)
    s2, s3 = _slot(weights, chosen, p + 2, live), _slot(weights, chosen, p + 3, live)
    s4, s5 = _slot(weights, chosen, p + 4, live), _slot(weights, chosen, p + 5, live)
    s6, s7 = _slot(weights, chosen, p + 6, live), _slot(weights, chosen, p + 7, live)
    async_copy.wait_group(0)
    gl.thread_barrier()
    acc = gl.zeros([BM, BN], gl.float32, M)
    for c in gl.static_range(K // 64):
        b = held.slice(c * 64, 64, dim=1).permute((1, 0)).load(B)
        acc = mma_v2(given.slice(c * 64, 64, dim=1).load(A), b, acc)
    base = gl.convert_layout(acc, AT)
    follow_eagerly(n0, EAGER)
    y0, y1 = _load(y, at, p, s0, H), _load(y, at, p + 1, s1, H)
    y2, y3 = _load(y, at, p + 2, s2, H), _load(y, at, p + 3, s3, H)
    y4, y5 = _load(y, at, p + 4, s4, H), _load(y, at, p + 5, s5, H)
    y6, y7 = _load(y, at, p + 6, s6, H), _load(y, at, p + 7, s7, H)
    sums = (_two(y0, y1, s0, s1) + _two(y4, y5, s4, s5)) + (_two(y2, y3, s2, s3) + _two(y6, y7, s6, s7))
    into = out + r.to(gl.int64)[:, None] * H + at[None, :]
    gl.store(into, (base + sums).to(out.dtype.element_ty), mask=live[:, None] & (at >= 0)[None, :])


def combine_with_shared(
    act: torch.Tensor,
    w: torch.Tensor,
    y: torch.Tensor,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    out: torch.Tensor,
    eager: bool = False,
) -> torch.Tensor:
    """Fills out. `eager`: the next launch may begin before this one's turn (linear_held.py says what it must not do).

    ValueError names what does not fit.
    """
    rows, hidden = out.shape
    check("act", act, (rows, K), torch.bfloat16)
    check("w", w, (hidden, K), torch.bfloat16)
    check("y", y, (rows * SLOTS, hidden), torch.bfloat16)
    check("weights", weights, (rows, SLOTS), torch.float32)
    check("chosen", chosen, (rows, SLOTS), torch.int32)
    check("out", out, (rows, hidden), torch.float32, torch.bfloat16)
    if hidden % COLUMNS:
        raise ValueError(f"out has {hidden} columns, a multiple of {COLUMNS} was expected")
    shared_combine[(hidden // COLUMNS, triton.cdiv(rows, ROWS))](
        act, w, y, weights, chosen, out, rows, H=hidden, K=K, BM=ROWS, BN=COLUMNS, W=WARPS, EAGER=eager,
        num_warps=WARPS, enable_fp_fusion=False, **ROOMY, launch_pdl=followed()["launch_pdl"],
    )  # fmt: skip
    return out
