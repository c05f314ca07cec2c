"""A query as attention over latents reads it: what is not turned goes through W_UK, the rest is turned. One launch.

    out[r, h, :N] = scale * sum_k query[r, h, k] w[h, n, k]        k < K, as kernels/gpu/linear.py: its chain of sums
    out[r, h, N:] = scale * rope(query[r, h, K:])                  as kernels/gpu/rope.py

query [R, H, K + D] -> out [R, H, N + D]; w [H, N, K] (arXiv 2405.04434, appendix C: W_UK absorbed); position [R] int32;
cos, sin [P, D / 2] float32. Programs: a block of N, or of 16 rows' turned parts; a block of rows; a head.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.follow import ROOMY, fetch_ahead, follow, followed
from kernels.gpu.linear import chain, cut_for
from kernels.gpu.shapes import check

TEST_SHAPES = [(1, 1, 32, 16, 16), (5, 4, 128, 96, 32), (70, 2, 40, 32, 8)]  # (R, H, N, K, D)
BENCH_SHAPES = [(1, 8, 512, 128, 64), (16, 8, 512, 128, 64), (64, 8, 512, 128, 64)]


@triton.jit(do_not_specialize=["count"])
def _absorb(
    query, w, position, cos, sin, out, count, q_row, q_head, out_row, out_head, scale,
    N: tl.constexpr, K: tl.constexpr, D: tl.constexpr, AHEAD: tl.constexpr, EARLY: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = (N + BN - 1) // BN
    block, head = tl.program_id(0), tl.program_id(2)
    n = block * BN + tl.arange(0, BN)
    if PDL and AHEAD > 0:
        fetch_ahead(w + (head * N + n).to(tl.int64) * K, n < N, AHEAD)
    r = tl.program_id(1) * BM + tl.maximum(block - BLOCKS, 0) * 16 + tl.arange(0, 16)  # of a turned part
    whole, i = tl.arange(0, D), tl.arange(0, D // 2)
    if not EARLY:
        follow(PDL)
    p = tl.load(position + r, mask=r < count, other=0).to(tl.int64)[:, None] * (D // 2) + i[None, :]
    c = tl.load(cos + p) * scale
    s = tl.load(sin + p) * scale
    if EARLY:
        follow(PDL)
    query += head * q_head
    out += head * out_head
    if block < BLOCKS:
        m = tl.program_id(1) * BM + tl.arange(0, BM)
        live = m < count
        columns = w + (head * N + n[None, :]).to(tl.int64) * K
        acc = chain(query + m[:, None].to(tl.int64) * q_row, columns, live, n, 0, N, K, K, BM, BN, BK)
        into = out + m[:, None].to(tl.int64) * out_row + n[None, :]
        tl.store(into, (acc * scale).to(out.dtype.element_ty), mask=live[:, None] & (n < N)[None, :])
    else:
        x = tl.load(query + r[:, None].to(tl.int64) * q_row + K + whole[None, :], mask=(r < count)[:, None], other=0.0)
        even, odd = tl.split(tl.reshape(x.to(tl.float32), (16, D // 2, 2)))
        y = tl.reshape(tl.join(even * c - odd * s, even * s + odd * c), (16, D)).to(out.dtype.element_ty)
        tl.store(out + r[:, None].to(tl.int64) * out_row + N + whole[None, :], y, mask=(r < count)[:, None])


def absorb(
    query: torch.Tensor,
    w: torch.Tensor,
    position: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    early: bool = False,
) -> torch.Tensor:
    """Fills out. `early`: the launch before this one writes neither weights nor tables nor positions (follow.py).

    Positions within the tables: not checked here. ValueError names what does not fit.
    """
    (heads, n, k), half, rows = w.shape, cos.shape[1], query.shape[0]
    check("query", query, (rows, heads, k + 2 * half))
    check("w", w, (heads, n, k), query.dtype)
    check("out", out, (rows, heads, n + 2 * half))
    check("position", position, (rows,), torch.int32)
    check("cos", cos, (None, half), torch.float32)
    check("sin", sin, tuple(cos.shape), torch.float32)
    if half & (half - 1):
        raise ValueError(f"cos has a width of {half}, a power of two was expected")
    cut = cut_for(query.device, rows, n, k)
    _absorb[(triton.cdiv(n, cut.bn) + cut.bm // 16, triton.cdiv(rows, cut.bm), heads)](
        query, w, position, cos, sin, out, rows, query.stride(0), query.stride(1), out.stride(0), out.stride(1), scale,
        N=n, K=k, D=2 * half, AHEAD=cut.ahead, EARLY=early, BM=cut.bm, BN=cut.bn, BK=cut.bk,
        num_warps=cut.warps, num_stages=cut.stages, **ROOMY, **followed(),
    )  # fmt: skip
    return out
