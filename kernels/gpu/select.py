"""Selection inside one program, by counting alone: nothing rounds, and no order matters. Parts of other kernels.

    threshold(cost, want)          the least t with #(cost <= t) >= want, bit by bit, a pass over registers each
    few_threshold(cost, want)      the same of at most 128 costs, in one go: each is compared with each
    gather_row(row, want)          of a row in memory the `want` largest, and a few more, as keys in no order
    sort_few(keys)                 these, in order

A row is read in tiles, and what falls to one of 128 lanes leaves its largest there. At least `want` elements are no
less than the want-th largest of these, and few more are, for lanes seldom hold two: they are the candidates. Where they
do not fit, because of ties or of an unlucky order, the border is sought by bisection over the whole row.
"""

from __future__ import annotations

import triton
import triton.language as tl

NEVER = tl.constexpr(0x7FFFFFFF)  # the cost of what must not be chosen: above every number's
NO_KEY = tl.constexpr(0x7FFFFFFF00000000)  # behind every key
UNROLL = tl.constexpr(5)  # tiles that are loaded together


@triton.jit
def ordered(x):
    """float32 -> int32 in the same order. -0 and 0 are equal; NaN with a clear sign bit is above all."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def disordered(key):
    """The float32 of an `ordered` key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def threshold(cost, want):
    """cost [n] int32, want <= n -> (t, how many are <= t). 0 wanted: any t, of no meaning."""
    low = tl.min(cost, 0).to(tl.int64) - 1  # count(low) < want <= count(high)
    high = tl.max(cost, 0).to(tl.int64)
    count = cost.shape[0]
    while high - low > 1:
        middle = (low + high) >> 1
        below = tl.sum((cost <= middle.to(tl.int32)).to(tl.int32), 0)
        enough = below >= want
        count = tl.where(enough, below, count)
        high = tl.where(enough, middle, high)
        low = tl.where(enough & (below > want), low, tl.where(enough, high - 1, middle))
    return high.to(tl.int32), count


@triton.jit
def few_threshold(cost, want):
    """As `threshold`, without the count. 0 wanted: the least number."""
    less = tl.sum((cost[None, :] < cost[:, None]).to(tl.int32), 1)
    return tl.max(tl.where(less < want, cost, -0x80000000), 0)


@triton.jit
def cut(cost, ids, t, count, want):
    """The greatest id that is chosen among those of cost t, where `count` are <= t and only `want` may be."""
    low = tl.where(count > want, -1, 0x7FFFFFFE).to(tl.int64)  # no tie: no step
    high = tl.full([], 0x7FFFFFFF, tl.int64)
    sure = tl.sum((cost < t).to(tl.int32), 0)
    while high - low > 1:
        middle = (low + high) >> 1
        chosen = sure + tl.sum(((cost == t) & (ids <= middle.to(tl.int32))).to(tl.int32), 0)
        enough = chosen >= want
        high = tl.where(enough, middle, high)
        low = tl.where(enough & (chosen > want), low, tl.where(enough, high - 1, middle))
    return high.to(tl.int32)


@triton.jit
def choose(cost, ids, want):
    """[n] bool, `want` times true: the least by (cost, id). ids distinct, not negative."""
    t, count = threshold(cost, want)
    last = cut(cost, ids, t, count, want)
    return ((cost < t) | ((cost == t) & (ids <= last))) & (want > 0)


@triton.jit
def tile_of(row_ptr, i, vocabulary, TILE: tl.constexpr):
    """ids and float32 values of a row's tile; -inf past its end, and for NaN."""
    id = i * TILE + tl.arange(0, TILE)
    x = tl.load(row_ptr + id, mask=id < vocabulary, other=float("-inf")).to(tl.float32)
    return id, tl.where(x == x, x, float("-inf"))


@triton.jit
def _count(row_ptr, least, last, vocabulary, TILES: tl.constexpr, TILE: tl.constexpr):
    """How many are above `least`, or equal to it with an id of at most `last`."""
    count = tl.zeros([TILE], tl.int32)
    for i in tl.range(TILES, loop_unroll_factor=UNROLL):
        id, x = tile_of(row_ptr, i, vocabulary, TILE)
        count += ((id < vocabulary) & ((x > least) | ((x == least) & (id <= last)))).to(tl.int32)
    return tl.sum(count, 0)


@triton.jit
def border_of(row_ptr, want, vocabulary, TILES: tl.constexpr, TILE: tl.constexpr):
    """(value, id) of the last of a row's `want` first by (-value, id); want <= vocabulary."""
    low, high = tl.full([], -0x7F800001, tl.int64), tl.full([], 0x7F800001, tl.int64)  # enough at -inf, none above inf
    count = vocabulary
    while (high - low > 1) & (count > want):
        middle = (low + high) >> 1
        n = _count(row_ptr, disordered(middle.to(tl.int32)), 0x7FFFFFFF, vocabulary, TILES, TILE)
        low = tl.where(n >= want, middle, low)
        high = tl.where(n >= want, high, middle)
        count = tl.where(n >= want, n, count)
    value = disordered(low.to(tl.int32))
    high_id = tl.full([], 0x7FFFFFFF, tl.int64)
    low_id = tl.where(count > want, -1, high_id - 1)  # equal values: by id
    while high_id - low_id > 1:
        middle = (low_id + high_id) >> 1
        enough = _count(row_ptr, value, middle.to(tl.int32), vocabulary, TILES, TILE) >= want
        high_id = tl.where(enough, middle, high_id)
        low_id = tl.where(enough, low_id, middle)
    return value, high_id.to(tl.int32)


@triton.jit
def gather_row(
    row_ptr, best, want, base, scratch_ptr, vocabulary,
    SUMS: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr, LANES: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """Keys (cost above, id below) of the row's `want` first and perhaps more, PLACES at most, to scratch; their number.

    best [TILE]: the largest of each place of the tiles, from a pass over the row. want <= vocabulary, and <= LANES / 2.
    With SUMS also the sum of exp(x - base), to which NaN counts.
    """
    lanes = tl.max(tl.reshape(best, (TILE // LANES, LANES)), 0)
    least = disordered(few_threshold(ordered(lanes) ^ -1, want) ^ -1)
    last = 0x7FFFFFFF
    held = tl.zeros([TILE], tl.int32)
    sums = tl.zeros([TILE], tl.float32)
    for i in tl.range(TILES, loop_unroll_factor=UNROLL):
        id = i * TILE + tl.arange(0, TILE)
        x = tl.load(row_ptr + id, mask=id < vocabulary, other=float("-inf")).to(tl.float32)
        if SUMS:
            sums += tl.exp(x - base)
        x = tl.where(x == x, x, float("-inf"))
        held += ((x >= least) & (id < vocabulary)).to(tl.int32)
    total = tl.sum(held, 0)
    if total > PLACES:
        least, last = border_of(row_ptr, want, vocabulary, TILES, TILE)
        held = tl.zeros([TILE], tl.int32)
        for i in tl.range(TILES):
            id, x = tile_of(row_ptr, i, vocabulary, TILE)
            held += ((id < vocabulary) & ((x > least) | ((x == least) & (id <= last)))).to(tl.int32)
        total = tl.minimum(want, vocabulary)
    _collect(row_ptr, held, least, last, scratch_ptr, vocabulary, TILES, TILE, PLACES)
    return total, tl.sum(sums, 0)


@triton.jit
def _collect(
    row_ptr, held, least, last, scratch_ptr, vocabulary,
    TILES: tl.constexpr, TILE: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """Keys of what is not behind (least, last), to scratch. held [TILE]: how many each place of the tiles has of them.

    First the places that have any, PLACES at most, and where their keys begin; then only these are read again.
    """
    both = held + ((held > 0).to(tl.int32) << 16)
    before = tl.cumsum(both, 0) - both
    entry = (before << 16) | tl.arange(0, TILE)  # TILE is below 2^16
    tl.store(scratch_ptr + (before >> 16), entry.to(tl.int64), mask=(held > 0) & ((before >> 16) < PLACES))
    tl.debug_barrier()  # what other threads stored is read back
    n = tl.arange(0, PLACES)
    listed = n < (tl.sum(both, 0) >> 16)
    entry = tl.load(scratch_ptr + n, mask=listed, other=0).to(tl.int32)
    tl.debug_barrier()  # all is read before it is written over
    t = tl.arange(0, triton.next_power_of_2(TILES))
    id = t[None, :] * TILE + (entry & 0xFFFF)[:, None]
    inside = listed[:, None] & (t < TILES)[None, :] & (id < vocabulary)
    x = tl.load(row_ptr + id, mask=inside, other=float("-inf")).to(tl.float32)
    x = tl.where(x == x, x, float("-inf"))
    here = inside & ((x > least) | ((x == least) & (id <= last)))
    at = (entry >> 16)[:, None] + tl.cumsum(here.to(tl.int32), 1) - here.to(tl.int32)
    key = ((ordered(x) ^ -1).to(tl.int64) << 32) | id
    tl.store(scratch_ptr + at, key, mask=here & (at < PLACES))


@triton.jit
def sort_few(keys_ptr, found, PLACES: tl.constexpr):
    """The `found` distinct keys that this program stored, and each one's place in order; behind them NO_KEY."""
    tl.debug_barrier()  # what other threads stored is read back
    j = tl.arange(0, PLACES)
    key = tl.load(keys_ptr + j, mask=j < found, other=0)
    key = tl.where(j < found, key, NO_KEY + j.to(tl.int64))
    return key, tl.sum((key[:, None] < key[None, :]).to(tl.int32), 0)
