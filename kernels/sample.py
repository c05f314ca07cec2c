"""Draws one token a row: greedy, or seeded and filtered, with noise that is a function of its key alone.

    x: a row's logits; T its temperature, 0: the largest logit, lowest id on ties
    w[v]   = exp((x[v] - max x) / T)                  weights
    order  = the ids by (-x, id); every filter keeps a beginning of it
      1. top-k: the first k
      2. top-p: the fewest whose weights reach top_p of those that top-k left
      3. min-p: those with w >= min_p                 (the first has w = 1)
    E[v]   = -log1p(-u[v]),  u[v] uniform in (0, 1)    exponential noise
    token  = argmin over the kept v of E[v] / w[v]     lowest id on ties

argmin E / w is argmax (log w + G) with Gumbel noise G = -log E: the Gumbel-max draw, one logarithm cheaper.
u[v] = (r + 1/2) / 2^32, and r is word v % 4 of Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1,
2, 3", SC 2011) at counter (v // 4, position, sample index, 0) under key (seed low, seed high). So the noise of a token
at a position is the same in any row, batch and tree.

logits [R, V] float32, one `Law` a row -> tokens [R] int64. A row's token depends on that row's logits and law only, bit
for bit: what rounds is computed element by element or within one row, never in a reduction over several rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kernels.dispatch import op

TEST_SHAPES = [(1, 1), (1, 7), (9, 509), (17, 4096), (64, 320)]  # (R, V)
BENCH_SHAPES = [(1, 4096), (9, 4096), (17, 4096), (64, 4096), (9, 163840)]

F32 = npt.NDArray[np.float32]
U64 = npt.NDArray[np.uint64]
Ids = npt.NDArray[np.int64]

Key = tuple[int, int, int]

ROUNDS = 10
MULTIPLIERS = np.array((0xD2511F53, 0xCD9E8D57), np.uint64)
WEYL = np.array([(i * 0x9E3779B9, i * 0xBB67AE85) for i in range(ROUNDS)], np.uint64)  # added to the key in round i
LOW, HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


class Law(NamedTuple):
    """How one row is drawn. `top_k` 0, `top_p` 1 and `min_p` 0 are off; at temperature 0 the rest is without effect."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int  # below 2^64
    sample_index: int  # below 2^32
    position: int  # of the token to be drawn, below 2^32

    def filters(self, vocabulary: int) -> bool:
        return 0 < self.top_k < vocabulary or self.top_p < 1 or self.min_p > 0

    @property
    def key(self) -> Key:
        """What the noise depends on: seed, and the counter's words 1 and 2."""
        return self.seed, self.position, self.sample_index


@op
def sample(logits: torch.Tensor, laws: Sequence[Law]) -> torch.Tensor:
    """The token of each row. ValueError with the row's number where a row has no largest finite logit, or a NaN.

    In numpy: its argmax takes a tenth of torch's time, its small integer operations a third, and no thread waits for
    another, which on a busy machine costs more than the draw.
    """
    x: F32 = logits.numpy()
    tokens: Ids = x.argmax(1)
    peaks = x[np.arange(len(laws)), tokens]
    if not np.isfinite(peaks).all():
        raise ValueError(f"row {int(np.isfinite(peaks).argmin())} has no largest finite logit")
    drawn = [row for row, law in enumerate(laws) if law.temperature > 0]
    if drawn:
        rows = x if len(drawn) == len(laws) else x[drawn]
        with np.errstate(divide="ignore", over="ignore", under="ignore"):
            tokens[drawn] = _race(rows, peaks[drawn], [laws[row] for row in drawn])
    return torch.from_numpy(tokens)


def _race(x: F32, peaks: F32, laws: list[Law]) -> list[int]:
    """Where E / w is least. A weight of zero gives infinity, which never is: the heaviest token has weight 1."""
    w = _weights(x, peaks, [law.temperature for law in laws])
    some = [row for row, law in enumerate(laws) if law.filters(x.shape[1])]
    whole = [row for row, law in enumerate(laws) if not law.filters(x.shape[1])]
    tokens = [0] * len(laws)
    noise = _shared_noise([laws[row] for row in whole], x.shape[1])
    for row in whole:
        tokens[row] = int((noise[laws[row].key] / w[row]).argmin())
    kept = [keep(x[row], w[row], laws[row]) for row in some]
    for row, ids, e in zip(some, kept, _own_noise([laws[row] for row in some], kept), strict=True):
        tokens[row] = int(ids[(e / w[row][ids]).argmin()])
    return tokens


def _weights(x: F32, peaks: F32, temperatures: list[float]) -> F32:
    """w [R, V]. A temperature that is zero in float32, or nearly, is taken as 1e-30: greedy but for ties."""
    w = x - peaks[:, None]
    w /= np.maximum(np.array(temperatures, np.float32), np.float32(1e-30))[:, None]
    np.exp(w, out=w)
    return w


def keep(x: F32, w: F32, law: Law) -> Ids:
    """The ids that the filters leave of one row, ascending; never none. x logits and w weights, [V]."""
    vocabulary = len(x)
    if 0 < law.top_k < vocabulary:
        least = np.partition(x, vocabulary - law.top_k)[vocabulary - law.top_k]
        order = _ordered(x, x >= least)[: law.top_k]
        if law.top_p < 1:
            mass = w[order].cumsum(dtype=np.float64)
            order = order[: int(mass.searchsorted(law.top_p * mass[-1])) + 1]
    elif law.top_p < 1:
        wanted = law.top_p * float(w.sum(dtype=np.float64))
        for share in SHARES:  # a peaked row needs only its heaviest tokens in order
            order = _ordered(x, w >= min(share * wanted, 1.0))
            mass = w[order].cumsum(dtype=np.float64)
            if mass[-1] >= wanted:
                break
        order = order[: int(mass.searchsorted(wanted)) + 1]
    else:
        order = _ordered(x, w >= law.min_p)
    if law.min_p > 0:
        order = order[w[order] >= law.min_p]
    order.sort()
    return order


SHARES = (2.0**-9, 2.0**-14, 0.0)


def _ordered(x: F32, candidates: npt.NDArray[np.bool_]) -> Ids:
    """The candidates' ids by (-x, id)."""
    ids: Ids = candidates.nonzero()[0]
    return ids[(-x[ids]).argsort(kind="stable")]


def _shared_noise(laws: list[Law], vocabulary: int) -> dict[Key, F32]:
    """E of the whole vocabulary for each distinct key: the nodes of one depth share it."""
    keys = list(dict.fromkeys(law.key for law in laws))
    if not keys:
        return {}
    blocks = np.arange(-(-vocabulary // 4), dtype=np.uint64)
    counter = np.empty((4, len(keys), len(blocks)), np.uint64)
    seeds, counter[1].T[:], counter[2].T[:] = np.array(keys, np.uint64).T
    counter[0], counter[3] = blocks, 0
    words = philox(counter, np.stack((seeds & LOW, seeds >> HALF))[..., None])
    u = np.empty((len(keys), len(blocks), 4), np.float32)
    for i, word in enumerate(words):
        u[..., i] = word
    return {key: _exponential(u[i].reshape(-1)[:vocabulary]) for i, key in enumerate(keys)}


def _own_noise(laws: list[Law], kept: list[Ids]) -> list[F32]:
    """E of each row's kept tokens."""
    if not laws:
        return []
    counts = [len(ids) for ids in kept]
    ids = np.concatenate(kept)
    counter, key = np.empty((4, len(ids)), np.uint64), np.empty((2, len(ids)), np.uint64)
    seeds, counter[1], counter[2] = np.array([law.key for law in laws], np.uint64).T.repeat(counts, axis=1)
    counter[0], counter[3] = ids >> 2, 0
    key[0], key[1] = seeds & LOW, seeds >> HALF
    e = _exponential(philox(counter, key)[ids & 3, np.arange(len(ids))].astype(np.float32))
    ends = list(accumulate(counts))
    return [e[end - count : end] for end, count in zip(ends, counts, strict=True)]


def _exponential(r: F32) -> F32:
    """-log1p(-u), in place. What wins is small and keeps its precision; u is kept below 1, so nothing is infinite."""
    r += np.float32(0.5)
    r *= np.float32(2.0**-32)
    np.minimum(r, np.float32(1 - 2.0**-24), out=r)
    torch.from_numpy(r).neg_().log1p_().neg_()  # numpy's log1p takes four times as long
    return r


def philox(counter: U64, key: U64) -> U64:
    """Philox4x32-10. counter [4, ...], key [2, ...] broadcast to it, 32-bit values in uint64 -> words [4, ...]."""
    words = counter.copy()
    even, odd = words[::2], words[1::2]
    pair = (2,) + (1,) * (counter.ndim - 1)
    multipliers = MULTIPLIERS.reshape(pair)
    keys = (key + WEYL.reshape(ROUNDS, *pair)) & LOW
    products = np.empty_like(even)
    crossed = products[::-1]
    for round_keys in keys:
        np.multiply(even, multipliers, out=products)
        np.right_shift(crossed, HALF, out=even)
        np.bitwise_xor(even, odd, out=even)
        np.bitwise_xor(even, round_keys, out=even)
        np.bitwise_and(crossed, LOW, out=odd)
    return words
