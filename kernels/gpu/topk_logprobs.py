"""The best tokens of each depth and their log-probabilities, over a vocabulary that may be split among GPUs.

    lse[r] = log sum_v exp(x[r, v]),  logprobs[r, :] = x[r, tokens] - lse[r],  tokens: the first K by (-x, id)

Two launches. The first takes a chunk of a row a program: its K least keys (order reversed, id below), by bisection, and
its maximum and sum of exponentials. The second takes a row: of all chunks' keys the K least, ordered by counting, and
the sum in chunk order. Chunks depend on the vocabulary's size alone, so a row's bits do not depend on other rows.

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
from kernels.gpu.select import NEVER, choose, ordered
from kernels.tree_build import top_logprobs

TEST_SHAPES = [(1, 1, 7, 7), (2, 2, 509, 16), (1, 1, 5000, 63), (3, 1, 2048, 1)]  # (S, L, V, K)
BENCH_SHAPES = [(1, 7, 20480, 16), (8, 7, 20480, 16), (8, 7, 20480, 63), (64, 7, 20480, 63), (1, 7, 163840, 63)]
MOST_BEST = 64  # K
MOST_KEYS = 8192  # of one row in the second launch
NO_KEY = tl.constexpr(0x7FFFFFFF00000000)  # behind every key


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
def _chunk(
    logits_ptr, keys_ptr, peaks_ptr, sums_ptr, columns, first, parts,
    K: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    id = part * CHUNK + tl.arange(0, CHUNK)
    real = id < columns
    x = tl.load(logits_ptr + row * columns + id, mask=real, other=float("-inf")).to(tl.float32)
    cost = tl.where(real, ordered(x) ^ -1, NEVER)
    count = tl.minimum(columns - part * CHUNK, K)
    chosen = choose(cost, id, count)
    out = keys_ptr + (row * parts + part) * K
    place = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(out + place, (cost.to(tl.int64) << 32) | (first + id), mask=chosen)
    rest = tl.arange(0, triton.next_power_of_2(K))
    tl.store(out + rest, NO_KEY, mask=(rest >= count) & (rest < K))
    peak = tl.max(x, 0)
    at = row * parts + part
    tl.store(peaks_ptr + at, peak)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    tl.store(sums_ptr + at, tl.sum(tl.exp(x - base), 0))


@triton.jit
def _rank(
    keys_ptr, peaks_ptr, sums_ptr, scratch_ptr, out_logprobs, out_tokens, out_keys, out_peaks, out_sums, parts,
    K: tl.constexpr, FINAL: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, PLACES: tl.constexpr,
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
    cost, id = (key >> 32).to(tl.int32), (key & 0x7FFFFFFF).to(tl.int32)
    count = tl.minimum(tl.sum((key != NO_KEY).to(tl.int32), 0), K)
    chosen = choose(cost, id, count)
    place = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(scratch_ptr + row * PLACES + place, key, mask=chosen)
    tl.debug_barrier()  # what other threads stored is read back
    j = tl.arange(0, PLACES)
    key = tl.load(scratch_ptr + row * PLACES + j, mask=j < count, other=0)
    key = tl.where(j < count, key, NO_KEY)
    if FINAL:
        place = tl.sum((key[None, :] < key[:, None]).to(tl.int32), 1)
        bits = (key >> 32).to(tl.int32) ^ -1
        x = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        logprob = (x - base) - tl.log(total)
        logprob = tl.where(logprob == logprob, tl.minimum(logprob, 0.0), float("-inf"))
        tl.store(out_logprobs + row * K + place, logprob, mask=j < count)
        tl.store(out_tokens + row * K + place, (key & 0x7FFFFFFF).to(tl.int32), mask=j < count)
    else:
        tl.store(out_keys + row * K + j, key, mask=j < K)
        tl.store(out_peaks + row, peak)
        tl.store(out_sums + row, total)


def shard_top(logits: torch.Tensor, k: int, first: int = 0) -> Partial:
    """What this rank's columns, ids from `first` on, give to the best `k` of each row: one part.

    logits [R, V] -> keys [R, 1, k], peaks and sums [R, 1]. `k` may exceed V: keys are NO_KEY then.
    """
    chunks = _chunks(logits, k, first)
    return chunks if chunks.keys.shape[1] == 1 else _merged(chunks, None)


def merge_top(parts: Partial, shape: tuple[int, int], vocabulary: int) -> TopLogprobs:
    """The whole vocabulary's best from all ranks' parts: keys [R, W, K], peaks and sums [R, W], R = S * L = `shape`."""
    rows, _, k = parts.keys.shape
    best = min(k, vocabulary)
    device = parts.keys.device
    out = TopLogprobs(
        torch.empty((*shape, best), dtype=torch.float32, device=device),
        torch.empty((*shape, best), dtype=torch.int32, device=device),
    )
    if best < k:
        raise ValueError(f"k is {k}, at most the vocabulary's {vocabulary} is possible")
    if rows:
        _merged(parts, out)
    return out


def topk_logprobs(logits: torch.Tensor, k: int) -> TopLogprobs:
    """The min(k, V) best of each row, k <= 64, in two launches without a host sync. logits [S, L, V], all columns."""
    expect("logits", logits, FLOATS, (None, None, None))
    sequences, depth, vocabulary = logits.shape
    k = min(k, vocabulary)
    return merge_top(_chunks(logits.view(-1, vocabulary), k, 0), (sequences, depth), vocabulary)


def _chunks(logits: torch.Tensor, k: int, first: int) -> Partial:
    expect("logits", logits, FLOATS, (None, None))
    at_most("k", k, MOST_BEST)
    rows, columns = logits.shape
    chunk = 2048 if columns <= 32768 else 8192
    parts, device = -(-columns // chunk), logits.device
    keys = torch.empty((rows, parts, k), dtype=torch.int64, device=device)
    peaks = torch.empty((rows, parts), dtype=torch.float32, device=device)
    sums = torch.empty((rows, parts), dtype=torch.float32, device=device)
    if rows:
        warps = chunk // 512
        _chunk[(parts, rows)](
            logits, keys, peaks, sums, columns, first, parts, K=k, CHUNK=chunk, num_warps=warps
        )  # fmt: skip
    return Partial(keys, peaks, sums)


def _merged(parts: Partial, out: TopLogprobs | None) -> Partial:
    """Writes `out`, or without one returns the parts as one."""
    rows, count, k = parts.keys.shape
    expect("keys", parts.keys, torch.int64, (rows, count, k))
    expect("peaks", parts.peaks, torch.float32, (rows, count))
    expect("sums", parts.sums, torch.float32, (rows, count))
    at_most("parts * k", count * k, MOST_KEYS)
    places, block = max(16, triton.next_power_of_2(k)), max(128, triton.next_power_of_2(count * k))
    device = parts.keys.device
    scratch = torch.empty((rows, places), dtype=torch.int64, device=device)
    one = Partial(*(torch.empty((rows, 1, *t.shape[2:]), dtype=t.dtype, device=device) for t in parts))
    logprobs, tokens = (one.peaks, scratch) if out is None else out
    _rank[(rows,)](
        *parts, scratch, logprobs, tokens, *one, count,
        K=k, FINAL=out is not None, PARTS=triton.next_power_of_2(count), BLOCK=block, PLACES=places,
        num_warps=min(max(block // 256, 4), 16),
    )  # fmt: skip
    return one
