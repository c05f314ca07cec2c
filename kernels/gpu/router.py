"""The router, and each expert's list of what it has to compute.

    s = sigmoid(l);  chosen = top-k of s + bias;  w = s[chosen] / (sum + 1e-20) * scale      arXiv 2412.19437 §2.1.2

`route`: l [R, >= E] or [P, R, >= E] float32, parts of a product that are added first, bias [E] float32 -> chosen [R, k]
int32, best first, of equals the lowest id; weights [R, k] float32. Rows with slot < 0 are padding: chosen -1, so that
no expert computes them.
`expert_lists`: chosen -> pairs [E, R] int32 (row * k + j in ascending order), counts [E] int32; no atomics.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.follow import ROOMY, follow, followed
from kernels.gpu.linear import joined
from kernels.gpu.shapes import check

TEST_SHAPES = [(1, 8, 2), (5, 16, 4), (33, 24, 3)]  # (R, E, k)
BENCH_SHAPES = [(1, 384, 8), (16, 384, 8), (64, 384, 8), (512, 384, 8)]
BLOCK_ROWS = 128
LOWEST = tl.constexpr(-(1 << 31))


def reference(
    logits: torch.Tensor, bias: torch.Tensor, top_k: int, normalise: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """chosen int64 and weights float32, [R, k]."""
    scores = logits[:, : len(bias)].float().sigmoid()
    chosen = torch.sort(scores + bias, dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(1, chosen)
    if normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return chosen, weights * scale


def lists_reference(chosen: torch.Tensor, experts: int) -> list[list[int]]:
    """The pairs of each expert."""
    flat = chosen.flatten().tolist()
    return [[pair for pair, e in enumerate(flat) if e == expert] for expert in range(experts)]


@triton.jit
def choose_row(
    logits, bias, slot, chosen, weights, r, row_stride, part_stride, scale, PARTS: tl.constexpr,
    E: tl.constexpr, K: tl.constexpr, NORMALISE: tl.constexpr, EB: tl.constexpr, KB: tl.constexpr,
):  # fmt: skip
    """Row r's experts and weights."""
    logits += r.to(tl.int64) * row_stride
    e, j = tl.arange(0, EB), tl.arange(0, KB)
    real = tl.load(slot + r) >= 0
    logit = joined(logits, e, e < E, PARTS, part_stride)
    score = 1.0 / (1.0 + tl.exp(-logit))
    rank = tl.where(e < E, score + tl.load(bias + e, mask=e < E, other=0.0), -1e30)
    # the rank's bits in the order of integers: a warp has one instruction for the largest of 32 of them
    bits = rank.to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    bits = logit.to(tl.int32, bitcast=True)
    ids, picked = tl.full((KB,), 0, tl.int32), tl.full((KB,), 0, tl.int32)
    for n in tl.static_range(K):
        best = tl.min(tl.where(key == tl.max(key, 0), e, EB), 0)
        ids = tl.where(j == n, best, ids)
        picked = tl.where(j == n, tl.sum(tl.where(e == best, bits, 0), 0), picked)
        key = tl.where(e == best, LOWEST, key)
    picked = tl.where(j < K, 1.0 / (1.0 + tl.exp(-picked.to(tl.float32, bitcast=True))), 0.0)
    total = 0.0
    for n in tl.static_range(K):
        total += tl.sum(tl.where(j == n, picked, 0.0), 0)
    if NORMALISE:
        picked = picked / (total + 1e-20)
    tl.store(chosen + r * K + j, tl.where(real, ids, -1), mask=j < K)
    tl.store(weights + r * K + j, picked * scale, mask=j < K)


@triton.jit
def _route(
    logits, bias, slot, chosen, weights, row_stride, part_stride, scale, PARTS: tl.constexpr,
    E: tl.constexpr, K: tl.constexpr, NORMALISE: tl.constexpr, EB: tl.constexpr, KB: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    follow(PDL)
    r = tl.program_id(0)
    choose_row(logits, bias, slot, chosen, weights, r, row_stride, part_stride, scale, PARTS, E, K, NORMALISE, EB, KB)


def check_route(
    logits: torch.Tensor, bias: torch.Tensor, slot: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """The logits in parts. ValueError names what does not fit."""
    (rows, top_k), experts = chosen.shape, bias.shape[0]
    logits = logits.unsqueeze(0) if logits.dim() == 2 else logits
    if logits.shape[1] != rows or logits.shape[2] < experts or logits.dtype != torch.float32 or logits.stride(2) != 1:
        raise ValueError(
            f"logits are {list(logits.shape)} of {logits.dtype}, {rows} rows of {experts} float32 expected"
        )
    if not 1 <= top_k <= experts:
        raise ValueError(f"chosen has {top_k} columns, 1 to {experts} were expected")
    check("bias", bias, (experts,), torch.float32)
    check("slot", slot, (rows,), torch.int32)
    check("chosen", chosen, (rows, top_k), torch.int32)
    check("weights", weights, (rows, top_k), torch.float32)
    return logits


def route(
    logits: torch.Tensor,
    bias: torch.Tensor,
    slot: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    normalise: bool,
    scale: float,
) -> None:
    """Fills chosen and weights. ValueError names what does not fit."""
    logits, (rows, top_k), experts = check_route(logits, bias, slot, chosen, weights), chosen.shape, bias.shape[0]
    _route[(rows,)](
        logits, bias, slot, chosen, weights, logits.stride(1), logits.stride(0), scale,
        PARTS=logits.shape[0], E=experts, K=top_k, NORMALISE=normalise,
        EB=triton.next_power_of_2(experts), KB=triton.next_power_of_2(top_k), num_warps=1,
        **ROOMY, **followed(),
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _expert_lists(
    chosen, pairs, counts, rows, K: tl.constexpr, KB: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    follow(PDL)
    e = tl.program_id(0)
    j = tl.arange(0, KB)
    found = 0
    begin = 0
    while begin < rows:  # of a `range` over a value the interpreter knows nothing
        r = begin + tl.arange(0, BLOCK)
        here = tl.load(chosen + r[:, None] * K + j[None, :], mask=(r < rows)[:, None] & (j < K)[None, :], other=-1)
        hit = (here == e).to(tl.int32)
        one = tl.sum(hit, 1)  # a row has an expert at most once
        at = found + tl.cumsum(one, 0) - 1
        tl.store(pairs + e.to(tl.int64) * rows + at, r * K + tl.sum(hit * j[None, :], 1), mask=one > 0)
        found += tl.sum(one, 0)
        begin += BLOCK
    tl.store(counts + e, found)


def expert_lists(chosen: torch.Tensor, pairs: torch.Tensor, counts: torch.Tensor) -> None:
    """Fills pairs and counts. ValueError names what does not fit."""
    (rows, top_k), experts = chosen.shape, counts.shape[0]
    check("chosen", chosen, (rows, top_k), torch.int32)
    check("pairs", pairs, (experts, rows), torch.int32)
    check("counts", counts, (experts,), torch.int32)
    _expert_lists[(experts,)](
        chosen, pairs, counts, rows, K=top_k, KB=triton.next_power_of_2(top_k), BLOCK=BLOCK_ROWS, num_warps=4,
        **followed(),
    )  # fmt: skip
