"""The most probable prefixes of a product of per-depth marginals, as a tree: DDTree (arXiv 2604.12989), heap-free.

    sigma(rho) = sum_{d} q[d, rho_d]                 rho: a tuple of ranks, one a depth; q: log-marginals, best first
    tree       = the `budget` tuples first by (-sigma, rho)    rho in lexicographic order breaks ties

logprobs, tokens [S, L, K], budgets, caps [S] -> tokens, parents, logprobs [S, N], counts [S].

A tuple is dominated by every tuple that is no longer and nowhere of a worse rank, itself included: with ranks from 1,
sum_k prod_{i<=k} rho_i of them. None of these comes after it, so only tuples with at most N dominators can be among the
first N. That set depends on nothing but (L, N): 285 tuples for (7, 16), 6,005 for (7, 64). It is listed once, in
lexicographic order; a build is one gather, L sums and one top-N, with no loop or branch that depends on data.
`tree_build_heap` is the paper's best-first search and gives the same nodes in the same order, bit for bit: both add the
terms of sigma in depth order.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import pad

from kernels.dispatch import op

TEST_SHAPES = [(1, 7, 1), (2, 1, 63), (1, 7, 16), (3, 7, 33), (2, 15, 24), (1, 3, 128)]  # (S, L, N)
BENCH_SHAPES = [(1, 7, 8), (1, 7, 16), (1, 7, 63), (8, 7, 8), (8, 7, 16), (8, 7, 63)]


class TopLogprobs(NamedTuple):
    """The best tokens of each depth, best first; equal logits in the order of their ids."""

    logprobs: torch.Tensor  # [S, L, K] float32, at most 0
    tokens: torch.Tensor  # [S, L, K] int64


class BuiltTrees(NamedTuple):
    """Trees in best-first order, so parents come before children. Entries from `counts` on mean nothing."""

    tokens: torch.Tensor  # [S, N] int64
    parents: torch.Tensor  # [S, N] int64; -1: the anchor
    logprobs: torch.Tensor  # [S, N] float32, sigma
    counts: torch.Tensor  # [S] int64


class PlainTree(NamedTuple):
    """One tree in best-first order."""

    tokens: list[int]
    parents: list[int]
    logprobs: list[float]


@op
def top_logprobs(logits: torch.Tensor, k: int) -> TopLogprobs:
    """The `k` best tokens of each depth by (-logit, id) and their log-softmax in float32.

    logits [S, L, V] -> [S, L, min(k, V)]. NaN and +inf cannot be ranked: such rows get log-probabilities of -inf.
    """
    logits = logits.float()
    vocabulary = logits.shape[-1]
    k = min(k, vocabulary)
    values, tokens = logits.topk(min(k + 1, vocabulary))  # one more than asked for, to see a tie at the border
    tied = (values[..., 1:] == values[..., :-1]).any(-1)
    if bool(tied.any()):  # topk leaves the order of equal values open
        in_order = torch.sort(logits[tied], dim=-1, descending=True, stable=True).indices
        tokens[tied] = in_order[..., : tokens.shape[-1]]
    tokens = tokens[..., :k]
    chosen = logits.log_softmax(-1).gather(-1, tokens)
    return TopLogprobs(chosen.clamp(max=0).nan_to_num(nan=-torch.inf, neginf=-torch.inf), tokens)


class Candidates(NamedTuple):
    """The M tuples that can be among the first N, in lexicographic order."""

    terms: torch.Tensor  # [L * M] which of the L * N terms (or of the zero behind them) each depth adds
    last: torch.Tensor  # [M] the term of the last depth: the node's own token
    parent: torch.Tensor  # [M] the tuple without its last rank; M: the anchor
    worst: torch.Tensor  # [M] the worst rank of the tuple, from 0
    row: torch.Tensor  # [M] 0 .. M - 1: the low word of the sort key
    within: torch.Tensor  # [N + 1] tuples whose ranks are all below c, for c = 0 .. N


@lru_cache(maxsize=128)
def candidates(depth: int, nodes: int, device: torch.device) -> Candidates:
    """The table of trees of at most `nodes` nodes and `depth` levels; 1 ms for (7, 16), 10 ms for (7, 63)."""
    ranks = np.full((1, depth), -1, dtype=np.int64)
    product, dominators = np.ones(1, np.int64), np.zeros(1, np.int64)
    levels, parents, first = [], [], -1
    for d in range(depth):
        most = (nodes - dominators) // product  # children of each tuple: more than that have too many dominators
        above = np.repeat(np.arange(len(most)), most)
        rank = np.arange(len(above)) - np.repeat(np.cumsum(most) - most, most)
        ranks = ranks[above]
        ranks[:, d] = rank
        product = product[above] * (rank + 1)
        dominators = dominators[above] + product
        levels.append(ranks)
        parents.append(above + first)
        first = first + len(most)
    ranks = np.concatenate(levels)
    sorted_rows = np.lexsort(ranks.T[::-1])  # -1 behind a tuple's end: a prefix comes before what continues it
    rows = len(ranks)
    place = np.empty(rows + 1, np.int64)
    place[sorted_rows], place[-1] = np.arange(rows), rows
    parent = place[np.concatenate(parents)[sorted_rows]]
    ranks = ranks[sorted_rows]
    terms = np.where(ranks >= 0, np.arange(depth) * nodes + ranks, depth * nodes)
    last = np.where(ranks >= 0, terms, -1).max(1)
    worst = ranks.max(1)
    within = np.searchsorted(np.sort(worst), np.arange(nodes + 1))
    arrays = (terms.T.reshape(-1), last, parent, worst, np.arange(rows), within)
    return Candidates(*(torch.from_numpy(np.ascontiguousarray(array)).to(device) for array in arrays))


@op
def tree_build(
    logprobs: torch.Tensor, tokens: torch.Tensor, budgets: torch.Tensor, caps: torch.Tensor, nodes: int
) -> BuiltTrees:
    """Builds every sequence's tree in one call.

    logprobs [S, L, K] float32, at most 0 and descending along K; tokens [S, L, K] int64, distinct along K;
    budgets, caps [S] int64: the most nodes, and the most ranks at one depth (0: no cap); N = `nodes` >= every budget.
    A tree has fewer nodes than its budget only where there are no more prefixes under its cap.
    """
    sequences, depth, width = logprobs.shape
    if nodes == 0:
        empty = tokens.new_empty((sequences, 0))
        return BuiltTrees(empty, empty, logprobs.new_empty((sequences, 0)), torch.zeros_like(budgets))
    table = candidates(depth, nodes, logprobs.device)
    rows = len(table.last)
    caps = torch.where(caps > 0, caps, nodes).clamp(max=min(width, nodes))
    if width < nodes:
        logprobs, tokens = pad(logprobs, (0, nodes - width), value=-torch.inf), pad(tokens, (0, nodes - width))
    terms = pad(logprobs[..., :nodes].reshape(sequences, depth * nodes), (0, 1))  # the zero behind them
    terms = terms.index_select(1, table.terms).view(sequences, depth, rows)
    sigma = terms[:, 0]
    for d in range(1, depth):  # in depth order, as the heap adds
        sigma = sigma + terms[:, d]
    chosen = _sort_key(sigma, table, caps).topk(nodes, largest=False).indices
    place = torch.full((sequences, rows + 1), -1, dtype=torch.int64, device=logprobs.device)
    place.scatter_(1, chosen, torch.arange(nodes, device=logprobs.device).expand(sequences, nodes))
    return BuiltTrees(
        tokens[..., :nodes].reshape(sequences, depth * nodes).gather(1, table.last.take(chosen)),
        place.gather(1, table.parent.take(chosen)),
        sigma.gather(1, chosen),
        torch.minimum(budgets, table.within.take(caps)),
    )


def _sort_key(sigma: torch.Tensor, table: Candidates, caps: torch.Tensor) -> torch.Tensor:
    """[S, M] int64, all distinct, first comes first: -sigma above, the place in lexicographic order below.

    The bits of a float that is not negative, read as an integer, are in the float's order.
    """
    cost = (0.0 - sigma).view(torch.int32).to(torch.int64)
    cost = torch.where(table.worst < caps[:, None], cost, 0x7FFFFFFF)  # what the cap forbids comes last
    return (cost << 32) | table.row


def tree_build_heap(
    logprobs: Sequence[Sequence[float]], tokens: Sequence[Sequence[int]], budget: int, cap: int = 0
) -> PlainTree:
    """The oracle: best-first search with a heap, one sequence. Arguments as those of `tree_build`, without S."""
    q = np.asarray(logprobs, dtype=np.float32)
    depth, width = q.shape
    ranks = min(cap, width) if cap > 0 else width

    def entry(rho: tuple[int, ...]) -> tuple[np.float32, tuple[int, ...]]:
        sigma = np.float32(0)
        for d, rank in enumerate(rho):
            sigma = sigma + q[d, rank]
        return -sigma, rho

    heap = [entry((0,))]
    number: dict[tuple[int, ...], int] = {(): -1}
    tree = PlainTree([], [], [])
    while heap and len(tree.tokens) < budget:
        cost, rho = heapq.heappop(heap)
        number[rho] = len(tree.tokens)
        tree.tokens.append(int(tokens[len(rho) - 1][rho[-1]]))
        tree.parents.append(number[rho[:-1]])
        tree.logprobs.append(float(-cost))
        if rho[-1] + 1 < ranks:
            heapq.heappush(heap, entry((*rho[:-1], rho[-1] + 1)))
        if len(rho) < depth:
            heapq.heappush(heap, entry((*rho, 0)))
    return tree


# Sizes at which `plain_trees` builds: each has a table of its own.
BUILD_SIZES = (4, 8, 12, 16, 24, 32, 48, 63, 96, 128)


def build_size(budget: int) -> int:
    return next(size for size in BUILD_SIZES if size >= budget)


def plain_trees(logits: torch.Tensor, budgets: Sequence[int], caps: Sequence[int]) -> list[PlainTree]:
    """From a block's logits [S, L, V] to one tree a sequence. Budgets of 128 nodes at most; caps as in `tree_build`."""
    if not budgets:
        return []
    ranks = max(min(cap or budget, budget) for budget, cap in zip(budgets, caps, strict=True))
    best = top_logprobs(logits, max(ranks, 1))
    built = tree_build(best.logprobs, best.tokens, torch.tensor(budgets), torch.tensor(caps), build_size(max(budgets)))
    tokens, parents, logprobs = built.tokens.tolist(), built.parents.tolist(), built.logprobs.tolist()
    return [PlainTree(tokens[s][:n], parents[s][:n], logprobs[s][:n]) for s, n in enumerate(built.counts.tolist())]
