"""Routed experts with INT4 weights, grouped by expert: W4A16, symmetric, 32 weights a scale.

    hidden[p] = silu(G_e x[r]) * (U_e x[r]);   partial[p] = weight[p] * D_e hidden[p]       p = r * k + j, e = chosen[p]

x [R, H]; gate and up words [E, 2 I, H / 8] int32 and scales [E, 2 I, H / 32] (gate's rows, then up's), down
[E, H, I / 8] and [E, H, I / 32] -> partial [R, k, H] float32, which `add_rmsnorm` sums in the order of j.

Words are compressed-tensors' `pack-quantized`, as `kernels.int4` reads them. A weight means (nibble - 8) * scale,
unrounded: a group's 32 products with the codes, which are exact, are one MMA sum in float32, which the scale then
multiplies; up to four groups are added to each other, then to those before them. A pair's
bits depend neither on the tile it stands in nor on the pairs beside it. Tiles are fixed, no sum is split or atomic.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.follow import follow, followed
from kernels.gpu.shapes import check
from kernels.int4 import int4_unpack

TEST_SHAPES = [(1, 64, 32, 8, 2), (5, 64, 32, 8, 2), (19, 96, 64, 4, 3)]  # (R, H, I, E, k)
BLOCK_ROWS, BLOCK_N = 16, 32


def reference(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    gate_up: tuple[torch.Tensor, torch.Tensor],
    down: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """partial [R, k, H] float32."""
    return unpacked_reference(x, chosen, weights, int4_unpack.reference(*gate_up), int4_unpack.reference(*down))


def unpacked_reference(
    x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, wide: torch.Tensor, narrow: torch.Tensor
) -> torch.Tensor:
    """partial [R, k, H] float32 of wide [E, 2 I, H] and narrow [E, H, I] float32; `hidden` is rounded to x's type, as
    the kernels store it."""
    out = x.new_zeros(*chosen.shape, x.shape[1], dtype=torch.float32)
    for r, experts in enumerate(chosen.tolist()):
        for j, e in enumerate(experts):
            if e >= 0:
                gate, up = (wide[e] @ x[r].float()).chunk(2)
                hidden = (torch.nn.functional.silu(gate) * up).to(x.dtype).float()
                out[r, j] = weights[r, j] * (narrow[e] @ hidden)
    return out


@triton.jit
def _codes(words, valid, WORDS: tl.constexpr):
    """[WORDS / 4, 32, BN]: the codes, by groups, of the words from `words` [1, BN] on."""
    packed = tl.load(words + tl.arange(0, WORDS)[:, None], mask=valid[None, :], other=0)
    nibbles = (packed[:, None, :] >> (tl.arange(0, 8) * 4)[None, :, None]) & 15
    return tl.reshape(nibbles - 8, (WORDS // 4, 32, packed.shape[1]))


@triton.jit
def _sum(x, codes, scales, acc):
    """acc + the sum over groups of scale * (x's products with the codes): x [U, BM, 32], scales [U, BN]."""
    part = tl.dot(x, codes.to(tl.float32).to(x.dtype), input_precision="ieee")
    return acc + tl.sum(part * scales.to(tl.float32)[:, None, :], 0)


@triton.jit
def _rows(x, live, U: tl.constexpr, BM: tl.constexpr):
    """[U, BM, 32]: 32 U columns, by groups, of the rows that `x` [BM, 1] points at."""
    a = tl.load(x + tl.arange(0, U * 32)[None, :], mask=live[:, None], other=0.0)
    return tl.permute(tl.reshape(a, (BM, U, 32)), (1, 0, 2))


@triton.jit(do_not_specialize=["rows"])
def _gate_up(
    x, pairs, counts, words, scales, hidden, rows,
    H: tl.constexpr, INNER: tl.constexpr, K: tl.constexpr, U: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    follow(PDL)
    e, begin = tl.program_id(2).to(tl.int64), tl.program_id(1) * BM
    count = tl.load(counts + e)
    if begin < count:
        m = begin + tl.arange(0, BM)
        n = tl.program_id(0) * BN + tl.arange(0, BN)
        live, valid, u = m < count, n < INNER, tl.arange(0, U)[:, None]
        pair = tl.load(pairs + e * rows + m, mask=live, other=0)
        row = x + (pair // K).to(tl.int64)[:, None] * H
        at = (e * 2 * INNER + n)[None, :]
        gate_words, gate_scales = words + at * (H // 8), scales + at * (H // 32)
        up_words, up_scales = gate_words + INNER * (H // 8), gate_scales + INNER * (H // 32)
        gate, up = tl.zeros((BM, BN), tl.float32), tl.zeros((BM, BN), tl.float32)
        for g in range(0, H // 32, U):  # all loads of U groups before the products, which wait for each other
            a = _rows(row + g * 32, live, U, BM)
            gate_codes = _codes(gate_words + g * 4, valid, U * 4)
            up_codes = _codes(up_words + g * 4, valid, U * 4)
            gate_scale = tl.load(gate_scales + g + u, mask=valid[None, :], other=0.0)
            up_scale = tl.load(up_scales + g + u, mask=valid[None, :], other=0.0)
            gate = _sum(a, gate_codes, gate_scale, gate)
            up = _sum(a, up_codes, up_scale, up)
        y = gate / (1.0 + tl.exp(-gate)) * up
        into = hidden + pair.to(tl.int64)[:, None] * INNER + n[None, :]
        tl.store(into, y.to(hidden.dtype.element_ty), mask=live[:, None] & valid[None, :])


@triton.jit(do_not_specialize=["rows"])
def _down(
    hidden, pairs, counts, weights, words, scales, partials, rows,
    H: tl.constexpr, INNER: tl.constexpr, U: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    follow(PDL)
    e, begin = tl.program_id(2).to(tl.int64), tl.program_id(1) * BM
    count = tl.load(counts + e)
    if begin < count:
        m = begin + tl.arange(0, BM)
        n = tl.program_id(0) * BN + tl.arange(0, BN)
        live, valid, u = m < count, n < H, tl.arange(0, U)[:, None]
        pair = tl.load(pairs + e * rows + m, mask=live, other=0)
        row = hidden + pair.to(tl.int64)[:, None] * INNER
        at = (e * H + n)[None, :]
        acc = tl.zeros((BM, BN), tl.float32)
        for g in range(0, INNER // 32, U):
            a = _rows(row + g * 32, live, U, BM)
            codes = _codes(words + at * (INNER // 8) + g * 4, valid, U * 4)
            scale = tl.load(scales + at * (INNER // 32) + g + u, mask=valid[None, :], other=0.0)
            acc = _sum(a, codes, scale, acc)
        acc = acc * tl.load(weights + pair, mask=live, other=0.0)[:, None]
        into = partials + pair.to(tl.int64)[:, None] * H + n[None, :]
        tl.store(into, acc, mask=live[:, None] & valid[None, :])


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
    sizes = {"H": width, "INNER": inner, "BM": BLOCK_ROWS, "BN": BLOCK_N, "num_warps": 4, **followed()}
    _gate_up[(triton.cdiv(inner, BLOCK_N), tiles, experts)](
        x, pairs, counts, *gate_up, hidden, rows, K=top_k, U=_together(width), **sizes
    )
    _down[(triton.cdiv(width, BLOCK_N), tiles, experts)](
        hidden, pairs, counts, weights, *down, partials, rows, U=_together(inner), **sizes
    )


def _together(width: int) -> int:
    """Groups of one pass of the loop: 4, 2 or 1, by the layer's shape alone."""
    groups = width // 32
    return min(4, groups & -groups)
