"""Draft trees on the verifier's side: their size, and the check that stands between a drafter and a forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NoReturn

from hedgerow.engine.types import TreeNodes
from hedgerow.errors import HedgerowError

Why = Literal[
    "over_budget",
    "length_mismatch",
    "token_out_of_range",
    "parent_out_of_range",
    "own_parent",
    "forward_parent",
    "duplicate_sibling",
    "too_deep",
    "over_topk_cap",
]


@dataclass(frozen=True)
class TreeConfig:
    """How large a tree may be. `topk_cap` 0: no cap but the budget."""

    budget: int
    topk_cap: int = 0

    @property
    def q_len(self) -> int:
        """Rows that the target verifies: the anchor's and one a node. Written here and nowhere else."""
        return self.budget + 1


@dataclass(frozen=True)
class Tree:
    """A tree that has been checked: parents before children, siblings distinct. Built by `validate_tree` or `chain`."""

    tokens: Sequence[int]
    parents: Sequence[int]  # -1: the anchor
    depth: Sequence[int]  # from 1; node i stands at the anchor's position + depth[i]

    @classmethod
    def chain(cls, tokens: Sequence[int]) -> Tree:
        """Every token the child of the one before it."""
        n = len(tokens)
        return cls(tuple(tokens), tuple(range(-1, n - 1)), tuple(range(1, n + 1)))


class InvalidTree(HedgerowError):
    """A drafter's tree that must not reach the model. `why` is one of a fixed set, fit for a counter's label."""

    def __init__(self, why: Why, node: int, value: object, limit: object) -> None:
        super().__init__(
            f"draft tree: {why} at node {node}: {value}, limit {limit}",
            metadata={"why": why, "node": node, "value": value, "limit": limit},
        )
        self.why: Why = why
        self.node = node


def validate_tree(nodes: TreeNodes, *, budget: int, topk_cap: int, max_depth: int, vocab_size: int) -> Tree:
    """A Tree of what a drafter sent, or InvalidTree.

    A cycle shows as a node whose parent is itself or comes later. At one depth a tree may hold at most `topk_cap`
    different tokens (0: any number). Log-probabilities are not looked at, but for their number. Nothing is read of a
    tree that is too long.
    """
    n = len(nodes.tokens)
    if n > budget:
        raise InvalidTree("over_budget", budget, n, budget)
    if not n == len(nodes.parents) == len(nodes.logprobs):
        raise InvalidTree("length_mismatch", n, (len(nodes.parents), len(nodes.logprobs)), n)
    tokens, parents = tuple(nodes.tokens), tuple(nodes.parents)
    depth: list[int] = []
    children: set[tuple[int, int]] = set()
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if not 0 <= token < vocab_size:
            raise InvalidTree("token_out_of_range", node, token, vocab_size)
        if not -1 <= parent < node:
            _refuse_parent(node, parent, n)
        level = depth[parent] + 1 if parent >= 0 else 1
        if level > max_depth:
            raise InvalidTree("too_deep", node, level, max_depth)
        depth.append(level)
        children.add((parent, token))
    if len(children) < n:
        raise InvalidTree("duplicate_sibling", n, n - len(children), 0)
    if topk_cap:
        _check_cap(tokens, depth, topk_cap)
    return Tree(tokens, parents, tuple(depth))


def _refuse_parent(node: int, parent: int, n: int) -> NoReturn:
    if parent == node:
        raise InvalidTree("own_parent", node, parent, node - 1)
    if -1 <= parent < n:
        raise InvalidTree("forward_parent", node, parent, node - 1)
    raise InvalidTree("parent_out_of_range", node, parent, node - 1)


def _check_cap(tokens: Sequence[int], depth: Sequence[int], topk_cap: int) -> None:
    at_depth: dict[int, set[int]] = {}
    for node, (token, level) in enumerate(zip(tokens, depth, strict=True)):
        known = at_depth.setdefault(level, set())
        known.add(token)
        if len(known) > topk_cap:
            raise InvalidTree("over_topk_cap", node, len(known), topk_cap)
