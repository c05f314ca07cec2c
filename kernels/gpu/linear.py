"""Dense products whose rows depend on nothing but themselves.

    y[r, h, n] = scale * sum_k x[s(r), h, k] w[h, n, k],   s(r) = rows[r], or r where there is no `rows`

x [R', H, K], w [H, N, K] -> y [R, H, N], summed in float32 and rounded once; H is 1 for the two-dimensional form.

A row's sum is one chain of MMA steps of 16 products, ascending in k, whatever the tile: K is never split. Tiles of 16
and of 64 rows give equal bits (mma.sync and wgmma were compared on 3.7 M sums on sm_90), so the row count may choose
between them; nothing else does, and nothing is tuned at run time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.follow import follow, followed
from kernels.gpu.shapes import check

TEST_SHAPES = [(1, 1, 32, 16), (5, 1, 160, 96), (17, 4, 16, 32), (70, 1, 96, 64), (33, 8, 128, 32)]  # (R, H, N, K)
BLOCK_N = 32
FEW_ROWS, MANY_ROWS, WIDE_FROM = 16, 64, 128  # tiles of rows, and the row count from which the large one serves


def reference(x: torch.Tensor, w: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
    """[R, H, N] float32."""
    x = x if rows is None else x.index_select(0, rows)
    return torch.einsum("rhk,hnk->rhn", x.float(), w.float())


@triton.jit(do_not_specialize=["count"])
def _linear(
    x, rows, w, out, count, N: tl.constexpr, K: tl.constexpr,
    x_row, x_head, out_row, out_head, scale,
    GATHER: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    follow(PDL)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    head = tl.program_id(2)
    live = m < count
    source = tl.load(rows + m, mask=live, other=0) if GATHER else m
    x += head * x_head + source[:, None].to(tl.int64) * x_row
    w += (head * N + n[None, :]).to(tl.int64) * K
    acc = tl.zeros((BM, BN), tl.float32)
    for begin in range(0, K, BK):
        k = begin + tl.arange(0, BK)
        if K % BK == 0:  # masks along k would make loads narrow
            a = tl.load(x + k[None, :], mask=live[:, None], other=0.0)
            b = tl.load(w + k[:, None], mask=(n < N)[None, :], other=0.0)
        else:
            a = tl.load(x + k[None, :], mask=live[:, None] & (k < K)[None, :], other=0.0)
            b = tl.load(w + k[:, None], mask=(n < N)[None, :] & (k < K)[:, None], other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    out += head * out_head + m[:, None].to(tl.int64) * out_row + n[None, :]
    tl.store(out, (acc * scale).to(out.dtype.element_ty), mask=live[:, None] & (n < N)[None, :])


def linear(
    x: torch.Tensor,
    w: torch.Tensor,
    out: torch.Tensor,
    rows: torch.Tensor | None = None,
    tile: int | None = None,
    scale: float = 1.0,
) -> torch.Tensor:
    """Fills out [R, N] from x [R', K] and w [N, K], or out [R, H, N] from x [R', H, K] and w [H, N, K].

    x and out may be parts of wider rows; `rows` int32 [R] picks x's. `tile` forces a tile of rows, for tests.
    ValueError names what does not fit.
    """
    if x.dim() == 2:
        x, w, out = x.unsqueeze(1), w.unsqueeze(0), out.unsqueeze(1)
    heads, n, k = w.shape
    count = out.shape[0]
    check("w", w, (heads, n, k), x.dtype)
    if tuple(x.shape[1:]) != (heads, k) or x.stride(2) != 1:
        raise ValueError(f"x has shape {list(x.shape)} and strides {list(x.stride())}, rows of [{heads}, {k}] expected")
    if tuple(out.shape) != (count, heads, n) or out.stride(2) != 1:
        raise ValueError(
            f"out has shape {list(out.shape)}, strides {list(out.stride())}, rows of [{heads}, {n}] expected"
        )
    if rows is None and x.shape[0] < count:
        raise ValueError(f"x has {x.shape[0]} rows, out has {count}")
    if rows is not None:
        check("rows", rows, (count,), torch.int32)
    bm = tile or (FEW_ROWS if count < WIDE_FROM else MANY_ROWS)
    grid = (triton.cdiv(n, BLOCK_N), triton.cdiv(count, bm), heads)
    _linear[grid](
        x, x if rows is None else rows, w, out, count, n, k,
        x.stride(0), x.stride(1), out.stride(0), out.stride(1), scale,
        GATHER=rows is not None, BM=bm, BN=BLOCK_N, BK=min(64, triton.next_power_of_2(k)), num_warps=4, num_stages=3,
        **followed(),
    )  # fmt: skip
    return out
