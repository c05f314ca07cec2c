"""Draws one token a row on the GPU: the law of kernels/sample.py, rounded the GPU's way, without a host sync.

    drawn[r] = argmin over the kept v of E[v] / w[v]        at temperature 0 the largest logit, lowest id on ties

w[v] = 2^((x[v] - max x) log2(e) / T), E = -log1p(-u), u of word v % 4 of Philox4x32-10 at (v // 4, position, sample
index, 0) under the seed: the noise of kernels/sample.py, word for word. Filters in its order: top-k, top-p of what that
left, min-p; equal logits are kept in the order of their ids. A row at depth d draws for position[s] + d.

The law is the GPU's own. It is exact in itself: one program draws one row, in tiles that follow from the vocabulary's
size alone, so a row's token depends on its logits and its law, bit for bit, and on no other row, tree or batch. Against
the CPU's forms the last bits of exponentials, logarithms and sums differ, so a token may where two candidates are that
near to each other: another fingerprint.

A top-k of at most 64 leaves few candidates, and everything else is done on these, sorted, in registers. Otherwise a
filter's border is found by bisection over the logits' bits, one pass over the row a step, out of the nearest cache.
All columns must be here: of a vocabulary split among ranks, gather a row's logits on one of them first.

logits [R, V], depth [R] int32, row_start [S + 1] int32: rows of sequence s are row_start[s] .. row_start[s + 1] - 1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.gpu.checks import FLOATS, expect
from kernels.gpu.follow import follow, followed
from kernels.gpu.select import UNROLL, border_of, disordered, gather_row, ordered, sort_few, tile_of
from kernels.sample import Law
from kernels.sample import sample as sample_reference

TEST_SHAPES = [(1, 1, 7), (2, 3, 509), (3, 2, 64), (1, 2, 4500)]  # (S, most rows of one sequence, V)
BENCH_SHAPES = [(8, 16, 20480), (1, 8, 20480), (1, 16, 163840), (8, 16, 4096)]
TILE = 4096  # logits that a program takes at a time
PLACES = 128  # for the candidates of a row; a top-k of half of them is drawn from these alone
NO_ID = tl.constexpr(0x7FFFFFFF)  # every id is less
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
def _top(row_ptr, vocabulary, TILES: tl.constexpr, TILE: tl.constexpr):
    """Each lane's largest logit, the largest of all, its lowest id, and whether any is no number."""
    best = tl.full([TILE], float("-inf"), tl.float32)
    at = tl.arange(0, TILE)
    bad = tl.zeros([TILE], tl.int32)
    for i in tl.range(TILES, loop_unroll_factor=UNROLL):
        id = i * TILE + tl.arange(0, TILE)
        x = tl.load(row_ptr + id, mask=id < vocabulary, other=float("-inf")).to(tl.float32)
        at = tl.where(x > best, id, at)
        best = tl.where(x > best, x, best)
        bad |= (x != x).to(tl.int32)
    top = tl.max((ordered(best).to(tl.int64) << 32) | (0x7FFFFFFF - at), 0)
    id = 0x7FFFFFFF - (top & 0x7FFFFFFF).to(tl.int32)
    return best, disordered((top >> 32).to(tl.int32)), id, tl.max(bad, 0)


@triton.jit
def _mass(row_ptr, least, last, peak, scale, vocabulary, TILES: tl.constexpr, TILE: tl.constexpr):
    """What the logits weigh that are above `least`, or equal with an id of at most `last`; and how many they are."""
    mass = tl.zeros([TILE], tl.float32)
    count = tl.zeros([TILE], tl.int32)
    for i in tl.range(TILES, loop_unroll_factor=UNROLL):
        id, x = tile_of(row_ptr, i, vocabulary, TILE)
        kept = ((x > least) | ((x == least) & (id <= last))) & (id < vocabulary)
        mass += tl.where(kept, tl.exp2((x - peak) * scale), 0.0)
        count += kept.to(tl.int32)
    return tl.sum(mass, 0), tl.sum(count, 0)


@triton.jit
def _nucleus(row_ptr, top_p, least, last, peak, scale, vocabulary, TILES: tl.constexpr, TILE: tl.constexpr):
    """(value, id) of the last of the first logits that weigh top_p of those up to (least, last).

    Monotone in spite of rounding: a logit more adds a weight that is not negative, in the same place of the same sum.
    """
    whole, count = _mass(row_ptr, least, last, peak, scale, vocabulary, TILES, TILE)
    want = top_p * whole
    low = ordered(least).to(tl.int64)  # enough
    high = ordered(peak).to(tl.int64) + 1  # not enough
    above = 0  # as many are not below `high`
    while (high - low > 1) & (count - above > 1):
        middle = (low + high) >> 1
        mass, n = _mass(row_ptr, disordered(middle.to(tl.int32)), NO_ID, peak, scale, vocabulary, TILES, TILE)
        enough = mass >= want
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
        above = tl.where(enough, above, n)
        count = tl.where(enough, n, count)
    border = disordered(low.to(tl.int32))
    high_id = tl.where(border == least, tl.minimum(last, vocabulary - 1), vocabulary - 1)
    low_id = tl.where(count - above > 1, -1, high_id - 1)  # equal logits: by id
    while high_id - low_id > 1:
        middle_id = (low_id + high_id) >> 1
        mass, _ = _mass(row_ptr, border, middle_id, peak, scale, vocabulary, TILES, TILE)
        enough = mass >= want
        high_id = tl.where(enough, middle_id, high_id)
        low_id = tl.where(enough, low_id, middle_id)
    return border, high_id


@triton.jit
def _few(
    row_ptr, best, top_k, top_p, min_p, peak, scale, seed, position, sample, scratch_ptr, vocabulary,
    TILES: tl.constexpr, TILE: tl.constexpr, LANES: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """The draw where top-k keeps few: the candidates in order, and all filters on them."""
    found, _ = gather_row(row_ptr, best, top_k, 0.0, scratch_ptr, vocabulary, False, TILES, TILE, LANES, PLACES)
    key, place = sort_few(scratch_ptr, found, PLACES)
    tl.debug_barrier()  # all is read before it is written
    tl.store(scratch_ptr + place, key)
    tl.debug_barrier()
    j = tl.arange(0, PLACES)
    key = tl.load(scratch_ptr + j)
    id = (key & 0x7FFFFFFF).to(tl.int32)
    x = disordered((key >> 32).to(tl.int32) ^ -1)
    w = tl.where(j < top_k, tl.exp2((x - peak) * scale), 0.0)
    before = tl.cumsum(w, 0) - w
    kept = (j < top_k) & (w >= min_p) & (w > 0)
    if top_p < 1:
        kept &= (before < top_p * tl.sum(w, 0)) | (j == 0)
    w0, w1, w2, w3 = tl.philox(seed, (id >> 2).to(tl.uint32), position, sample, 0)
    word = tl.where((id & 2) == 0, tl.where((id & 1) == 0, w0, w1), tl.where((id & 1) == 0, w2, w3))
    ratio = tl.where(kept, _exponential(word) / w, float("inf"))
    winner = tl.min((ratio.to(tl.int32, bitcast=True).to(tl.int64) << 32) | id, 0)
    return (winner & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _race(
    row_ptr, least, last, min_p, peak, scale, seed, position, sample, vocabulary,
    TILES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The kept id whose noise over weight is least; the lowest of equal ones."""
    block = tl.arange(0, TILE // 4)
    best = tl.full([TILE // 4, 4], float("inf"), tl.float32)
    at = tl.full([TILE // 4, 4], 0x7FFFFFFF, tl.int32)
    for i in tl.range(TILES):
        group = i * (TILE // 4) + block
        w0, w1, w2, w3 = tl.philox(seed, group.to(tl.uint32), position, sample, 0)
        word = tl.reshape(tl.permute(tl.join(tl.join(w0, w1), tl.join(w2, w3)), (0, 2, 1)), (TILE // 4, 4))
        id = group[:, None] * 4 + tl.arange(0, 4)[None, :]
        x = tl.load(row_ptr + id, mask=id < vocabulary, other=float("-inf")).to(tl.float32)
        w = tl.exp2((x - peak) * scale)
        kept = ((x > least) | ((x == least) & (id <= last))) & (w >= min_p) & (w > 0) & (id < vocabulary)
        ratio = tl.where(kept, _exponential(word) / w, float("inf"))
        at = tl.where(ratio < best, id, at)
        best = tl.minimum(ratio, best)
    winner = tl.min(tl.min((best.to(tl.int32, bitcast=True).to(tl.int64) << 32) | at, 1), 0)
    return (winner & 0x7FFFFFFF).to(tl.int32)


@triton.jit(do_not_specialize=["sequences"])
def _draw(
    logits_ptr, depth_ptr, row_start_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, sample_ptr,
    position_ptr, drawn_ptr, scratch_ptr, vocabulary, sequences,
    SEQUENCES: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr, LANES: tl.constexpr, PLACES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    follow(PDL)  # the walk may be launched: it waits before it reads what is drawn
    r = tl.program_id(0)
    ends = tl.arange(0, SEQUENCES)
    end = tl.load(row_start_ptr + 1 + ends, mask=ends < sequences, other=0x7FFFFFFF)
    s = tl.sum((end <= r).to(tl.int32), 0)  # the sequences that end before this row
    token = -1
    if s < sequences:
        row_ptr = logits_ptr + r.to(tl.int64) * vocabulary
        best, peak, token, bad = _top(row_ptr, vocabulary, TILES, TILE)
        good = (bad == 0) & (tl.abs(peak) < float("inf"))
        token = tl.where(good, token, -1)
        temperature = tl.load(temperature_ptr + s)
        if good & (temperature > 0):
            scale = 1.4426950408889634 / tl.maximum(temperature, 1e-30)
            top_k, top_p, min_p = tl.load(top_k_ptr + s), tl.load(top_p_ptr + s), tl.load(min_p_ptr + s)
            position = (tl.load(position_ptr + s) + tl.load(depth_ptr + r)).to(tl.uint32, bitcast=True)
            sample, seed = tl.load(sample_ptr + s).to(tl.uint32, bitcast=True), tl.load(seed_ptr + s)
            limited = (top_k > 0) & (top_k < vocabulary)
            if limited & (top_k <= PLACES // 2):
                token = _few(
                    row_ptr, best, top_k, top_p, min_p, peak, scale, seed, position, sample,
                    scratch_ptr + r.to(tl.int64) * PLACES, vocabulary, TILES, TILE, LANES, PLACES,
                )  # fmt: skip
            else:
                least, last = float("-inf"), vocabulary - 1
                if limited:
                    least, last = border_of(row_ptr, top_k, vocabulary, TILES, TILE)
                if top_p < 1:
                    least, last = _nucleus(row_ptr, top_p, least, last, peak, scale, vocabulary, TILES, TILE)
                token = _race(
                    row_ptr, least, last, min_p, peak, scale, seed, position, sample, vocabulary, TILES, TILE
                )  # fmt: skip
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
        places = min(tile, PLACES)
        scratch = torch.empty((rows, places), dtype=torch.int64, device=logits.device)
        _draw[(rows,)](
            logits, depth, row_start, *laws, drawn, scratch, vocabulary, sequences,
            SEQUENCES=triton.next_power_of_2(max(sequences, 1)), TILES=-(-vocabulary // tile), TILE=tile,
            LANES=min(tile, 128), PLACES=places, num_warps=max(tile // 256, 1), **followed(),
        )  # fmt: skip
    return drawn
