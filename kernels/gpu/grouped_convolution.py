"""DFlash 2's grouped dynamic causal convolution, around both halves of a drafter's layer.

    y[t, i] = sum_o (base[o, i] + dynamic[t, o, i / group]) * x[t - o, i]        o = 0 .. taps - 1, ascending

t counts the rows of a block; before its first one x is 0, so no row of one block reaches into another, or into the
context: there is nothing to keep between two drafts. base [2, taps, H] and dynamic [P, R, 2 taps H / group] hold both
sides, what goes into a half (0) and what comes out of it (1); dynamic may be in parts, as `linear_parts` leaves them.
x [R, H] -> y [R, H], summed in float32 and rounded once. A row's bits depend on the taps - 1 rows before it and itself.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.follow import follow, followed
from kernels.gpu.linear import joined
from kernels.gpu.shapes import check

TEST_SHAPES = [  # (S, block, H, taps, group, parts)
    (1, 8, 64, 2, 16, 1), (3, 5, 96, 3, 8, 1), (1, 4, 640, 2, 16, 8), (4, 2, 48, 1, 48, 1), (2, 3, 40, 5, 1, 2),
]  # fmt: skip
# (S, block, H): taps 2 and groups of 16, as published, of a 27B and of a K2.6 drafter's width
BENCH_SHAPES = [(1, 8, 5120), (1, 8, 7168), (8, 8, 7168), (32, 8, 7168)]
TILE = 512


def reference(x: torch.Tensor, base: torch.Tensor, dynamic: torch.Tensor, block: int, side: int) -> torch.Tensor:
    """[R, H] float32."""
    taps, hidden = base.shape[1:]
    summed = dynamic.sum(0) if dynamic.dim() == 3 else dynamic
    given = summed.view(-1, block, 2, taps, summed.shape[1] // (2 * taps), 1)[:, :, side]
    groups = given.shape[3]
    blocks = x.float().view(-1, block, groups, hidden // groups)
    weights = base[side].float().view(taps, groups, -1) + given
    total = torch.zeros_like(blocks)
    for o in range(min(taps, block)):
        total[:, o:] += weights[:, o:, o] * blocks[:, : block - o]
    return total.view(x.shape)


@triton.jit
def _grouped_convolution(
    x, base, dynamic, out, dynamic_row, dynamic_part,
    H: tl.constexpr, ROWS: tl.constexpr, TAPS: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr,
    TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    follow(PDL)
    r = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * TILE + tl.arange(0, TILE)
    live = i < H
    t = r % ROWS
    dynamic += r * dynamic_row
    total = tl.zeros((TILE,), tl.float32)
    for o in tl.static_range(TAPS):
        weight = tl.load(base + o * H + i, mask=live, other=0.0).to(tl.float32)
        weight += joined(dynamic, o * (H // GROUP) + i // GROUP, live, PARTS, dynamic_part)
        total += weight * tl.load(x + (r - o) * H + i, mask=live & (t >= o), other=0.0).to(tl.float32)
    tl.store(out + r * H + i, total.to(out.dtype.element_ty), mask=live)


def grouped_convolution(
    x: torch.Tensor, base: torch.Tensor, dynamic: torch.Tensor, out: torch.Tensor, block: int, side: int
) -> None:
    """Fills out [R, H], which is not x, from x [R, H], R a multiple of `block`; `side` 0 or 1.

    dynamic float32, [R, 2 taps groups] or that in parts. ValueError names what does not fit.
    """
    rows, hidden = x.shape
    check("x", x, (rows, hidden))
    check("out", out, (rows, hidden))
    check("base", base, (2, None, hidden))
    taps = base.shape[1]
    dynamic = dynamic.unsqueeze(0) if dynamic.dim() == 2 else dynamic
    check("dynamic", dynamic, (None, rows, None), torch.float32)
    groups = dynamic.shape[2] // (2 * taps)
    if not groups or dynamic.shape[2] != 2 * taps * groups or hidden % groups:
        raise ValueError(f"dynamic has {dynamic.shape[2]} columns, 2 * {taps} of a divisor of {hidden} were expected")
    if block < 1 or rows % block:
        raise ValueError(f"x has {rows} rows, a multiple of {block} was expected")
    if out.data_ptr() == x.data_ptr():
        raise ValueError("out is x: rows would be read that were written before")
    _grouped_convolution[(rows, triton.cdiv(hidden, TILE))](
        x, base[side], dynamic[:, :, side * taps * groups :], out, dynamic.stride(1), dynamic.stride(0),
        H=hidden, ROWS=block, TAPS=taps, GROUP=hidden // groups, PARTS=dynamic.shape[0], TILE=TILE, num_warps=4,
        **followed(),
    )  # fmt: skip
