"""Gated activation.

    y = g / (1 + exp(-g)) * u        a = [g | u | ...] [R, >= 2 W] -> y [R, W], float32 inside, rounded once

a may be in parts [P, R, >= 2 W], as `linear_parts` leaves them: they are added first.

Element by element: a row's bits depend on that row alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.follow import follow, followed
from kernels.gpu.linear import joined
from kernels.gpu.shapes import check

TEST_SHAPES = [(1, 32, 0), (5, 96, 8), (9, 768, 0)]  # (R, W, columns behind them)
BENCH_SHAPES = [(1, 256, 384), (16, 256, 384), (64, 256, 384)]
BLOCK = 256


def reference(a: torch.Tensor, width: int) -> torch.Tensor:
    """[R, W] float32."""
    return torch.nn.functional.silu(a[:, :width].float()) * a[:, width : 2 * width].float()


@triton.jit
def activate(a, at, live, a_part, PARTS: tl.constexpr, W: tl.constexpr):
    """y of the gates at these places."""
    gate = joined(a, at, live, PARTS, a_part)
    up = joined(a, W + at, live, PARTS, a_part)
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def _silu_mul(
    a, out, a_row, a_part, PARTS: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    follow(PDL)
    r = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    y = activate(a + r * a_row, i, i < W, a_part, PARTS, W)
    tl.store(out + r * W + i, y.to(out.dtype.element_ty), mask=i < W)


def check_silu(a: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """a in parts. ValueError names what does not fit."""
    rows, width = out.shape
    a = a.unsqueeze(0) if a.dim() == 2 else a
    check("out", out, (rows, width))
    if a.dim() != 3 or a.shape[1] != rows or a.shape[2] < 2 * width or a.stride(2) != 1:
        raise ValueError(
            f"a has shape {list(a.shape)} and strides {list(a.stride())}, {rows} rows of at least {2 * width}"
        )
    return a


def silu_mul(a: torch.Tensor, out: torch.Tensor) -> None:
    """Fills out [R, W] from a [R, >= 2 W] or [P, R, >= 2 W]. ValueError names what does not fit."""
    a, (rows, width) = check_silu(a, out), out.shape
    _silu_mul[(rows, triton.cdiv(width, BLOCK))](
        a, out, a.stride(1), a.stride(0), PARTS=a.shape[0], W=width, BLOCK=BLOCK, num_warps=4,
        **followed(),
    )  # fmt: skip
