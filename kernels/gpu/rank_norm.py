"""The end of a block that several ranks share: their parts are added in rank order, and the next block's input normed.

    x[r] += ((p_0[r] + p_1[r]) + ...) + p_n-1[r]                 float32; p_i is rank i's part
    y[r] = x[r] * rsqrt(mean(x[r]^2) + eps) * w                  rounded once

x [R, H] float32 in place, w [H] -> y [R, H]; `tap` [R, H], a part of wider rows, gets x. A part is rounded once, to the
model's type: that is what goes over the wire. Every rank adds all parts itself, so that all have equal bits, whichever
way the parts came: `rank_norm` reads them side by side (one process's, or gathered), `peer_norm` from the inbox that
the other ranks wrote them into.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.follow import follow, followed
from kernels.gpu.shapes import check, check_rows

TEST_SHAPES = [(1, 32, 2), (5, 96, 3), (9, 384, 8)]  # (R, H, n)
BENCH_SHAPES = [(1, 7168, 8), (16, 7168, 8), (64, 7168, 8)]


def reference(x: torch.Tensor, parts: torch.Tensor, w: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The new x, and y in float32; parts [n, R, H]."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    x = x + total
    return x, x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * w.float()


@triton.jit
def close_row(x, v, scale, out, tap, tap_row, r, i, live, eps, H: tl.constexpr, TAP: tl.constexpr):
    """Row r of x is v; its norm goes to `out`, and is returned."""
    tl.store(x + r * H + i, v, mask=live)
    if TAP:
        tl.store(tap + r * tap_row + i, v, mask=live)
    y = (v * tl.rsqrt(tl.sum(v * v, 0) / H + eps) * scale).to(out.dtype.element_ty)
    tl.store(out + r * H + i, y, mask=live)
    return y


@triton.jit
def _rank_norm(
    x, parts, w, out, tap, part_stride, tap_row, eps,
    H: tl.constexpr, RANKS: tl.constexpr, TAP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    follow(PDL)
    r = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    live = i < H
    v = tl.load(x + r * H + i, mask=live, other=0.0)
    scale = tl.load(w + i, mask=live, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(RANKS):
        total += tl.load(parts + rank * part_stride + r * H + i, mask=live, other=0.0).to(tl.float32)
    v += total
    close_row(x, v, scale, out, tap, tap_row, r, i, live, eps, H, TAP)


def rank_norm(
    x: torch.Tensor,
    parts: torch.Tensor,
    w: torch.Tensor,
    out: torch.Tensor,
    eps: float,
    tap: torch.Tensor | None = None,
) -> None:
    """Parts [n, R, H]. ValueError names what does not fit."""
    rows, hidden = x.shape
    if parts.dim() != 3 or tuple(parts.shape[1:]) != (rows, hidden) or parts.stride()[1:] != (hidden, 1):
        raise ValueError(f"parts are {list(parts.shape)}, [any, {rows}, {hidden}] with whole rows was expected")
    check("x", x, (rows, hidden), torch.float32)
    check("w", w, (hidden,))
    check("out", out, (rows, hidden))
    if tap is not None:
        check_rows("tap", tap, hidden)
    _rank_norm[(rows,)](
        x, parts, w, out, x if tap is None else tap, parts.stride(0), 0 if tap is None else tap.stride(0), eps,
        H=hidden, RANKS=len(parts), TAP=tap is not None, BLOCK=triton.next_power_of_2(hidden), num_warps=8,
        **followed(first=True),  # what stands before it may be a collective
    )  # fmt: skip


@triton.jit
def _rank_part(delta, partials, out, H: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    follow(PDL)
    r = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = i < H
    v = tl.load(delta + r * H + i, mask=live, other=0.0)
    routed = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(SLOTS):
        routed += tl.load(partials + (r * SLOTS + j) * H + i, mask=live, other=0.0)
    v += routed
    tl.store(out + r * H + i, v.to(out.dtype.element_ty), mask=live)


def rank_part(delta: torch.Tensor, partials: torch.Tensor, out: torch.Tensor) -> None:
    """out[r] = delta[r] + sum_j partial[r, j], j ascending, rounded once: a rank's part of a sparse block.

    delta [R, H], partials [R, J, H] float32 -> out [R, H]. ValueError names what does not fit.
    """
    rows, hidden = out.shape
    check("delta", delta, (rows, hidden), torch.float32)
    check("partials", partials, (rows, None, hidden), torch.float32)
    check("out", out, (rows, hidden))
    block = min(1024, triton.next_power_of_2(hidden))
    _rank_part[(rows, triton.cdiv(hidden, block))](
        delta, partials, out, H=hidden, SLOTS=partials.shape[1], BLOCK=block, num_warps=4,
        **followed(),
    )  # fmt: skip
