"""Conditional trees: best-first search is brute force, and the level-by-level form is best-first search."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from kernels.tree_build import tree_build_heap
from kernels.tree_pairs import TEST_SHAPES, best_first, tree_pairs, tree_pairs_heap

Row = list[tuple[float, int]]


def rows(choose: random.Random, width: int, ties: bool) -> Row:
    values = [choose.randrange(4) * 0.5 if ties else choose.random() * 4 for _ in range(width)]
    tokens = choose.sample(range(100), width)
    return sorted(((-v, t) for v, t in zip(values, tokens, strict=True)), key=lambda pair: -pair[0])


def test_best_first_is_brute_force_on_a_thousand_cases_whose_scores_depend_on_the_whole_path() -> None:
    choose = random.Random(0)
    for case in range(1000):
        depth, width, budget = choose.randint(1, 4), choose.randint(1, 3), choose.randint(0, 40)
        table: dict[tuple[int, ...], Row] = {}
        paths = [p for d in range(1, depth + 1) for p in itertools.product(range(width), repeat=d)]
        for parent in [(), *(p for p in paths if len(p) < depth)]:
            table[parent] = rows(choose, width, ties=case % 2 == 0)

        def sigma(path: tuple[int, ...], table: dict[tuple[int, ...], Row] = table) -> float:
            total = torch.zeros(())
            for d in range(len(path)):
                total = total + table[path[:d]][path[d]][0]
            return float(total)

        expected = sorted(paths, key=lambda path: (-sigma(path), path))[:budget]
        tree, found = best_first(lambda path, table=table: table.get(path, ()), budget)  # type: ignore[misc]
        assert found == expected, case
        assert tree.tokens == [table[p[:-1]][p[-1]][1] for p in expected]
        assert tree.parents == [expected.index(p[:-1]) if len(p) > 1 else -1 for p in expected]
        assert tree.logprobs == [sigma(p) for p in expected]


def scores(s: int, depth: int, width: int, kind: str, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As drawn, on a coarse grid with many ties, all equal, or mostly impossible."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(s, depth, width, width, generator=g) * 2
    if kind == "grid":
        x = x.round()
    if kind == "flat":
        x = torch.zeros_like(x)
    if kind == "bare":
        x[torch.rand(x.shape, generator=g) < 0.7] = -torch.inf
        x[..., 0] = x[..., 0].clamp(min=-1)
    best = x.log_softmax(-1).sort(dim=-1, descending=True, stable=True)
    tokens = torch.rand(s, depth, 3 * width, generator=g).argsort(-1)[..., :width]
    return best.values, best.indices, tokens


@pytest.mark.parametrize("kind", ["drawn", "grid", "flat", "bare"])
@pytest.mark.parametrize(("s", "depth", "width", "nodes"), TEST_SHAPES)
def test_level_by_level_gives_the_heaps_nodes_in_its_order(
    s: int, depth: int, width: int, nodes: int, kind: str
) -> None:
    for seed in range(4):
        q, choice, tokens = scores(s, depth, width, kind, seed)
        budgets = torch.randint(0, nodes + 1, (s,), generator=torch.Generator().manual_seed(seed))
        built = tree_pairs(q, choice, tokens, budgets, nodes)
        for i in range(s):
            want = tree_pairs_heap(q[i].tolist(), choice[i].tolist(), tokens[i].tolist(), int(budgets[i]))
            n = int(built.counts[i])
            assert n == len(want.tokens)
            assert built.tokens[i, :n].tolist() == want.tokens
            assert built.parents[i, :n].tolist() == want.parents
            assert built.logprobs[i, :n].tolist() == want.logprobs


def test_scores_that_do_not_depend_on_the_token_before_give_the_marginals_trees() -> None:
    g = torch.Generator().manual_seed(3)
    marginals = torch.randn(7, 16, generator=g).log_softmax(-1).sort(dim=-1, descending=True).values
    tokens = torch.rand(7, 40, generator=g).argsort(-1)[:, :16]
    q = marginals[:, None, :].expand(7, 16, 16)
    choice = torch.arange(16).expand(7, 16, 16)
    for budget in (0, 1, 8, 16, 63):
        assert tree_pairs_heap(q.tolist(), choice.tolist(), tokens.tolist(), budget) == tree_build_heap(
            marginals.tolist(), tokens.tolist(), budget
        )
