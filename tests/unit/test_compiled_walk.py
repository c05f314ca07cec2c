"""The compiled engine draws by the law of kernels/sample.py, and a row's token depends on that row alone."""

from __future__ import annotations

import ctypes
import hashlib
import math
import struct
from fractions import Fraction

import numpy as np
import pytest
import torch

from hedgerow.model.compiled_walk import Walker
from kernels.cpu.build import build
from kernels.cpu.library import Library
from kernels.sample import Law, keep, philox
from kernels.tree_accept import WalkRows, accept_walk, walk_trees
from tests.compiled_builds import missing_compiler, plain_build

pytestmark = pytest.mark.skipif(bool(missing_compiler()), reason=missing_compiler())
KINDS = {
    "greedy": Law(0.0, 5, 0.5, 0.5, 1, 0, 0),
    "T=1": Law(1.0, 0, 1.0, 0.0, 2, 0, 0),
    "T=0.8 top-p 0.95": Law(0.8, 0, 0.95, 0.0, 3, 1, 0),
    "T=0.7 top-k 20": Law(0.7, 20, 1.0, 0.0, 2**63 - 1, 0, 0),
    "T=1.3 min-p 0.05": Law(1.3, 0, 1.0, 0.05, 5, 0, 0),
    "all filters": Law(0.9, 40, 0.9, 0.02, 6, 2**32 - 1, 0),
    "nearly all of the mass": Law(2.0, 0, 0.999, 0.0, 7, 0, 0),
    "top-p and min-p": Law(1.0, 0, 0.9, 0.3, 8, 0, 0),
    "top-k of everything": Law(1.0, 2**40, 1.0, 0.0, 9, 0, 0),
    "hot": Law(100.0, 0, 1 - 2.0**-50, 0.0, 10, 0, 0),
    "nearly greedy": Law(1e-40, 0, 1.0, 0.0, 11, 0, 0),
}


@pytest.fixture(scope="module")
def library() -> Library:
    return Library(build())


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def single(laws: list[Law]) -> list[WalkRows]:
    return [WalkRows(i, (-1,), (0,), law) for i, law in enumerate(laws)]


def drawn(walker: Walker, logits: torch.Tensor, laws: list[Law]) -> list[int]:
    return [walked.bonus for walked in walker(logits, single(laws))]


def ratio(x: np.ndarray, law: Law, token: int) -> float:
    """E / w of a token, in float64 from the law's own u."""
    words = philox(
        np.array([token // 4, law.position, law.sample_index, 0], np.uint64),
        np.array([law.seed & 0xFFFFFFFF, law.seed >> 32], np.uint64),
    )
    u = (np.float32(words[token % 4]) + np.float32(0.5)) * np.float32(2.0**-32)
    weight = math.exp((float(x[token]) - float(x.max())) / max(law.temperature, 1e-30))
    return -math.log1p(-float(min(u, np.float32(1 - 2.0**-24)))) / weight


def weights(x: np.ndarray, law: Law) -> np.ndarray:
    return np.exp((x.astype(np.float64) - float(x.max())) / law.temperature).astype(np.float32)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(("vocabulary", "scale"), [(48, 1.5), (4096, 4.0), (4096, 0.01)])
def test_tokens_are_those_of_the_reference_but_for_ties_within_rounding(
    library: Library, name: str, vocabulary: int, scale: float
) -> None:
    """120 positions; where the two differ, the winners' ratios or the filter's border must be as good as equal."""
    rows = randn(120, vocabulary, seed=vocabulary) * scale
    rows[::7] = (rows[::7] * 2).round() / 2  # ties
    laws = [KINDS[name]._replace(position=p) for p in range(120)]
    mine = drawn(Walker(library, vocabulary), rows, laws)
    theirs = [walked.bonus for walked in walk_trees(rows, single(laws))]
    apart = [i for i in range(120) if mine[i] != theirs[i]]
    assert len(apart) <= 1, apart
    for i in apart:
        x, law = rows[i].numpy(), laws[i]
        a, b = ratio(x, law, mine[i]), ratio(x, law, theirs[i])
        kept = keep(x, weights(x, law), law) if law.filters(vocabulary) else range(vocabulary)
        border = min(x[list(kept)])
        assert abs(a - b) <= 1e-5 * a or abs(min(x[mine[i]], x[theirs[i]]) - border) <= 1e-5 * law.temperature


def test_known_noise_decides_between_two_tokens(library: Library) -> None:
    """The published generator, by the reference's words: equal logits leave the choice to the noise alone."""
    x = torch.full((1, 16), -torch.inf)
    x[0, [3, 14]] = 0.5
    walker = Walker(library, 16)
    for position in range(50):
        law = Law(1.0, 0, 1.0, 0.0, 0xA4093822299F31D0 >> 1, 77, position)
        wanted = min((3, 14), key=lambda token: ratio(x[0].numpy(), law, token))
        assert drawn(walker, x, [law]) == [wanted]


def test_a_row_draws_the_same_alone_in_any_batch_and_in_any_tree(library: Library) -> None:
    walker, logits = Walker(library, 512), randn(64, 512, seed=2) * 3
    kinds = list(KINDS.values())
    laws = [kinds[i % len(kinds)]._replace(position=i % 9) for i in range(64)]
    alone = [drawn(walker, logits[i : i + 1], [law])[0] for i, law in enumerate(laws)]
    assert drawn(walker, logits, laws) == alone
    assert drawn(walker, logits.flip(0), laws[::-1]) == alone[::-1]
    for i, law in enumerate(laws):
        rows = torch.stack([logits[i], logits[(i + 1) % 64], logits[(i + 2) % 64]])
        below = drawn(walker, rows[2:], [law._replace(position=law.position + 1)])[0]
        other = (alone[i] + 1) % 512
        walked = walker(rows, [WalkRows(0, (-1, 0, 0), (9, other, alone[i]), law)])[0]
        assert (walked.path, walked.bonus) == ([0, 2], below)


def test_walks_are_the_references_down_chains_and_bushes(library: Library) -> None:
    """Few tokens, so that draws meet children; several trees in one call, some of one row."""
    choose = np.random.default_rng(5)
    walker, laws = Walker(library, 16), list(KINDS.values())
    longest = 0
    for turn in range(120):
        trees, first = [], int(choose.integers(0, 3))
        for n in (1, 9, int(choose.integers(1, 64)), 33):
            parents = [-1, *(int(choose.integers(0, i)) for i in range(1, n))]
            if turn % 3 == 0:
                parents = list(range(-1, n - 1))
            tokens = [int(choose.integers(0, 5)) for _ in range(n)]
            trees.append(WalkRows(first, parents, tokens, laws[(turn + n) % len(laws)]._replace(position=turn)))
            first += n
        logits = randn(first + 1, 16, seed=turn) * 3
        logits[:, 5:] = -torch.inf
        walked = walker(logits, trees)
        assert walked == walk_trees(logits, trees)
        for tree, way in zip(trees, walked, strict=True):
            drawn_there = [-1] * len(tree.tokens)
            for row, token in zip(way.path, [*(tree.tokens[row] for row in way.path[1:]), way.bonus], strict=True):
                drawn_there[row] = token
            assert accept_walk(tree.parents, tree.tokens, drawn_there) == way.path
        longest = max(longest, *(len(way.path) for way in walked))
    assert longest >= 4


def tail(statistic: float, freedom: int) -> float:
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


@pytest.mark.parametrize("name", ["T=1", "T=0.8 top-p 0.95", "T=0.7 top-k 20", "T=1.3 min-p 0.05"])
def test_drawn_tokens_follow_the_filtered_softmax(library: Library, name: str) -> None:
    law, row = KINDS[name], randn(64, seed=4) * 1.5
    tokens = drawn(Walker(library, 64), row.expand(6000, -1), [law._replace(position=p) for p in range(6000)])
    counts = np.bincount(tokens, minlength=64)
    w = weights(row.numpy(), law)
    p = np.zeros(64)
    kept = keep(row.numpy(), w, law) if law.filters(64) else np.arange(64)
    p[kept] = w[kept] / w[kept].sum()
    assert (counts[p == 0] == 0).all()
    common = p * 6000 >= 5
    seen = np.append(counts[common], counts[~common].sum())
    wanted = np.append(p[common], p[~common].sum()) * 6000
    seen, wanted = seen[wanted > 0], wanted[wanted > 0]
    assert tail(float(((seen - wanted) ** 2 / wanted).sum()), len(seen) - 1) > 1e-5


def test_the_logarithm_is_right_to_two_ulp_near_one_as_well(library: Library) -> None:
    log = library.functions.minus_log
    log.restype, log.argtypes = ctypes.c_double, [ctypes.c_double]
    tops = [Fraction(1, 1 << 33), Fraction(1, 1 << 20), Fraction(1, 3), Fraction(1, 2), Fraction(7, 8)]
    for u in (float(top) for top in tops):
        assert log(1.0 - u) == pytest.approx(-math.log1p(-u), rel=5e-16)
    for y in (1.0, 0.7071, 0.70711, 1.4142, 2.0**-24, 2.0**-32, 4096.0, 163840.0):
        assert log(y) == pytest.approx(-math.log(y), rel=5e-16, abs=0)


def test_the_law_of_draws_has_the_tokens_that_it_had(library: Library) -> None:
    """On every machine and by every build. A change of any needs a new LAW in hedgerow/model/compiled.py."""
    steps = [(i * 2654435761) % 4093 for i in range(64 * 512)]
    logits = torch.tensor(steps, dtype=torch.float32).view(64, 512) / 512
    laws = [law._replace(position=p) for p in range(64 // len(KINDS) + 1) for law in KINDS.values()][:64]
    tokens = drawn(Walker(library, 512), logits, laws)
    assert tokens == drawn(Walker(Library(plain_build()), 512), logits, laws)
    assert hashlib.sha256(struct.pack("64i", *tokens)).hexdigest()[:16] == "dc2b2737e7155451"


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_rows_that_are_not_numbers_are_told_by_number(library: Library, wrong: float) -> None:
    walker, logits = Walker(library, 32), randn(4, 32)
    logits[2, 31] = wrong
    for law in KINDS.values():
        with pytest.raises(ValueError, match="row 2 has no largest finite logit"):
            walker(logits, single([law] * 4))
    logits[2] = -torch.inf
    with pytest.raises(ValueError, match="row 2"):
        walker(logits, single([KINDS["greedy"]] * 4))


def test_rows_that_are_not_there_are_refused(library: Library) -> None:
    walker, logits, law = Walker(library, 32), randn(4, 32), KINDS["greedy"]
    for first, rows in ((-1, 1), (4, 1), (3, 2), (0, 0), (2**31 - 1, 2)):
        with pytest.raises(ValueError, match="tree 1: no such rows"):
            walker(logits, [WalkRows(0, (-1,), (0,), law), WalkRows(first, range(-1, rows - 1), range(rows), law)])
    with pytest.raises(ValueError, match="2 parents and 1 tokens"):
        walker(logits, [WalkRows(0, (-1, 0), (0,), law)])
    for other in (randn(4, 48), randn(4, 32).double()):
        with pytest.raises(ValueError, match="32 float32 were expected"):
            walker(other, single([law] * 4))
    assert walker(logits[:0], []) == []
    strided = torch.stack([logits, logits + 1], 1).flatten(1)[:, :32]
    assert drawn(walker, strided, [law] * 4) == logits.argmax(1).tolist()
