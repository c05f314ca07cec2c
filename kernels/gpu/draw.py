"""Draws one token a row on the GPU: the law of kernels/sample.py, rounded the GPU's way, without a host sync.

    drawn[r] = argmin over the kept v of E[v] / w[v]        at temperature 0 the largest logit, lowest id on ties

w[v] = 2^((x[v] - max x) log2(e) / T), E = -log1p(-u), u of word v % 4 of Philox4x32-10 at (v // 4, position, sample
index, 0) under the seed: the noise of kernels/sample.py, word for word. Filters in its order: top-k, top-p of what that
left, min-p; equal logits are kept in the order of their ids. A row at depth d draws for position[s] + d.

The law is the GPU's own. It is exact in itself: one program draws one row, in tiles that follow from the vocabulary's
size alone, so a row's token depends on its logits and its law, bit for bit, and on no other row, tree or batch. Against
the CPU's forms the last bits of exponentials, logarithms and sums differ, so a token may where two candidates are that
near to each other: another fingerprint.

A filter's border is found by bisection over the logits' bits, one pass over the row a step, out of the nearest cache.
All columns must be here: of a vocabulary split among ranks, gather a row's logits on one of them first.

logits [R, V], depth [R] int32, row_start [S + 1] int32: rows of sequence s are row_start[s] .. row_start[s + 1] - 1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.gpu.checks import FLOATS, expect
from kernels.gpu.select import ordered
from kernels.sample import Law
from kernels.sample import sample as sample_reference

TEST_SHAPES = [(1, 1, 7), (2, 3, 509), (3, 2, 64), (1, 2, 4500)]  # (S, most rows of one sequence, V)
BENCH_SHAPES = [(8, 16, 20480), (1, 8, 20480), (1, 16, 163840), (8, 16, 4096)]
TILE = 4096  # logits that a program takes at a time
UNROLL = tl.constexpr(5)  # tiles that are loaded together
FRACTIONS = ("temperature", "top_p", "min_p")
NO_TOKEN = -1  # of padding, and of a row without a largest finite logit or with a NaN


class Laws(NamedTuple):
    """How each sequence's rows are drawn; as kernels.sample.Law, all on the device."""

    temperature: torch.Tensor  # [S] float32
    top_k: torch.Tensor  # [S] int32, 0: off
    top_p: torch.Tensor  # [S] float32, 1: off
    min_p: torch.Tensor  # [S] float32, 0: off
    seed: torch.Tensor  # [S] int64, the bits of an unsigned number
    sample_index: torch.Tensor  # [S] int32, the bits of an unsigned number
    position: torch.Tensor  # [S] int32, of the token that the anchor's row draws

    @classmethod
    def of(cls, laws: list[Law], device: torch.device | str) -> Laws:
        """From the host's form, in one go."""
        columns = list(zip(*laws, strict=True)) if laws else [()] * 7
        kinds = {0: torch.float32, 1: torch.int32, 2: torch.float32, 3: torch.float32, 4: torch.int64}
        wrapped = [columns[0], [min(k, 1 << 30) for k in columns[1]], columns[2], columns[3]]
        wrapped += [[n - (n >> 63 << 64) for n in columns[4]]]
        wrapped += [[n - (n >> 31 << 32) for n in column] for column in columns[5:]]
        return cls(*(torch.tensor(c, dtype=kinds.get(i, torch.int32)).to(device) for i, c in enumerate(wrapped)))


def reference(logits: torch.Tensor, depth: torch.Tensor, row_start: torch.Tensor, laws: list[Law]) -> torch.Tensor:
    """The same by the CPU's op. ValueError as there."""
    of = torch.searchsorted(row_start[1:].contiguous(), torch.arange(len(logits), dtype=torch.int32), right=True)
    rows = [laws[s]._replace(position=laws[s].position + d) for s, d in zip(of.tolist(), depth.tolist(), strict=True)]
    return sample_reference.reference(logits.float(), rows).int()


@triton.jit
def _exponential(word):
    """-log1p(-u) of uint32 words. log(m 2^k) = k ln 2 + 2 s (1 + s^2 / 3 + ..), s = f / (2 + f), f = m - 1."""
    u = tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    bits = (1.0 - u).to(tl.int32, bitcast=True)
    near = u < 0.25  # there 1 - u would lose what u holds
    k = tl.where(near, 0, (bits - 0x3F400000) >> 23)
    f = tl.where(near, 0.0 - u, (bits - (k << 23)).to(tl.float32, bitcast=True) - 1.0)
    s = f / (2.0 + f)
    z = s * s
    series = 1.0 + z * (0.33333334 + z * (0.2 + z * (0.14285715 + z * (0.11111111 + z * 0.09090909))))
    return 0.0 - (k.to(tl.float32) * 0.6931472 + 2.0 * s * series)


@triton.jit
def _tile(row_ptr, i, vocabulary, TILE: tl.constexpr):
    id = i * TILE + tl.arange(0, TILE)
    return id, tl.load(row_ptr + id, mask=id < vocabulary, other=float("-inf")).to(tl.float32)


@triton.jit
def _top(row_ptr, vocabulary, TILES: tl.constexpr, TILE: tl.constexpr):
    """The largest logit, its lowest id, the least key, and whether all are numbers."""
    best = tl.full([TILE], -0x80000000, tl.int32)
    least = tl.full([TILE], 0x7FFFFFFF, tl.int32)
    at = tl.zeros([TILE], tl.int32)
    bad = tl.zeros([TILE], tl.int32)
    for i in tl.range(TILES, loop_unroll_factor=UNROLL):
        id, x = _tile(row_ptr, i, vocabulary, TILE)
        key = ordered(x)
        at = tl.where(key > best, id, at)
        best = tl.maximum(key, best)
        least = tl.minimum(key, least)
        bad |= (x != x).to(tl.int32)
    top = tl.max((best.to(tl.int64) << 32) | (0x7FFFFFFF - at), 0)
    key = (top >> 32).to(tl.int32)
    id = 0x7FFFFFFF - (top & 0x7FFFFFFF).to(tl.int32)
    peak = (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return peak, key, id, tl.min(least, 0), tl.max(bad, 0)


@triton.jit
def _measure(row_ptr, t, last, peak, scale, vocabulary, TILES: tl.constexpr, TILE: tl.constexpr):
    """What the logits weigh that come no later than (key t, id last), and how many they are."""
    mass = tl.zeros([TILE], tl.float32)
    count = tl.zeros([TILE], tl.int32)
    for i in tl.range(TILES, loop_unroll_factor=UNROLL):
        id, x = _tile(row_ptr, i, vocabulary, TILE)
        key = ordered(x)
        kept = ((key > t) | ((key == t) & (id <= last))) & (id < vocabulary)
        mass += tl.where(kept, tl.exp2((x - peak) * scale), 0.0)
        count += kept.to(tl.int32)
    return tl.sum(mass, 0), tl.sum(count, 0)


@triton.jit
def _limit(
    row_ptr, want, most, t, last, count, peak, peak_key, scale, vocabulary, TILES: tl.constexpr, TILE: tl.constexpr
):
    """The first logits that weigh `want` together, or the first `most` of them, as (key, id) of the last.

    Of the `count` that come no later than (t, last), which are enough. Monotone in spite of rounding: a logit more adds
    a weight that is not negative in the same place of the same sum.
    """
    low = t.to(tl.int64)  # enough
    high = peak_key.to(tl.int64) + 1  # not enough
    above = 0  # as many keys are not below `high`
    while (high - low > 1) & (count - above > 1) & (count > most):
        middle = ((low + high) >> 1).to(tl.int32)
        mass, n = _measure(row_ptr, middle, 0x7FFFFFFF, peak, scale, vocabulary, TILES, TILE)
        enough = (mass >= want) & (n >= most)
        low = tl.where(enough, middle.to(tl.int64), low)
        high = tl.where(enough, high, middle.to(tl.int64))
        above = tl.where(enough, above, n)
        count = tl.where(enough, n, count)
    border = low.to(tl.int32)
    high_id = tl.where(border == t, last, vocabulary - 1)
    low_id = tl.where((count - above > 1) & (count > most), -1, high_id - 1)  # equal logits: by id
    while high_id - low_id > 1:
        middle_id = (low_id + high_id) >> 1
        mass, n = _measure(row_ptr, border, middle_id, peak, scale, vocabulary, TILES, TILE)
        enough = (mass >= want) & (n >= most)
        high_id = tl.where(enough, middle_id, high_id)
        low_id = tl.where(enough, low_id, middle_id)
    return border, high_id


@triton.jit
def _race(
    row_ptr, t, last, min_p, peak, scale, seed, position, sample, vocabulary, TILES: tl.constexpr, TILE: tl.constexpr
):
    """The kept id whose noise over weight is least; the lowest of equal ones."""
    block = tl.arange(0, TILE // 4)
    best = tl.full([TILE // 4, 4], float("inf"), tl.float32)
    at = tl.full([TILE // 4, 4], 0x7FFFFFFF, tl.int32)
    for i in tl.range(TILES):  # long enough as it is
        group = i * (TILE // 4) + block
        w0, w1, w2, w3 = tl.philox(seed, group.to(tl.uint32), position, sample, 0)
        word = tl.reshape(tl.permute(tl.join(tl.join(w0, w1), tl.join(w2, w3)), (0, 2, 1)), (TILE // 4, 4))
        id = group[:, None] * 4 + tl.arange(0, 4)[None, :]
        x = tl.load(row_ptr + id, mask=id < vocabulary, other=float("-inf")).to(tl.float32)
        key = ordered(x)
        w = tl.exp2((x - peak) * scale)
        kept = ((key > t) | ((key == t) & (id <= last))) & (w >= min_p) & (w > 0) & (id < vocabulary)
        ratio = tl.where(kept, _exponential(word) / w, float("inf"))
        at = tl.where(ratio < best, id, at)
        best = tl.minimum(ratio, best)
    winner = tl.min(tl.min((best.to(tl.int32, bitcast=True).to(tl.int64) << 32) | at, 1), 0)
    return (winner & 0x7FFFFFFF).to(tl.int32)


@triton.jit(do_not_specialize=["sequences"])
def _draw(
    logits_ptr, depth_ptr, row_start_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, sample_ptr,
    position_ptr, drawn_ptr, vocabulary, sequences, SEQUENCES: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0)
    ends = tl.arange(0, SEQUENCES)
    end = tl.load(row_start_ptr + 1 + ends, mask=ends < sequences, other=0x7FFFFFFF)
    s = tl.sum((end <= r).to(tl.int32), 0)  # the sequences that end before this row
    token = -1
    if s < sequences:
        row_ptr = logits_ptr + r.to(tl.int64) * vocabulary
        peak, peak_key, token, least, bad = _top(row_ptr, vocabulary, TILES, TILE)
        good = (bad == 0) & (tl.abs(peak) < float("inf"))
        token = tl.where(good, token, -1)
        temperature = tl.load(temperature_ptr + s)
        if good & (temperature > 0):
            scale = 1.4426950408889634 / tl.maximum(temperature, 1e-30)
            top_k, top_p, min_p = tl.load(top_k_ptr + s), tl.load(top_p_ptr + s), tl.load(min_p_ptr + s)
            t, last = least, vocabulary - 1
            if (top_k > 0) & (top_k < vocabulary):
                t, last = _limit(
                    row_ptr, 0.0, top_k, t, last, vocabulary, peak, peak_key, scale, vocabulary, TILES, TILE
                )  # fmt: skip
            if top_p < 1:
                mass, count = _measure(row_ptr, t, last, peak, scale, vocabulary, TILES, TILE)
                t, last = _limit(
                    row_ptr, top_p * mass, 1, t, last, count, peak, peak_key, scale, vocabulary, TILES, TILE
                )  # fmt: skip
            position = (tl.load(position_ptr + s) + tl.load(depth_ptr + r)).to(tl.uint32, bitcast=True)
            sample = tl.load(sample_ptr + s).to(tl.uint32, bitcast=True)
            token = _race(
                row_ptr, t, last, min_p, peak, scale, tl.load(seed_ptr + s), position, sample, vocabulary, TILES, TILE
            )
    tl.store(drawn_ptr + r, token)


def draw(logits: torch.Tensor, laws: Laws, depth: torch.Tensor, row_start: torch.Tensor) -> torch.Tensor:
    """The token of each row, [R] int32, in one launch.

    NO_TOKEN for padding, the rows from row_start[S] on, and for rows that cannot be drawn: whoever reads it finds it.
    """
    expect("logits", logits, FLOATS, (None, None))
    rows, vocabulary = logits.shape
    expect("depth", depth, torch.int32, (rows,))
    expect("row_start", row_start, torch.int32, (None,))
    sequences = len(row_start) - 1
    for name, column in laws._asdict().items():
        kind = torch.int64 if name == "seed" else torch.float32 if name in FRACTIONS else torch.int32
        expect(f"laws.{name}", column, kind, (sequences,))
    drawn = torch.empty(rows, dtype=torch.int32, device=logits.device)
    if rows:
        tile = min(TILE, max(triton.next_power_of_2(vocabulary), 128))
        _draw[(rows,)](
            logits, depth, row_start, *laws, drawn, vocabulary, sequences,
            SEQUENCES=triton.next_power_of_2(max(sequences, 1)), TILES=-(-vocabulary // tile), TILE=tile,
            num_warps=max(tile // 256, 1),
        )  # fmt: skip
    return drawn
