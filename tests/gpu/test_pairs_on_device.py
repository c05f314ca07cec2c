"""Conditional trees on a GPU against best-first search. Under Triton's interpreter: fewer of them."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")

from hedgerow.model.selector import Pairs, build, build_on_device
from kernels.gpu.tree_pairs import TEST_SHAPES, reference, tree_pairs
from kernels.tree_pairs import tree_pairs_heap
from tests.unit.test_tree_pairs import scores

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy under the interpreter
]
KINDS = ("drawn", "grid", "flat", "bare")


def given(sequences: int, depth: int, width: int, nodes: int, kind: str, seed: int) -> list[torch.Tensor]:
    q, choice, tokens = scores(sequences, depth, width, kind, seed)
    budgets = torch.randint(0, nodes + 1, (sequences,), generator=torch.Generator().manual_seed(seed))
    return [q.to(DEVICE), choice.int().to(DEVICE), tokens.int().to(DEVICE), budgets.int().to(DEVICE)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_tree_is_what_best_first_search_finds(kind: str) -> None:
    for seed in range(1 if INTERPRETED else 10):
        sequences, nodes = (2, 20) if INTERPRETED else (250, 63)
        q, choice, tokens, budgets = given(sequences, 7, 16, nodes, kind, seed)
        built = [column.tolist() for column in tree_pairs(q, choice, tokens, budgets, nodes)]
        for s in range(sequences):
            budget = int(budgets[s])
            want = tree_pairs_heap(q[s].tolist(), choice[s].tolist(), tokens[s].tolist(), budget)
            count = built[5][s]
            assert count == len(want.tokens), (s, budget)
            assert built[0][s] == want.tokens + [0] * (nodes - count), s
            assert built[1][s] == want.parents + [-1] * (nodes - count), s
            assert built[4][s][:count] == want.logprobs, s


def test_a_selectors_trees_are_built_where_its_scores_are() -> None:
    q, choice, tokens, budgets = given(3, 7, 16, 16, "drawn", seed=2)
    pairs, wanted = Pairs(q, choice.long(), tokens.long()), [max(1, int(budget)) for budget in budgets]
    assert build_on_device(pairs, wanted) == build(Pairs(*(part.cpu() for part in pairs)), wanted)


@pytest.mark.parametrize("kind", KINDS if not INTERPRETED else KINDS[1:3])
@pytest.mark.parametrize(("sequences", "depth", "width", "nodes"), TEST_SHAPES)
def test_every_field_is_the_references(sequences: int, depth: int, width: int, nodes: int, kind: str) -> None:
    args = given(sequences, depth, width, nodes, kind, seed=1)
    got, want = tree_pairs(*args, nodes), reference(*args, nodes)
    for name, mine, theirs in zip(got._fields, got, want, strict=True):
        assert torch.equal(mine.cpu(), theirs.cpu()), name
