"""Draws, walks and trees of the GPU's engines against the CPU's ops: the same tokens, save for ties within rounding."""

from __future__ import annotations

import os
import random

import pytest
import torch

pytest.importorskip("triton")

from hedgerow.model.cuda_graph import Device
from hedgerow.model.cuda_trees import CudaTrees
from hedgerow.model.cuda_walk import CudaWalker
from kernels.sample import Law
from kernels.tree_accept import WalkRows, walk_trees
from kernels.tree_build import plain_trees

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
VOCABULARY = 64
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, of divisions by a weight of 0
]
LAWS = [
    Law(0.0, 0, 1.0, 0.0, 1, 0, 80),
    Law(1.0, 0, 1.0, 0.0, (1 << 63) - 5, 3, 1 << 20),
    Law(0.8, 20, 0.9, 0.01, 3, (1 << 32) - 1, 7),
]


@pytest.fixture(scope="module")
def walker() -> CudaWalker:
    return CudaWalker(VOCABULARY, Device(torch.device(DEVICE)))


def random_trees(choose: random.Random, count: int) -> list[WalkRows]:
    """Trees of few tokens, so that paths are long; siblings differ."""
    trees, first = [], 0
    for n in range(count):
        rows = choose.randint(1, 12)
        parents, taken = [-1], set[tuple[int, int]]()
        tokens = [0]
        while len(parents) < rows:
            node = choose.randrange(len(parents)), choose.randrange(4)
            if node not in taken:
                taken.add(node)
                parents.append(node[0])
                tokens.append(node[1])
        trees.append(WalkRows(first, parents, tokens, LAWS[n % len(LAWS)]))
        first += rows
    return trees


def logits_for(trees: list[WalkRows]) -> torch.Tensor:
    rows = sum(len(tree.parents) for tree in trees)
    logits = torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(rows))
    logits[:, :4] += 3
    return logits


@pytest.mark.parametrize("count", [1, 5])
def test_walks_are_those_of_the_cpu(walker: CudaWalker, count: int) -> None:
    longest = 0
    for seed in range(2 if INTERPRETED else 50):
        trees = random_trees(random.Random(seed), count)
        logits = logits_for(trees)
        expected = walk_trees(logits, trees)
        assert walker(logits.to(DEVICE), trees) == expected
        longest = max(longest, *(len(walked.path) for walked in expected))
    assert longest > 1 or count == 1


def test_rows_may_overlap_and_come_in_any_order(walker: CudaWalker) -> None:
    logits = logits_for([WalkRows(0, [-1] * 6, [0] * 6, LAWS[0])])
    trees = [WalkRows(first, (-1,), (0,), law) for first in (5, 0, 5) for law in LAWS]
    assert walker(logits.to(DEVICE), trees) == walk_trees(logits, trees)


def test_a_row_that_cannot_be_drawn_is_named(walker: CudaWalker) -> None:
    logits = logits_for([WalkRows(0, [-1] * 3, [0] * 3, LAWS[0])])
    logits[2] = -torch.inf
    trees = [WalkRows(n, (-1,), (0,), LAWS[1]) for n in range(3)]
    with pytest.raises(ValueError, match="row 2 has no largest finite logit"):
        walker(logits.to(DEVICE), trees)


def test_rows_that_are_not_there_are_refused(walker: CudaWalker) -> None:
    logits = torch.zeros(2, VOCABULARY, device=DEVICE)
    with pytest.raises(ValueError, match="tree 0: no such rows"):
        walker(logits, [WalkRows(1, (-1, 0), (0, 1), LAWS[0])])
    with pytest.raises(ValueError, match="float32 were expected"):
        walker(logits[:, 1:], [WalkRows(0, (-1,), (0,), LAWS[0])])


def test_trees_are_those_of_the_cpu() -> None:
    logits = torch.randn(3, 7, VOCABULARY, generator=torch.Generator().manual_seed(0)) * 3
    build = CudaTrees(7, VOCABULARY, Device(torch.device(DEVICE)))
    for budgets, caps in (([8, 3, 0], [0, 2, 0]), ([5], [0])):
        expected = plain_trees(logits[: len(budgets)], budgets, caps)
        for got, tree in zip(build(logits[: len(budgets)].to(DEVICE), budgets, caps), expected, strict=True):
            assert (got.tokens, got.parents) == (tree.tokens, tree.parents)
            assert got.logprobs == pytest.approx(tree.logprobs, abs=1e-5)
