"""A drafter that knows nothing: valid trees of random shape and tokens. Exactness must not depend on who drafts."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hedgerow.engine.types import DraftAnswer, DraftBatch, DraftTree, DraftWork, TreeNodes

INCARNATION = bytes(range(16))


class RandomDrafter:
    """Trees that depend on (seed, sequence, anchor position) only, whatever else is in the batch.

    `tokens`: what nodes are drawn from, distinct; likely ones where some should be accepted. Trees keep to the budget,
    to the cap of each depth, and to `max_depth`; most are as large as these allow.
    """

    def __init__(self, seed: int, tokens: Sequence[int], max_depth: int = 7) -> None:
        self.seed, self.tokens, self.max_depth = seed, tokens, max_depth

    async def draft(self, batch: DraftBatch) -> DraftAnswer:
        trees = [
            DraftTree(work.sequence, self.tree(work), work.anchor_position) for work in batch.works if work.budget > 0
        ]
        return DraftAnswer(batch.step_id, trees, INCARNATION)

    def tree(self, work: DraftWork) -> TreeNodes:
        """At most `budget` nodes; fewer where chance keeps hitting taken places."""
        chance = random.Random(f"{self.seed}/{work.sequence}/{work.anchor_position}")
        cap = min(work.topk_cap or work.budget, len(self.tokens))
        ranks = [chance.sample(self.tokens, cap) for _ in range(self.max_depth)]  # the candidates of each depth
        tokens: list[int] = []
        parents: list[int] = []
        depth = [0]  # of node i at i + 1; the anchor's first
        for _ in range(3 * work.budget):
            parent = chance.randint(-1, len(tokens) - 1)
            level = depth[parent + 1]
            if len(tokens) == work.budget or level == self.max_depth:
                continue
            token = chance.choice(ranks[level])
            if (parent, token) not in zip(parents, tokens, strict=True):
                tokens.append(token)
                parents.append(parent)
                depth.append(level + 1)
        return TreeNodes(tokens, parents, [-float(d) for d in depth[1:]])
