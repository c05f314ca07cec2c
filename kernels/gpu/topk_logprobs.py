"""The best tokens of each depth and their log-probabilities, over a vocabulary that may be split among GPUs.

    lse[r] = log sum_v exp(x[r, v]),  logprobs[r, :] = x[r, tokens] - lse[r],  tokens: the first K by (-x, id)

One launch, one program a row: a pass for each lane's largest, a bisection among these, a pass that gathers the few
candidates, which are ordered by counting (kernels/gpu/select.py). A row's bits depend on no other row.

logits [S, L, V] float32 or bfloat16 -> TopLogprobs, logprobs [S, L, K] float32, tokens [S, L, K] int32: what
kernels/gpu/tree_build.py takes. A row with NaN or +inf cannot be ranked: all its log-probabilities are -inf.
Where each of W ranks has V / W columns, each calls `shard_top` with its first id, the results are gathered in rank
order along dimension 1, and every rank calls `merge_top` on them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.gpu.checks import FLOATS, at_most, expect
from kernels.gpu.follow import follow, followed
from kernels.gpu.select import NO_KEY, UNROLL, choose, disordered, gather_row, sort_few, tile_of
from kernels.tree_build import top_logprobs

TEST_SHAPES = [(1, 1, 7, 7), (2, 2, 509, 16), (1, 1, 5000, 63), (3, 1, 2048, 1)]  # (S, L, V, K)
BENCH_SHAPES = [(1, 7, 20480, 16), (8, 7, 20480, 16), (8, 7, 20480, 63), (64, 7, 20480, 63), (1, 7, 163840, 63)]
MOST_BEST = 64  # K
MOST_KEYS = 8192  # of one row's parts


class TopLogprobs(NamedTuple):
    """The best tokens of each depth, best first; equal logits in the order of their ids."""

    logprobs: torch.Tensor  # [S, L, K] float32, at most 0
    tokens: torch.Tensor  # [S, L, K] int32


class Partial(NamedTuple):
    """What is known of some columns of each row, R rows of P parts."""

    keys: torch.Tensor  # [R, P, K] int64, the order of -x above, the id below; in any order, behind them NO_KEY
    peaks: torch.Tensor  # [R, P] float32, the greatest x
    sums: torch.Tensor  # [R, P] float32, of exp(x - peak)


def reference(logits: torch.Tensor, k: int) -> TopLogprobs:
    """The same by torch ops."""
    best = top_logprobs.reference(logits, k)
    return TopLogprobs(best.logprobs, best.tokens.int())


@triton.jit
def _row(
    logits_ptr, scratch_ptr, out_logprobs, out_tokens, out_keys, out_peaks, out_sums, columns, first,
    K: tl.constexpr, FINAL: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr, LANES: tl.constexpr,
    PLACES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * columns
    best = tl.full([TILE], float("-inf"), tl.float32)
    for i in tl.range(TILES, loop_unroll_factor=UNROLL):
        _, x = tile_of(row_ptr, i, columns, TILE)
        best = tl.maximum(best, x)
    peak = tl.max(best, 0)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    want = tl.minimum(columns, K)
    scratch_ptr += row * PLACES
    found, total = gather_row(row_ptr, best, want, base, scratch_ptr, columns, True, TILES, TILE, LANES, PLACES)
    key, place = sort_few(scratch_ptr, found, PLACES)
    real = place < want
    if FINAL:
        _put(out_logprobs + row * K, out_tokens + row * K, key, place, real, base, total)
    else:
        tl.store(out_keys + row * K + place, tl.where(real, key + first, NO_KEY), mask=place < K)
        tl.store(out_peaks + row, peak)
        tl.store(out_sums + row, total)


@triton.jit
def _put(out_logprobs, out_tokens, key, place, real, base, total):
    logprob = (disordered((key >> 32).to(tl.int32) ^ -1) - base) - tl.log(total)
    logprob = tl.where(logprob == logprob, tl.minimum(logprob, 0.0), float("-inf"))
    tl.store(out_logprobs + place, logprob, mask=real)
    tl.store(out_tokens + place, (key & 0x7FFFFFFF).to(tl.int32), mask=real)


@triton.jit
def _merge(
    keys_ptr, peaks_ptr, sums_ptr, scratch_ptr, out_logprobs, out_tokens, parts,
    K: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    peaks = tl.load(peaks_ptr + row * parts + part, mask=part < parts, other=float("-inf"))
    sums = tl.load(sums_ptr + row * parts + part, mask=part < parts, other=0.0)
    peak = tl.max(peaks, 0)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.sum(sums * tl.exp(peaks - base), 0)
    i = tl.arange(0, BLOCK)
    key = tl.load(keys_ptr + row * parts * K + i, mask=i < parts * K, other=0)
    key = tl.where(i < parts * K, key, NO_KEY)
    chosen = choose((key >> 32).to(tl.int32), (key & 0x7FFFFFFF).to(tl.int32), K)
    place = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(scratch_ptr + row * PLACES + place, key, mask=chosen)
    key, place = sort_few(scratch_ptr + row * PLACES, K, PLACES)
    _put(out_logprobs + row * K, out_tokens + row * K, key, place, place < K, base, total)


def shard_top(logits: torch.Tensor, k: int, first: int = 0) -> Partial:
    """What this rank's columns, ids from `first` on, give to the best `k` of each row: one part.

    logits [R, V] -> keys [R, 1, k], peaks and sums [R, 1]. `k` may exceed V: keys are NO_KEY then.
    """
    rows, device = len(logits), logits.device
    one = Partial(
        torch.empty((rows, 1, k), dtype=torch.int64, device=device),
        torch.empty((rows, 1), dtype=torch.float32, device=device),
        torch.empty((rows, 1), dtype=torch.float32, device=device),
    )
    _rows(logits, k, first, None, one)
    return one


def merge_top(parts: Partial, shape: tuple[int, int], vocabulary: int) -> TopLogprobs:
    """The whole vocabulary's best from all ranks' parts: keys [R, W, K], peaks and sums [R, W], R = S * L = `shape`."""
    rows, count, k = parts.keys.shape
    expect("keys", parts.keys, torch.int64, (rows, count, k))
    expect("peaks", parts.peaks, torch.float32, (rows, count))
    expect("sums", parts.sums, torch.float32, (rows, count))
    at_most("k", k, min(vocabulary, MOST_BEST))
    at_most("parts * k", count * k, MOST_KEYS)
    out = _empty(shape, k, parts.keys.device)
    places, block = max(16, triton.next_power_of_2(k)), max(128, triton.next_power_of_2(count * k))
    scratch = torch.empty((rows, places), dtype=torch.int64, device=parts.keys.device)
    if rows:
        _merge[(rows,)](
            *parts, scratch, *out, count, K=k, PARTS=triton.next_power_of_2(count), BLOCK=block, PLACES=places,
            num_warps=min(max(block // 256, 4), 16),
        )  # fmt: skip
    return out


def topk_logprobs(logits: torch.Tensor, k: int) -> TopLogprobs:
    """The min(k, V) best of each row, k <= 64, in one launch without a host sync. logits [S, L, V], all columns."""
    expect("logits", logits, FLOATS, (None, None, None))
    sequences, depth, vocabulary = logits.shape
    k = min(k, vocabulary)
    out = _empty((sequences, depth), k, logits.device)
    _rows(logits.view(-1, vocabulary), k, 0, out, None)
    return out


def _empty(shape: tuple[int, int], k: int, device: torch.device) -> TopLogprobs:
    return TopLogprobs(
        torch.empty((*shape, k), dtype=torch.float32, device=device),
        torch.empty((*shape, k), dtype=torch.int32, device=device),
    )


def _rows(logits: torch.Tensor, k: int, first: int, out: TopLogprobs | None, one: Partial | None) -> None:
    expect("logits", logits, FLOATS, (None, None))
    at_most("k", k, MOST_BEST)
    rows, columns = logits.shape
    tile = min(max(triton.next_power_of_2(columns), 128), 4096)
    places = 128
    scratch = torch.empty((rows, places), dtype=torch.int64, device=logits.device)
    final = (scratch, scratch) if out is None else out
    part = (scratch, scratch, scratch) if one is None else one
    if rows:
        _row[(rows,)](
            logits, scratch, *final, *part, columns, first, K=k, FINAL=out is not None, TILES=-(-columns // tile),
            TILE=tile, LANES=min(tile, 128), PLACES=places, num_warps=max(tile // 256, 2), **followed(),
        )  # fmt: skip
