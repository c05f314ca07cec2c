"""The acceptance walk: from the anchor down, as long as a child carries the token that the target drew at its parent.

    row = 0;  while a child c of row has tokens[c] == drawn[row]: row = c
    emitted: the tokens of the path below the anchor, then drawn[last row of the path], the bonus

drawn[i] is the target's one draw at row i. It does not depend on which children exist, so what is emitted has the law
of plain decoding for every tree (target-sample matching); with noise keyed by position it is the same tokens.
Rows are the anchor (row 0, parent -1) and the tree's nodes, parents before children, no token twice below one parent.

parents, tokens, drawn [S, n] int64, rows [S] -> on_path [S, n] bool, length [S], bonus [S].   n <= 64

`walk_trees` draws as it walks, so that of a seeded tree only the rows on the path are drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from kernels.dispatch import op
from kernels.sample import Law, sample
from kernels.tree_mask import BITS, tree_mask

TEST_SHAPES = [(1, 1), (2, 8), (3, 33), (2, 64)]  # (S, n)


class Accepted(NamedTuple):
    """The accepted path of each sequence; its rows in ascending order are the path from the anchor down."""

    on_path: torch.Tensor  # [S, n] bool; row 0 always
    length: torch.Tensor  # [S] int64, the anchor counted
    bonus: torch.Tensor  # [S] int64, the draw at the path's last row


@op
def tree_accept(parents: torch.Tensor, tokens: torch.Tensor, drawn: torch.Tensor, rows: torch.Tensor) -> Accepted:
    """Rows from `rows` on are padding: never on a path. A row is on the path if it and all above it were drawn."""
    n = parents.shape[1]
    place = torch.arange(n, device=parents.device)
    matches = (tokens == drawn.gather(1, parents.clamp(min=0))) & (place < rows[:, None])
    matches[:, 0] = True
    masks = tree_mask(parents).mask
    bits = torch.tensor(BITS[:n], device=parents.device)
    matched = torch.where(matches, bits, 0).sum(1, keepdim=True)  # distinct bits: the sum is their union
    on_path = (masks & ~matched) == 0
    last = torch.where(on_path, place, 0).amax(1, keepdim=True)
    return Accepted(on_path, on_path.sum(1), drawn.gather(1, last)[:, 0])


def accept_walk(parents: Sequence[int], tokens: Sequence[int], drawn: Sequence[int]) -> list[int]:
    """The path of one sequence, [0, ...] ascending; the bonus is `drawn[path[-1]]`. All three by row, [n], as above.

    One pass: parents come before children, so whether a row's parent ends the path so far is known when it is met.
    """
    path = [0]
    row, wanted = 0, drawn[0]
    for i in range(1, len(parents)):
        if parents[i] == row and tokens[i] == wanted:
            row, wanted = i, drawn[i]
            path.append(i)
    return path


UNDRAWN = -1  # no token


class WalkRows(NamedTuple):
    """One sequence's rows of a step's logits: the anchor, and the nodes of its tree if it has one."""

    first: int  # the anchor's row; the others follow it
    parents: Sequence[int]  # as above, the anchor's included
    tokens: Sequence[int]
    law: Law  # of the anchor's row; a row at depth d draws the token d positions later


class Walked(NamedTuple):
    """Where the draws led."""

    path: list[int]  # rows from the anchor down, ascending, counted from the anchor
    bonus: int  # the draw at its last row


def walk_trees(logits: torch.Tensor, trees: Sequence[WalkRows]) -> list[Walked]:
    """Draws from `logits` [R, V] and follows the draws down every tree. ValueError as `sample`.

    Level by level, all trees together. Greedy rows cost next to nothing and are all drawn with the first level.
    """
    drawn = [[UNDRAWN] * len(tree.tokens) for tree in trees]
    depths = [depths_of(tree.parents) for tree in trees]
    first = [range(1 if tree.law.temperature > 0 else len(tree.tokens)) for tree in trees]
    wanted = [(n, row) for n, rows in enumerate(first) for row in rows]
    while wanted:
        places = [trees[n].first + row for n, row in wanted]
        laws = [trees[n].law for n, _ in wanted]
        laws = [
            law._replace(position=law.position + depths[n][row]) for law, (n, row) in zip(laws, wanted, strict=True)
        ]
        tokens = sample(logits if places == list(range(len(logits))) else logits[places], laws).tolist()
        for (n, row), token in zip(wanted, tokens, strict=True):
            drawn[n][row] = token
        ends = [(n, path_of(tree, drawn[n])[-1]) for n, tree in enumerate(trees)]
        wanted = [(n, row) for n, row in ends if drawn[n][row] == UNDRAWN]
    paths = [path_of(tree, tokens) for tree, tokens in zip(trees, drawn, strict=True)]
    return [Walked(path, tokens[path[-1]]) for path, tokens in zip(paths, drawn, strict=True)]


def path_of(tree: WalkRows, drawn: Sequence[int]) -> list[int]:
    return accept_walk(tree.parents, tree.tokens, drawn)


def depths_of(parents: Sequence[int]) -> list[int]:
    """Of each row; the anchor's is 0."""
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return depths
