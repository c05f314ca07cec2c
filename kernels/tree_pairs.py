"""The most probable paths where a token's probability depends on the one before it: conditional trees.

    sigma(rho) = sum_d logprobs[d, c_{d-1}, rho_d]      c_d = choice[d, c_{d-1}, rho_d], the candidate that rank rho_d
                                                        names after candidate c_{d-1}; before the first stands row 0
    tree       = the `budget` paths first by (-sigma, rho)    rho in lexicographic order breaks ties

logprobs, choice [S, L, K, K], tokens [S, L, K], budgets [S] -> tokens, parents, logprobs [S, N], counts [S].

Such paths have no table of candidates: how good a rank is depends on the path. But no path is better than the one that
it continues, so at each depth the parents of the first N are among the first N of the depth above. `tree_pairs` keeps
these, level by level, and picks the tree from all levels; `best_first`, the oracle, takes scores that depend on the
whole path. Both add the terms of sigma in depth order and give the same nodes in the same order. What has probability
zero is in no tree.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

import numpy as np
import torch

from kernels.dispatch import op
from kernels.tree_build import BuiltTrees, PlainTree

TEST_SHAPES = [(1, 7, 16, 1), (2, 1, 16, 63), (1, 7, 16, 16), (3, 7, 16, 33), (2, 12, 4, 24), (1, 7, 16, 63)]
BENCH_SHAPES = [(1, 7, 16, 15), (1, 7, 16, 63), (8, 7, 16, 15), (8, 7, 16, 63), (64, 7, 16, 15), (64, 7, 16, 63)]
MOST_DEPTH = 12  # five bits a rank, in one word
MOST_WIDTH = 31
RANK_BITS = 5
NEVER = 0x7F800000  # the cost of probability zero: the bits of infinity
Path = tuple[int, ...]


def best_first(children: Callable[[Path], Sequence[tuple[float, int]]], budget: int) -> tuple[PlainTree, list[Path]]:
    """The oracle: best-first search over scores that may depend on the whole path.

    `children`: (log-probability, token) of each child of a path of ranks, best first; none below the last depth. Gives
    the tree and its paths.
    """
    scores = dict[Path, Sequence[tuple[float, int]]]()
    heap: list[tuple[np.float32, Path]] = []

    def push(path: Path, above: np.float32) -> None:
        parent = path[:-1]
        if parent not in scores:
            scores[parent] = children(parent)
        if path[-1] < len(scores[parent]):
            sigma = above + np.float32(scores[parent][path[-1]][0])
            if sigma > -np.inf:
                heapq.heappush(heap, (-sigma, path))

    number: dict[Path, int] = {(): -1}
    sigmas: dict[Path, np.float32] = {(): np.float32(0)}
    tree, paths = PlainTree([], [], []), list[Path]()
    push((0,), sigmas[()])
    while heap and len(paths) < budget:
        cost, path = heapq.heappop(heap)
        number[path], sigmas[path] = len(paths), -cost
        paths.append(path)
        tree.tokens.append(scores[path[:-1]][path[-1]][1])
        tree.parents.append(number[path[:-1]])
        tree.logprobs.append(float(-cost))
        push((*path[:-1], path[-1] + 1), sigmas[path[:-1]])
        push((*path, 0), sigmas[path])
    return tree, paths


def tree_pairs_heap(
    logprobs: Sequence[Sequence[Sequence[float]]],
    choice: Sequence[Sequence[Sequence[int]]],
    tokens: Sequence[Sequence[int]],
    budget: int,
) -> PlainTree:
    """One sequence by `best_first`. Arguments as those of `tree_pairs`, without S."""
    depth = len(tokens)
    named: dict[Path, int] = {(): 0}

    def children(path: Path) -> Sequence[tuple[float, int]]:
        d = len(path)
        if d == depth:
            return ()
        if d:
            named[path] = choice[d - 1][named[path[:-1]]][path[-1]]
        row = named[path]
        return [(logprobs[d][row][r], tokens[d][c]) for r, c in enumerate(choice[d][row])]

    return best_first(children, budget)[0]


@op
def tree_pairs(
    logprobs: torch.Tensor, choice: torch.Tensor, tokens: torch.Tensor, budgets: torch.Tensor, nodes: int
) -> BuiltTrees:
    """Builds every sequence's tree in one call, with no loop or branch that depends on data.

    logprobs [S, L, K, K] float32, at most 0 and descending along the last; choice the same shape, int64: the candidate
    of each rank, all different in a row; of the first level only row 0 counts. tokens [S, L, K] int64; budgets [S];
    N = `nodes` >= every budget. L at most 12, K at most 31.
    """
    sequences, depth, width = tokens.shape
    assert depth <= MOST_DEPTH, depth
    assert width <= MOST_WIDTH, width
    device = logprobs.device
    every = torch.arange(sequences, device=device)[:, None]
    # the level above, its nodes in lexicographic order: candidate, sigma, code of the path, place among all nodes kept
    above = torch.zeros(sequences, 1, dtype=torch.int64, device=device)
    sigma = torch.zeros(sequences, 1, device=device)
    code, place = torch.zeros_like(above), torch.full_like(above, -1)
    kept: list[tuple[torch.Tensor, ...]] = []
    for d in range(depth):
        terms = sigma[:, :, None] + logprobs[every, d, above]  # [S, n, K]
        cost = (0.0 - terms).flatten(1).contiguous().view(torch.int32).to(torch.int64)
        order = torch.arange(cost.shape[1], device=device)
        key = torch.sort((cost << 32) | order, 1).values[:, :nodes]
        at = torch.sort(key & 0xFFFFFFFF, 1).values  # back into lexicographic order
        parent, rank = at // width, at % width
        above = choice[every, d, above.gather(1, parent), rank]
        sigma = terms.flatten(1).gather(1, at)
        code = code.gather(1, parent) | ((rank + 1) << (RANK_BITS * (MOST_DEPTH - 1 - d)))
        parents = place.gather(1, parent)
        place = sum(len(part[0][0]) for part in kept) + torch.arange(at.shape[1], device=device).expand_as(at)
        kept.append((sigma, code, tokens[every, d, above], parents))
    sigmas, codes, named, parents = (torch.cat(parts, 1) for parts in zip(*kept, strict=True))
    return _first(sigmas, codes, named, parents, budgets, nodes)


def _first(
    sigmas: torch.Tensor,
    codes: torch.Tensor,
    named: torch.Tensor,
    parents: torch.Tensor,
    budgets: torch.Tensor,
    nodes: int,
) -> BuiltTrees:
    """Of the nodes kept on all levels the `nodes` first by (cost, code)."""
    cost = (0.0 - sigmas).view(torch.int32).to(torch.int64)
    by_code = torch.sort(codes, 1).indices
    order = torch.sort(cost.gather(1, by_code), dim=1, stable=True).indices
    chosen = by_code.gather(1, order)[:, :nodes]
    where = torch.zeros_like(parents).scatter_(1, chosen, torch.arange(chosen.shape[1]).to(chosen).expand_as(chosen))
    above = parents.gather(1, chosen)
    built = BuiltTrees(
        named.gather(1, chosen),
        torch.where(above < 0, -1, where.gather(1, above.clamp(min=0))),
        sigmas.gather(1, chosen),
        torch.minimum(budgets, (cost.gather(1, chosen) < NEVER).sum(1)),
    )
    missing = nodes - chosen.shape[1]
    named, above, sigmas = (torch.nn.functional.pad(part, (0, missing)) for part in built[:3])
    return BuiltTrees(named, above, sigmas, built.counts)
