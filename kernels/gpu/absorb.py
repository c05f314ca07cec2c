"""A query as attention over latents reads it: what is not turned goes through W_UK, the rest is turned. One launch.

    out[r, h, :N] = scale * sum_k query[r, h, k] w[h, n, k]        k < K, as kernels/gpu/linear.py: its chain of sums
    out[r, h, N:] = scale * rope(query[r, h, K:])                  as kernels/gpu/rope.py

query [R, H, K + D] -> out [R, H, N + D]; w [H, N, K] (arXiv 2405.04434, appendix C: W_UK absorbed); position [R] int32;
cos, sin [P, D / 2] float32. Programs: a block of N or the turned part, a block of rows, a head.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.follow import fetch_ahead, follow, followed
from kernels.gpu.linear import chain, cut_for
from kernels.gpu.rope import turned
from kernels.gpu.shapes import check

TEST_SHAPES = [(1, 1, 32, 16, 16), (5, 4, 128, 96, 32), (70, 2, 40, 32, 8)]  # (R, H, N, K, D)


@triton.jit(do_not_specialize=["count"])
def _absorb(
    query, w, position, cos, sin, out, count, q_row, q_head, out_row, out_head, scale,
    N: tl.constexpr, K: tl.constexpr, HALF: tl.constexpr, AHEAD: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = (N + BN - 1) // BN
    block, head = tl.program_id(0), tl.program_id(2)
    n = block * BN + tl.arange(0, BN)
    if PDL and AHEAD > 0:
        fetch_ahead(w + (head * N + n).to(tl.int64) * K, n < N, AHEAD)
    follow(PDL)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    live = m < count
    query += head * q_head + m[:, None].to(tl.int64) * q_row
    out += head * out_head + m[:, None].to(tl.int64) * out_row
    if block < BLOCKS:
        columns = w + (head * N + n[None, :]).to(tl.int64) * K
        acc = chain(query, columns, live, n, 0, N, K, K, BM, BN, BK)
        tl.store(out + n[None, :], (acc * scale).to(out.dtype.element_ty), mask=live[:, None] & (n < N)[None, :])
    else:
        i = tl.arange(0, HALF)
        p = tl.load(position + m, mask=live, other=0).to(tl.int64)[:, None] * HALF + i[None, :]
        turned(query + K + 2 * i[None, :], cos + p, sin + p, out + N + 2 * i[None, :], live[:, None], scale)


def absorb(
    query: torch.Tensor,
    w: torch.Tensor,
    position: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    out: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Fills out. Positions within the tables: not checked here. ValueError names what does not fit."""
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
    _absorb[(triton.cdiv(n, cut.bn) + 1, triton.cdiv(rows, cut.bm), heads)](
        query, w, position, cos, sin, out, rows, query.stride(0), query.stride(1), out.stride(0), out.stride(1), scale,
        N=n, K=k, HALF=half, AHEAD=cut.ahead, BM=cut.bm, BN=cut.bn, BK=cut.bk,
        num_warps=cut.warps, num_stages=cut.stages, **followed(),
    )  # fmt: skip
    return out
