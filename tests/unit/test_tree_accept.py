"""The acceptance walk, as a loop over lists and as a tensor program."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.tree_accept import accept_walk, tree_accept


def paper_walk(parents: list[int], tokens: list[int], drawn: list[int]) -> list[int]:
    """The walk as the paper has it: look for the child that carries the drawn token."""
    path = [0]
    while True:
        row = path[-1]
        child = [i for i, parent in enumerate(parents) if parent == row and i and tokens[i] == drawn[row]]
        if not child:
            return path
        path.append(child[0])


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """A tree in rows with a small vocabulary, and draws that often agree with it."""
    parents, tokens = [-1], [0]
    for _ in range(draw(st.integers(0, 63))):
        parent, token = draw(st.integers(0, len(parents) - 1)), draw(st.integers(0, 3))
        if (parent, token) not in zip(parents, tokens, strict=True):
            parents.append(parent)
            tokens.append(token)
    return parents, tokens, draw(st.lists(st.integers(0, 3), min_size=len(parents), max_size=len(parents)))


@settings(derandomize=True, max_examples=60, deadline=None)
@given(trees())
def test_the_path_is_the_papers(tree: tuple[list[int], list[int], list[int]]) -> None:
    assert accept_walk(*tree) == paper_walk(*tree)


@settings(derandomize=True, max_examples=25, deadline=None)
@given(st.lists(trees(), min_size=1, max_size=6))
def test_the_tensor_program_walks_ragged_trees_alike(batch: list[tuple[list[int], list[int], list[int]]]) -> None:
    rows = [len(parents) for parents, _, _ in batch]
    n = max(rows)

    def padded(values: list[int], fill: int) -> list[int]:
        return values + [fill] * (n - len(values))

    # padding that would be accepted if it were looked at: children of row 0 with the drawn token
    parents = torch.tensor([padded(p, 0) for p, _, _ in batch])
    tokens = torch.tensor([padded(t, d[0]) for _, t, d in batch])
    drawn = torch.tensor([padded(d, 0) for _, _, d in batch])
    result = tree_accept(parents, tokens, drawn, torch.tensor(rows))
    for s, tree in enumerate(batch):
        path = accept_walk(*tree)
        assert result.on_path[s].nonzero()[:, 0].tolist() == path
        assert int(result.length[s]) == len(path)
        assert int(result.bonus[s]) == tree[2][path[-1]]


def test_an_anchor_alone_gives_the_bonus_only() -> None:
    assert accept_walk([-1], [5], [9]) == [0]


def test_a_chain_is_followed_to_its_first_wrong_token() -> None:
    assert accept_walk([-1, 0, 1, 2], [5, 6, 7, 8], [6, 7, 1, 8]) == [0, 1, 2]
    assert accept_walk([-1, 0, 1, 2], [5, 6, 7, 8], [6, 7, 8, 9]) == [0, 1, 2, 3]


def test_a_node_that_matches_below_a_wrong_one_is_not_accepted() -> None:
    assert accept_walk([-1, 0, 1, 0], [5, 6, 7, 8], [8, 7, 0, 7]) == [0, 3]


@pytest.mark.parametrize("n", [1, 64])
def test_a_full_word_of_rows_can_be_accepted(n: int) -> None:
    parents = torch.arange(-1, n - 1)[None]
    tokens = torch.arange(n)[None]
    result = tree_accept(parents, tokens, tokens + 1, torch.tensor([n]))
    assert int(result.length[0]) == n
    assert int(result.bonus[0]) == n
