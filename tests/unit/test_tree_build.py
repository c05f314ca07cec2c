"""The static candidate table gives the heap's trees: same nodes, same order, same bits."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.tree_build import BuiltTrees, candidates, top_logprobs, tree_build, tree_build_heap

CPU = torch.device("cpu")


def marginals(depth: int, width: int, values: int, seed: int, sequences: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Sorted log-marginals; `values` different ones where it is not 0, so that exact ties abound. Distinct tokens."""
    g = torch.Generator().manual_seed(seed)
    shape = (sequences, depth, width)
    q = torch.randint(0, values, shape, generator=g) * 0.37 if values else torch.rand(shape, generator=g) * 6
    tokens = torch.rand(sequences, depth, 3 * width, generator=g).argsort(-1)[..., :width]
    return (-q).float().sort(-1, descending=True).values, tokens


def build(q: torch.Tensor, tokens: torch.Tensor, budgets: list[int], caps: list[int], nodes: int = -1) -> BuiltTrees:
    nodes = max(budgets) if nodes < 0 else nodes
    return tree_build(q, tokens, torch.tensor(budgets), torch.tensor(caps), nodes)


def same_as_heap(q: torch.Tensor, tokens: torch.Tensor, budgets: list[int], caps: list[int], nodes: int = -1) -> None:
    built = build(q, tokens, budgets, caps, nodes)
    for s, (budget, cap) in enumerate(zip(budgets, caps, strict=True)):
        heap = tree_build_heap(q[s].tolist(), tokens[s].tolist(), budget, cap)
        n = int(built.counts[s])
        assert built.tokens[s, :n].tolist() == heap.tokens, (budget, cap)
        assert built.parents[s, :n].tolist() == heap.parents, (budget, cap)
        assert built.logprobs[s, :n].tolist() == heap.logprobs, (budget, cap)  # float32 to float is exact: equal bits


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 5, 6, 7, 15])
def test_every_budget_gives_the_heaps_tree_under_heavy_ties(depth: int) -> None:
    for budget in range(64):
        for values in (2, 0):
            q, tokens = marginals(depth, max(budget, 1), values, seed=budget)
            same_as_heap(q, tokens, [budget], [0])
    candidates.cache_clear()


@pytest.mark.parametrize(("depth", "budget"), [(7, 64), (3, 65), (7, 96), (2, 127), (7, 128), (15, 80)])
def test_budgets_beyond_one_word_give_the_heaps_tree(depth: int, budget: int) -> None:
    for values in (3, 0):
        q, tokens = marginals(depth, budget, values, seed=depth)
        same_as_heap(q, tokens, [budget], [0])
    candidates.cache_clear()


@pytest.mark.parametrize("values", [1, 2, 5, 0])
def test_one_call_builds_ragged_budgets_and_caps(values: int) -> None:
    budgets = [0, 1, 7, 12, 16, 63, 32, 2, 63, 16]
    caps = [0, 0, 1, 3, 2, 0, 64, 1, 5, 16]
    q, tokens = marginals(7, 63, values, seed=values, sequences=len(budgets))
    same_as_heap(q, tokens, budgets, caps)


@settings(derandomize=True, max_examples=60, deadline=None)
@given(st.data())
def test_any_marginals_give_the_heaps_tree(data: st.DataObject) -> None:
    depth, width = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 12))
    weight = st.sampled_from([0.0, -0.5, -1.0, -1.0000001, -2.5, -1e-30, -90.0, float("-inf")])
    rows = [sorted(data.draw(st.lists(weight, min_size=width, max_size=width)), reverse=True) for _ in range(depth)]
    budget, cap = data.draw(st.integers(0, 24)), data.draw(st.integers(0, 13))
    nodes = data.draw(st.integers(budget, 24))  # a larger table than needed gives the same tree
    tokens = torch.arange(width).expand(1, depth, width)
    same_as_heap(torch.tensor([rows]), tokens, [budget], [cap], nodes)


def test_a_tree_is_the_most_probable_set_of_prefixes() -> None:
    """Against all prefixes, listed."""
    q, tokens = marginals(4, 5, 0, seed=3)
    terms = q[0].tolist()
    prefixes = [rho for n in range(1, 5) for rho in itertools.product(range(5), repeat=n)]
    sigma = {rho: sum(terms[d][rank] for d, rank in enumerate(rho)) for rho in prefixes}
    best = sorted(prefixes, key=lambda rho: -sigma[rho])
    for budget in (1, 5, 17, 60):
        built = build(q, tokens, [budget], [0])
        assert built.logprobs[0].tolist() == pytest.approx([sigma[rho] for rho in best[:budget]], abs=1e-5)


def test_a_small_tree_is_the_beginning_of_a_large_one() -> None:
    q, tokens = marginals(7, 63, 3, seed=1)
    large = build(q, tokens, [63], [0])
    for budget in range(1, 63):
        small = build(q, tokens, [budget], [0])
        assert small.tokens.tolist() == large.tokens[:, :budget].tolist()
        assert small.parents.tolist() == large.parents[:, :budget].tolist()


def test_parents_come_before_children_and_siblings_differ() -> None:
    q, tokens = marginals(7, 63, 2, seed=9, sequences=8)
    built = build(q, tokens, [63] * 8, [0] * 8)
    assert (built.parents < torch.arange(63)).all()
    for parents, chosen in zip(built.parents.tolist(), built.tokens.tolist(), strict=True):
        assert len(set(zip(parents, chosen, strict=True))) == 63


def test_a_narrow_cap_ends_the_tree_early() -> None:
    q, tokens = marginals(3, 8, 0, seed=2, sequences=3)
    built = build(q, tokens, [40, 40, 5], [1, 2, 1])
    assert built.counts.tolist() == [3, 2 + 4 + 8, 3]
    assert built.parents[0, :3].tolist() == [-1, 0, 1]  # the chain
    same_as_heap(q, tokens, [40, 40, 5], [1, 2, 1])


def test_fewer_tokens_than_budget_act_as_a_cap() -> None:
    q, tokens = marginals(2, 3, 2, seed=4)
    assert build(q, tokens, [30], [0]).counts.tolist() == [3 + 9]
    same_as_heap(q, tokens, [30], [0])


def test_the_tables_have_the_known_sizes() -> None:
    sizes = {
        (n, depth): len(candidates(depth, n, CPU).last) for n, depth in [(8, 7), (16, 7), (32, 7), (64, 7), (16, 15)]
    }
    assert sizes == {(8, 7): 53, (16, 7): 285, (32, 7): 1379, (64, 7): 6005, (16, 15): 397}


@pytest.mark.parametrize("values", [3, 40, 0])
def test_best_tokens_are_in_order_of_logit_then_id(values: int) -> None:
    """topk leaves the order of equal values open; a draft would then depend on the library."""
    g = torch.Generator().manual_seed(values)
    shape = (2, 7, 257)
    logits = torch.randint(0, values, shape, generator=g).float() if values else torch.randn(shape, generator=g)
    for k in (1, 8, 64, 256, 257, 300):
        best = top_logprobs(logits, k)
        for row, (tokens, logprobs) in enumerate(
            zip(best.tokens.flatten(0, 1), best.logprobs.flatten(0, 1), strict=True)
        ):
            x = logits.flatten(0, 1)[row].tolist()
            assert tokens.tolist() == sorted(range(257), key=lambda v: (-x[v], v))[: min(k, 257)]
            assert logprobs.tolist() == torch.tensor(x).log_softmax(-1)[tokens].tolist()


@pytest.mark.parametrize("k", [2, 16, 63])
def test_a_tie_at_the_border_goes_to_the_lower_id(k: int) -> None:
    """The k-th and the next logit are equal, and nothing else is: among the k alone no tie shows."""
    logits = torch.randn(1, 50, 257, generator=torch.Generator().manual_seed(k))
    values, ids = logits.topk(k + 1)
    logits.scatter_(-1, ids[..., k:], values[..., k - 1 : k])
    in_order = torch.sort(logits, dim=-1, descending=True, stable=True).indices
    assert torch.equal(top_logprobs(logits, k).tokens, in_order[..., :k])


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_broken_row_still_gives_a_valid_tree(poison: float) -> None:
    """NaN among the log-probabilities once meant nodes whose parents were not in the tree."""
    logits = torch.randn(2, 7, 64, generator=torch.Generator().manual_seed(0))
    logits[0, 2, 5] = poison
    logits[1] = poison
    best = top_logprobs(logits, 16)
    assert not best.logprobs.isnan().any()
    assert (best.logprobs <= 0).all()
    same_as_heap(best.logprobs, best.tokens, [16, 16], [0, 0])


def test_an_impossible_token_is_ranked_last() -> None:
    logits = torch.full((1, 1, 6), -torch.inf)
    logits[0, 0, 3], logits[0, 0, 1] = 1.0, 1.0
    best = top_logprobs(logits, 4)
    assert best.tokens.tolist() == [[[1, 3, 0, 2]]]
    assert best.logprobs[0, 0, 2:].tolist() == [float("-inf")] * 2
