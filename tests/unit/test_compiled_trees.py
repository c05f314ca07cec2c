"""The compiled engine's trees are the heap's, bit for bit, and its marginals those of torch."""

from __future__ import annotations

from array import array

import pytest
import torch

from hedgerow.model.compiled_trees import Best, best_tokens, build, compiled_trees
from kernels import tree_build as reference
from kernels.cpu.build import build as build_library
from kernels.cpu.library import Library
from kernels.tree_build import TopLogprobs, plain_trees, tree_build_heap
from tests.compiled_builds import missing_compiler, plain_build

pytestmark = pytest.mark.skipif(bool(missing_compiler()), reason=missing_compiler())


@pytest.fixture(scope="module", params=["usual build", "no vector instructions"])
def library(request: pytest.FixtureRequest) -> Library:
    return Library(build_library() if request.param == "usual build" else plain_build())


def marginals(depth: int, width: int, values: int, seed: int, sequences: int = 1) -> TopLogprobs:
    """Sorted log-marginals; `values` different ones where it is not 0, so that exact ties abound."""
    g = torch.Generator().manual_seed(seed)
    shape = (sequences, depth, width)
    q = torch.randint(0, values, shape, generator=g) * 0.37 if values else torch.rand(shape, generator=g) * 6
    tokens = torch.rand(sequences, depth, 3 * width, generator=g).argsort(-1)[..., :width]
    return TopLogprobs((-q).float().sort(-1, descending=True).values.contiguous(), tokens.int().contiguous())


def shape(best: TopLogprobs) -> tuple[int, int, int]:
    sequences, depth, width = best.tokens.shape
    return sequences, depth, width


def top_logprobs(library: Library, logits: torch.Tensor, k: int) -> TopLogprobs:
    best = best_tokens(library, logits, k)
    return TopLogprobs(torch.tensor(best.logprobs).view(best.shape), torch.tensor(best.tokens).view(best.shape))


def same_as_heap(library: Library, best: TopLogprobs, budgets: list[int], caps: list[int]) -> None:
    flat = Best(array("f", best.logprobs.flatten().tolist()), array("i", best.tokens.flatten().tolist()), shape(best))
    for s, tree in enumerate(build(library, flat, budgets, caps)):
        assert tree == tree_build_heap(best.logprobs[s].tolist(), best.tokens[s].tolist(), budgets[s], caps[s])


@pytest.mark.parametrize("depth", [1, 2, 4, 7, 15])
def test_every_budget_gives_the_heaps_tree_under_heavy_ties(library: Library, depth: int) -> None:
    for budget in (*range(20), 31, 32, 33, 63, 128, 255):
        for values in (1, 2, 0):
            same_as_heap(library, marginals(depth, min(max(budget, 1), 128), values, seed=budget), [budget], [0])


def test_one_call_builds_ragged_budgets_and_caps(library: Library) -> None:
    budgets = [0, 1, 7, 12, 16, 63, 32, 2, 63, 16]
    caps = [0, 0, 1, 3, 2, 0, 64, 1, 5, 16]
    for values in (1, 2, 5, 0):
        same_as_heap(library, marginals(7, 63, values, values, len(budgets)), budgets, caps)


def test_impossible_ranks_come_last_and_in_the_heaps_order(library: Library) -> None:
    q = torch.tensor([[[0.0, -0.0, -torch.inf, -torch.inf], [-0.5, -1e-30, -90.0, -torch.inf], [-torch.inf] * 4]])
    best = TopLogprobs(q.sort(-1, descending=True).values.contiguous(), torch.arange(4).int().expand(1, 3, 4).clone())
    for budget in range(40):
        same_as_heap(library, best, [budget], [0])


@pytest.mark.parametrize("k", [1, 2, 8, 63, 512])
def test_the_best_tokens_are_torchs_in_the_same_order(library: Library, k: int) -> None:
    g = torch.Generator().manual_seed(k)
    wide = torch.randn(3, 7, 512, generator=g) * 4
    tied = torch.randint(-3, 3, (3, 7, 512), generator=g).float()  # equal logits, zeros of both signs
    tied[0, 0] *= -1
    for logits in (wide, tied, torch.zeros(1, 1, 512), -wide.abs() * 1e30):
        mine, torchs = top_logprobs(library, logits, k), reference.top_logprobs(logits, k)
        assert torch.equal(mine.tokens.long(), torchs.tokens)
        torch.testing.assert_close(mine.logprobs, torchs.logprobs, rtol=1e-6, atol=2e-6)
        assert (mine.logprobs <= 0).all()


def test_rows_that_cannot_be_ranked_have_distinct_tokens_and_no_probability(library: Library) -> None:
    logits = torch.randn(6, 1, 64, generator=torch.Generator().manual_seed(0))
    logits[0, 0, 5], logits[1, 0, 6], logits[2] = torch.nan, torch.inf, torch.nan
    logits[3, 0, :60], logits[4] = -torch.inf, -torch.inf
    best = top_logprobs(library, logits, 8)
    for row in (0, 1, 2, 4):
        assert best.logprobs[row].eq(-torch.inf).all()
    assert best.logprobs[3, 0].isfinite().tolist() == [True] * 4 + [False] * 4
    assert all(len(set(row)) == 8 and 0 <= min(row) <= max(row) < 64 for row in best.tokens[:, 0].tolist())


def test_from_logits_to_trees_as_torch_does(library: Library) -> None:
    logits = torch.randn(8, 7, 4096, generator=torch.Generator().manual_seed(3)) * 3
    budgets, caps = [8, 16, 1, 63, 8, 32, 5, 12], [0, 0, 0, 4, 1, 2**40, 2, 0]
    for mine, torchs in zip(
        compiled_trees(library, logits, budgets, caps), plain_trees(logits, budgets, caps), strict=True
    ):
        assert (mine.tokens, mine.parents) == (torchs.tokens, torchs.parents)
        assert mine.logprobs == pytest.approx(torchs.logprobs, abs=1e-5)
    assert compiled_trees(library, logits[:0], [], []) == []
