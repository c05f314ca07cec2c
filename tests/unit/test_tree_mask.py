"""Ancestor masks and depths of tree rows."""

from __future__ import annotations

import pytest
import torch

from kernels.tree_mask import TEST_SHAPES, tree_mask


def random_parents(n: int, seed: int) -> list[int]:
    g = torch.Generator().manual_seed(seed)
    return [-1] + [int(torch.randint(0, i, (1,), generator=g)) for i in range(1, n)]


def bits(word: int) -> set[int]:
    return {i for i in range(64) if word >> i & 1}  # Python shifts the sign in, as bit 63 wants


def climbed(parents: list[int], row: int) -> set[int]:
    rows = set()
    while row >= 0:
        rows.add(row)
        row = parents[row]
    return rows


@pytest.mark.parametrize(("sequences", "n"), TEST_SHAPES)
def test_a_row_sees_itself_and_its_ancestors_only(sequences: int, n: int) -> None:
    trees = [random_parents(n, seed) for seed in range(sequences)]
    result = tree_mask(torch.tensor(trees))
    for tree, masks, depths in zip(trees, result.mask.tolist(), result.depth.tolist(), strict=True):
        for row in range(n):
            assert bits(masks[row]) == climbed(tree, row)
            assert depths[row] == len(climbed(tree, row)) - 1


def test_the_longest_chain_fills_the_sign_bit() -> None:
    result = tree_mask(torch.tensor([list(range(-1, 63))]))
    assert result.mask[0, 63] == -1  # all 64 bits
    assert result.mask[0, 62] == (1 << 63) - 1
    assert result.depth[0].tolist() == list(range(64))


def test_row_63_below_the_anchor_is_negative() -> None:
    result = tree_mask(torch.tensor([[-1] + [0] * 63]))
    assert result.mask[0, 63] == 1 - (1 << 63)
    assert bits(int(result.mask[0, 63])) == {0, 63}


def test_several_rows_may_stand_right_after_the_prefix() -> None:
    result = tree_mask(torch.tensor([[-1, -1, 1, 0]]))
    assert result.mask.tolist() == [[0b1, 0b10, 0b110, 0b1001]]
    assert result.depth.tolist() == [[0, 0, 1, 1]]
