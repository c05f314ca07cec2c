"""Acceptance at T=0 without running a server: greedy text, the drafter at every anchor, then the walk.

At T=0 speculation does not change the text, so all anchors of a greedy text can be drafted in one pass and
the steps walked afterwards; this is exact, budgets and shapes of trees included.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import torch
from torch import Tensor

from models.train.drafter import Drafter
from models.train.target import Target

BUDGETS = (4, 8, 12, 16, 32)


@dataclass(frozen=True)
class Marginals:
    """Per anchor: the drafter's best log-probabilities and their tokens, `[anchors, depth, k]`."""

    logprob: list[list[list[float]]]
    token: list[list[list[int]]]


def best_prefixes(logprob: list[list[float]], budget: int) -> set[tuple[int, ...]]:
    """The `budget` most probable prefixes, as rank tuples: best-first search over per-depth marginals."""
    tree: set[tuple[int, ...]] = set()
    heap: list[tuple[float, tuple[int, ...]]] = [(-logprob[0][0], (0,))]
    while heap and len(tree) < budget:
        cost, ranks = heapq.heappop(heap)
        tree.add(ranks)
        row, rank = logprob[len(ranks) - 1], ranks[-1]
        if rank + 1 < len(row):
            heapq.heappush(heap, (cost + row[rank] - row[rank + 1], (*ranks[:-1], rank + 1)))
        if len(ranks) < len(logprob):
            heapq.heappush(heap, (cost - logprob[len(ranks)][0], (*ranks, 0)))
    return tree


def ranks_of(tokens: list[list[int]], future: list[int]) -> tuple[int, ...]:
    """The rank of each future token among the drafter's best of its depth, up to the first that is absent."""
    ranks: list[int] = []
    for row, token in zip(tokens, future, strict=False):
        if token not in row:
            break
        ranks.append(row.index(token))
    return tuple(ranks)


def accepted(logprob: list[list[float]], ranks: tuple[int, ...], budget: int) -> int:
    """Accepted drafts of one step; budget 0 stands for the chain of all depths."""
    if budget == 0:
        return next((i for i, r in enumerate(ranks) if r), len(ranks))
    tree = best_prefixes(logprob, budget)
    return max((d for d in range(1, len(ranks) + 1) if ranks[:d] in tree), default=0)


def tokens_per_step(marginals: Marginals, text: list[int], budget: int) -> float:
    """Walk the text (first anchor at index 0) and return tokens per step, bonus counted."""
    position, steps, count = 0, 0, len(marginals.token)
    while position < count:
        ranks = ranks_of(marginals.token[position], text[position + 1 :])
        position += accepted(marginals.logprob[position], ranks, budget) + 1
        steps += 1
    return position / steps


@torch.inference_mode()
def draft_everywhere(target: Target, drafter: Drafter, ids: Tensor, first: int, count: int, k: int = 32) -> Marginals:
    """Draft at the anchors first .. first+count-1 of one sequence `[S]`."""
    _, kept, _ = target.hidden(ids[None], drafter.s.target_layer_ids)
    features = torch.cat(kept, -1).to(target.dtype)
    anchors = torch.arange(first, first + count, device=ids.device)[None]
    logits = target.logits(drafter(features, ids[None], anchors, target.embed)[0])
    best = logits.float().log_softmax(-1).topk(k, -1)
    return Marginals(best.values.tolist(), best.indices.tolist())
