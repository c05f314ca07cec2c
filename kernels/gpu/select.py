"""Selection inside one program: the `want` least of a tile of distinct keys, by bisection. Parts of other kernels.

    threshold(cost, want)    the least t with #(cost <= t) >= want

Counting is all that it does, so nothing rounds and no order matters. A step of the bisection is one pass over registers
and one sum; it ends as soon as a count is exact, after a dozen steps on real data, and after 32 at most.
"""

from __future__ import annotations

import triton
import triton.language as tl

NEVER = tl.constexpr(0x7FFFFFFF)  # the cost of what must not be chosen: above every number's


@triton.jit
def ordered(x):
    """float32 -> int32 in the same order. -0 and 0 are equal; NaN with a clear sign bit is above all."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


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
