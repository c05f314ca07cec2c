"""Routed experts whose weights are FP8 in blocks of 128 x 128 with a scale each, or plain, grouped by expert.

    hidden[p] = silu(G_e x[r]) * (U_e x[r]);   partial[p] = weight[p] * D_e hidden[p]       p = r * k + j, e = chosen[p]

x [R, H]; gate and up [E, 2 I, H] (gate's rows, then up's) with scales [E, 2 I / 128, H / 128] float32 or None, down
[E, H, I] with [E, H / 128, I / 128] or None -> partial [R, k, H] float32, as `int4_moe` gives it.

An FP8 weight means code * scale, unrounded, as `kernels.fp8` has it: a block's 128 products with the codes, which are
exact in bfloat16, are one chain of MMA sums in float32, which the scale then multiplies. Blocks are added in ascending
order, plain products as one chain. Tiles are fixed, no sum is split or atomic, so a pair's bits depend neither on the
tile it stands in nor on the pairs beside it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.fp8 import BLOCK, fp8_unpack
from kernels.gpu.int4_moe import unpacked_reference
from kernels.gpu.shapes import check

TEST_SHAPES = [(1, 128, 128, 4, 2), (5, 256, 128, 8, 2), (19, 128, 256, 4, 3)]  # (R, H, I, E, k)
BENCH_SHAPES = [(1, 7168, 256, 384, 8), (16, 7168, 256, 384, 8), (64, 7168, 256, 384, 8)]
BLOCK_ROWS, BLOCK_N = 16, 32
FP8 = torch.float8_e4m3fn
Weights = tuple[torch.Tensor, torch.Tensor | None]  # values, scales of their blocks


def unpacked(weights: Weights) -> torch.Tensor:
    """[E, N, K] float32."""
    values, scales = weights
    if scales is None:
        return values.float()
    return torch.stack([fp8_unpack.reference(v, s) for v, s in zip(values, scales, strict=True)])


def reference(
    x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, gate_up: Weights, down: Weights
) -> torch.Tensor:
    """partial [R, k, H] float32."""
    return unpacked_reference(x, chosen, weights, unpacked(gate_up), unpacked(down))


@triton.jit
def _add(acc, a, values, scale, valid, SCALED: tl.constexpr):
    """acc + a [BM, BK] times the weights that `values` [BK, BN] points at; `scale` is their block's."""
    b = tl.load(values, mask=valid[None, :], other=0.0)
    if SCALED:
        acc += tl.dot(a, b.to(a.dtype), input_precision="ieee") * tl.load(scale)
    else:
        acc = tl.dot(a, b, acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["rows"])
def _plain_gate_up(
    x, pairs, counts, values, scales, hidden, rows,
    H: tl.constexpr, INNER: tl.constexpr, K: tl.constexpr, SCALED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    e, begin = tl.program_id(2).to(tl.int64), tl.program_id(1) * BM
    count = tl.load(counts + e)
    if begin < count:
        m, first = begin + tl.arange(0, BM), tl.program_id(0) * BN
        n, k = first + tl.arange(0, BN), tl.arange(0, BK)
        live, valid = m < count, n < INNER
        pair = tl.load(pairs + e * rows + m, mask=live, other=0)
        row = x + (pair // K).to(tl.int64)[:, None] * H + k[None, :]
        gate_values = values + (e * 2 * INNER + n)[None, :] * H + k[:, None]
        up_values = gate_values + INNER * H
        gate_scales = scales + (e * 2 * INNER + first) // 128 * (H // 128)
        up_scales = gate_scales + INNER // 128 * (H // 128)
        gate, up = tl.zeros((BM, BN), tl.float32), tl.zeros((BM, BN), tl.float32)
        for begin_k in range(0, H, BK):
            a = tl.load(row + begin_k, mask=live[:, None], other=0.0)
            gate = _add(gate, a, gate_values + begin_k, gate_scales + begin_k // 128, valid, SCALED)
            up = _add(up, a, up_values + begin_k, up_scales + begin_k // 128, valid, SCALED)
        y = gate / (1.0 + tl.exp(-gate)) * up
        into = hidden + pair.to(tl.int64)[:, None] * INNER + n[None, :]
        tl.store(into, y.to(hidden.dtype.element_ty), mask=live[:, None] & valid[None, :])


@triton.jit(do_not_specialize=["rows"])
def _plain_down(
    hidden, pairs, counts, weights, values, scales, partials, rows,
    H: tl.constexpr, INNER: tl.constexpr, SCALED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    e, begin = tl.program_id(2).to(tl.int64), tl.program_id(1) * BM
    count = tl.load(counts + e)
    if begin < count:
        m, first = begin + tl.arange(0, BM), tl.program_id(0) * BN
        n, k = first + tl.arange(0, BN), tl.arange(0, BK)
        live, valid = m < count, n < H
        pair = tl.load(pairs + e * rows + m, mask=live, other=0)
        row = hidden + pair.to(tl.int64)[:, None] * INNER + k[None, :]
        own_values = values + (e * H + n)[None, :] * INNER + k[:, None]
        own_scales = scales + (e * H + first) // 128 * (INNER // 128)
        acc = tl.zeros((BM, BN), tl.float32)
        for begin_k in range(0, INNER, BK):
            a = tl.load(row + begin_k, mask=live[:, None], other=0.0)
            acc = _add(acc, a, own_values + begin_k, own_scales + begin_k // 128, valid, SCALED)
        acc = acc * tl.load(weights + pair, mask=live, other=0.0)[:, None]
        into = partials + pair.to(tl.int64)[:, None] * H + n[None, :]
        tl.store(into, acc, mask=live[:, None] & valid[None, :])


def plain_moe(
    x: torch.Tensor,
    weights: torch.Tensor,
    pairs: torch.Tensor,
    counts: torch.Tensor,
    gate_up: Weights,
    down: Weights,
    hidden: torch.Tensor,
    partials: torch.Tensor,
) -> None:
    """Fills hidden [R * k, I] and partials [R, k, H] of the pairs that the lists name; the others stay as they are.

    ValueError names what does not fit.
    """
    (rows, width), experts, top_k = x.shape, counts.shape[0], weights.shape[1]
    inner, scaled = hidden.shape[1], gate_up[1] is not None
    unit = BLOCK if scaled else BLOCK_N
    if width % unit or inner % unit:
        raise ValueError(f"x and hidden are {width} and {inner} wide, multiples of {unit} were expected")
    check("weights", weights, (rows, top_k), torch.float32)
    check("x", x, (rows, width))
    check("pairs", pairs, (experts, rows), torch.int32)
    check("counts", counts, (experts,), torch.int32)
    check_weights("gate_up", gate_up, (experts, 2 * inner, width), x.dtype, scaled)
    check_weights("down", down, (experts, width, inner), x.dtype, scaled)
    check("hidden", hidden, (rows * top_k, inner), x.dtype)
    check("partials", partials, (rows, top_k, width), torch.float32)
    tiles = triton.cdiv(rows, BLOCK_ROWS)
    wide, narrow = (scales if scales is not None else values for values, scales in (gate_up, down))
    sizes = {"H": width, "INNER": inner, "SCALED": scaled, "BM": BLOCK_ROWS, "BN": BLOCK_N, "num_warps": 4}
    _plain_gate_up[(triton.cdiv(inner, BLOCK_N), tiles, experts)](
        x, pairs, counts, gate_up[0], wide, hidden, rows, K=top_k, BK=_together(width), **sizes
    )
    _plain_down[(triton.cdiv(width, BLOCK_N), tiles, experts)](
        hidden, pairs, counts, weights, down[0], narrow, partials, rows, BK=_together(inner), **sizes
    )


def check_weights(name: str, weights: Weights, shape: tuple[int, int, int], dtype: torch.dtype, scaled: bool) -> None:
    """ValueError unless they are [E, N, K], FP8 with a scale for each block, or of x's type."""
    (values, scales), (experts, n, k) = weights, shape
    check(f"{name} values", values, shape, FP8 if scaled else dtype)
    if (scales is not None) != scaled:
        raise ValueError(f"{name} has {'' if scaled else 'un'}expected scales: gate_up and down are of one kind")
    if scales is not None:
        check(f"{name} scales", scales, (experts, n // BLOCK, k // BLOCK), torch.float32)


def _together(width: int) -> int:
    """Columns of one pass of the loop: 128 at most, by the layer's shape alone."""
    return min(BLOCK, width & -width)
