"""Routed experts with INT4 weights, grouped by expert: W4A16, symmetric, 32 weights a scale.

    hidden[p] = silu(G_e x[r]) * (U_e x[r]);   partial[p] = weight[p] * D_e hidden[p]       p = r * k + j, e = chosen[p]

x [R, H]; gate and up words [E, 2 I, H / 8] int32 and scales [E, 2 I, H / 32] (gate's rows, then up's), down
[E, H, I / 8] and [E, H, I / 32] -> partial [R, k, H] float32, which `add_rmsnorm` sums in the order of j.

Words are compressed-tensors' `pack-quantized`, as `kernels.int4` reads them. A weight means (nibble - 8) * scale,
unrounded: a group's 32 products with the codes, which are exact, are one MMA sum in float32, which the scale then
multiplies; groups are added in ascending order. A pair's bits depend neither on the tile it stands in nor on the pairs
beside it. Tiles are fixed; no sum is split, nothing is atomic.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.shapes import check
from kernels.int4 import int4_unpack

TEST_SHAPES = [(1, 64, 32, 8, 2), (5, 64, 32, 8, 2), (19, 96, 64, 4, 3)]  # (R, H, I, E, k)
BLOCK_ROWS, BLOCK_N = 16, 32
GROUP = tl.constexpr(32)


def reference(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    gate_up: tuple[torch.Tensor, torch.Tensor],
    down: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """partial [R, k, H] float32; `hidden` is rounded to x's type, as the kernel stores it."""
    wide, narrow = int4_unpack.reference(*gate_up), int4_unpack.reference(*down)
    out = x.new_zeros(*chosen.shape, x.shape[1], dtype=torch.float32)
    for r, experts in enumerate(chosen.tolist()):
        for j, e in enumerate(experts):
            if e >= 0:
                gate, up = (wide[e] @ x[r].float()).chunk(2)
                hidden = (torch.nn.functional.silu(gate) * up).to(x.dtype).float()
                out[r, j] = weights[r, j] * (narrow[e] @ hidden)
    return out


@triton.jit
def _group_sum(x, words, scales, live, valid, g, acc):
    """acc + scale * (x's 32 columns of group g times the codes): x [BM, 1], words and scales [1, BN] point at rows."""
    k = g * GROUP + tl.arange(0, GROUP)
    a = tl.load(x + k[None, :], mask=live[:, None], other=0.0)
    packed = tl.load(words + (k // 8)[:, None], mask=valid[None, :], other=0)
    code = ((packed >> ((k % 8) * 4)[:, None]) & 15) - 8
    scale = tl.load(scales + g, mask=valid[None, :], other=0.0).to(tl.float32)
    return acc + tl.dot(a, code.to(tl.float32).to(a.dtype), input_precision="ieee") * scale


@triton.jit(do_not_specialize=["rows"])
def _gate_up(
    x, pairs, counts, words, scales, hidden, rows,
    H: tl.constexpr, INNER: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    e, begin = tl.program_id(2).to(tl.int64), tl.program_id(1) * BM
    count = tl.load(counts + e)
    if begin < count:
        m = begin + tl.arange(0, BM)
        n = tl.program_id(0) * BN + tl.arange(0, BN)
        live, valid = m < count, n < INNER
        pair = tl.load(pairs + e * rows + m, mask=live, other=0)
        row = x + (pair // K).to(tl.int64)[:, None] * H
        gate_row = (e * 2 * INNER + n)[None, :]
        up_row = (e * 2 * INNER + INNER + n)[None, :]
        gate, up = tl.zeros((BM, BN), tl.float32), tl.zeros((BM, BN), tl.float32)
        for g in range(H // GROUP):
            gate = _group_sum(
                row, words + gate_row * (H // 8), scales + gate_row * (H // GROUP), live, valid, g, gate
            )  # fmt: skip
            up = _group_sum(row, words + up_row * (H // 8), scales + up_row * (H // GROUP), live, valid, g, up)
        y = gate / (1.0 + tl.exp(-gate)) * up
        at = hidden + pair.to(tl.int64)[:, None] * INNER + n[None, :]
        tl.store(at, y.to(hidden.dtype.element_ty), mask=live[:, None] & valid[None, :])


@triton.jit(do_not_specialize=["rows"])
def _down(
    hidden, pairs, counts, weights, words, scales, partials, rows,
    H: tl.constexpr, INNER: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    e, begin = tl.program_id(2).to(tl.int64), tl.program_id(1) * BM
    count = tl.load(counts + e)
    if begin < count:
        m = begin + tl.arange(0, BM)
        n = tl.program_id(0) * BN + tl.arange(0, BN)
        live, valid = m < count, n < H
        pair = tl.load(pairs + e * rows + m, mask=live, other=0)
        inner = hidden + pair.to(tl.int64)[:, None] * INNER
        row = (e * H + n)[None, :]
        acc = tl.zeros((BM, BN), tl.float32)
        for g in range(INNER // GROUP):
            acc = _group_sum(inner, words + row * (INNER // 8), scales + row * (INNER // GROUP), live, valid, g, acc)
        acc = acc * tl.load(weights + pair, mask=live, other=0.0)[:, None]
        at = partials + pair.to(tl.int64)[:, None] * H + n[None, :]
        tl.store(at, acc, mask=live[:, None] & valid[None, :])


def int4_moe(
    x: torch.Tensor,
    weights: torch.Tensor,
    pairs: torch.Tensor,
    counts: torch.Tensor,
    gate_up: tuple[torch.Tensor, torch.Tensor],
    down: tuple[torch.Tensor, torch.Tensor],
    hidden: torch.Tensor,
    partials: torch.Tensor,
) -> None:
    """Fills hidden [R * k, I] and partials [R, k, H] of the pairs that the lists name; the others stay as they are.

    ValueError names what does not fit.
    """
    (rows, width), experts, top_k = x.shape, counts.shape[0], weights.shape[1]
    inner = hidden.shape[1]
    if width % 32 or inner % 32:
        raise ValueError(f"x and hidden are {width} and {inner} wide, multiples of 32 were expected")
    check("x", x, (rows, width))
    check("weights", weights, (rows, top_k), torch.float32)
    check("pairs", pairs, (experts, rows), torch.int32)
    check("counts", counts, (experts,), torch.int32)
    check("gate_up words", gate_up[0], (experts, 2 * inner, width // 8), torch.int32)
    check("gate_up scales", gate_up[1], (experts, 2 * inner, width // 32))
    check("down words", down[0], (experts, width, inner // 8), torch.int32)
    check("down scales", down[1], (experts, width, inner // 32))
    check("hidden", hidden, (rows * top_k, inner), x.dtype)
    check("partials", partials, (rows, top_k, width), torch.float32)
    tiles = triton.cdiv(rows, BLOCK_ROWS)
    sizes = {"H": width, "INNER": inner, "BM": BLOCK_ROWS, "BN": BLOCK_N}
    _gate_up[(triton.cdiv(inner, BLOCK_N), tiles, experts)](
        x, pairs, counts, *gate_up, hidden, rows, K=top_k, **sizes, num_warps=4
    )
    _down[(triton.cdiv(width, BLOCK_N), tiles, experts)](
        hidden, pairs, counts, weights, *down, partials, rows, **sizes, num_warps=4
    )
