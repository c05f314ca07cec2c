"""What a drafter may send, and what is refused, each with its own reason."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import pytest

from hedgerow.engine.tree import InvalidTree, Tree, TreeConfig, validate_tree
from hedgerow.engine.types import TreeNodes

LIMITS = {"budget": 8, "topk_cap": 0, "max_depth": 4, "vocab_size": 100}


def nodes(tokens: Sequence[int], parents: Sequence[int]) -> TreeNodes:
    return TreeNodes(tokens, parents, [-0.5] * len(tokens))


def test_a_valid_tree_comes_back_with_its_depths() -> None:
    tree = validate_tree(nodes([5, 6, 5, 7, 5], [-1, -1, 0, 1, 2]), **LIMITS)
    assert tree == Tree((5, 6, 5, 7, 5), (-1, -1, 0, 1, 2), (1, 1, 2, 2, 3))


def test_no_nodes_are_a_valid_tree() -> None:
    assert validate_tree(nodes([], []), **{**LIMITS, "budget": 0}) == Tree((), (), ())


def test_the_largest_allowed_values_pass() -> None:
    chain = nodes([99, 0, 99, 0], [-1, 0, 1, 2])
    assert validate_tree(chain, **{**LIMITS, "budget": 4, "topk_cap": 1}).depth == (1, 2, 3, 4)


@pytest.mark.parametrize(
    ("why", "node", "tokens", "parents"),
    [
        ("over_budget", 8, [1] * 9, [-1] * 9),
        ("length_mismatch", 2, [1, 2], [-1]),
        ("token_out_of_range", 1, [1, 100], [-1, 0]),
        ("token_out_of_range", 0, [-1, 3], [-1, 0]),
        ("parent_out_of_range", 1, [1, 2], [-1, -2]),
        ("parent_out_of_range", 1, [1, 2], [-1, 2]),
        ("own_parent", 0, [1, 2], [0, -1]),
        ("forward_parent", 0, [1, 2], [1, -1]),
        ("forward_parent", 1, [1, 2, 3], [-1, 2, 1]),  # a cycle of two
        ("forward_parent", 0, [1, 2, 3], [2, 0, 1]),  # a cycle of three
        ("duplicate_sibling", 3, [4, 4, 5], [-1, -1, 0]),
        ("duplicate_sibling", 4, [4, 5, 6, 5], [-1, 0, 0, 0]),
        ("too_deep", 4, [1, 2, 3, 4, 5], [-1, 0, 1, 2, 3]),
    ],
)
def test_a_broken_tree_is_refused_with_its_reason(why: str, node: int, tokens: list[int], parents: list[int]) -> None:
    with pytest.raises(InvalidTree) as refused:
        validate_tree(nodes(tokens, parents), **LIMITS)
    assert refused.value.why == why
    assert refused.value.node == node
    assert refused.value.metadata["why"] == why


def test_logprobs_count_but_are_not_read() -> None:
    poisoned = TreeNodes([1, 2], [-1, 0], [float("nan"), float("inf")])
    assert validate_tree(poisoned, **LIMITS).tokens == (1, 2)
    with pytest.raises(InvalidTree, match="length_mismatch"):
        validate_tree(TreeNodes([1, 2], [-1, 0], [-0.5]), **LIMITS)


def test_the_cap_counts_different_tokens_at_one_depth() -> None:
    two_at_depth_two = nodes([1, 2, 7, 8, 7, 8], [-1, -1, 0, 0, 1, 1])
    assert validate_tree(two_at_depth_two, **{**LIMITS, "topk_cap": 2}).depth == (1, 1, 2, 2, 2, 2)
    with pytest.raises(InvalidTree) as refused:
        validate_tree(nodes([1, 2, 7, 8, 9], [-1, -1, 0, 0, 1]), **{**LIMITS, "topk_cap": 2})
    assert (refused.value.why, refused.value.node) == ("over_topk_cap", 4)


class Unread(Sequence[int]):
    """Ten thousand entries, none of which may be looked at."""

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: object) -> int:
        raise AssertionError("read")

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("read")


def test_a_tree_of_ten_thousand_nodes_is_refused_unread() -> None:
    with pytest.raises(InvalidTree, match="over_budget"):
        validate_tree(TreeNodes(Unread(), Unread(), Unread()), **LIMITS)
    with pytest.raises(InvalidTree, match="length_mismatch"):
        validate_tree(TreeNodes([1], Unread(), [0.0]), **LIMITS)


def test_sixteen_nodes_are_checked_in_fifty_microseconds() -> None:
    """CPU time of the best of many runs: neighbours on the machine must not fail this."""
    tree = nodes(list(range(16)), [-1, 0, 1, 2, 3, 4, 5, -1, 0, 7, 8, 1, -1, 2, 12, 0])
    best = 1e9
    for _ in range(200):
        begun = time.thread_time_ns()
        validate_tree(tree, budget=16, topk_cap=16, max_depth=16, vocab_size=4096)
        best = min(best, time.thread_time_ns() - begun)
    assert best < 50_000


def test_a_budget_of_n_takes_one_row_more_than_nodes() -> None:
    assert [TreeConfig(budget).q_len for budget in (0, 7, 63)] == [1, 8, 64]


def test_a_chain_is_a_valid_tree() -> None:
    chain = Tree.chain([9, 9, 4])
    assert chain == validate_tree(nodes([9, 9, 4], [-1, 0, 1]), **LIMITS)
