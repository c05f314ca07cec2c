"""FedSteps on the host, of any target and drafter, for tests of the engine that drives them.

Computes what the kernels of kernels/gpu/fed_step.py and the steps between them do, at once and from its own state
alone: what the engine knows is not looked at, so a step that is launched before the last one was read is as far from
the engine's knowledge as on a device.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hedgerow.model.batch import SequenceRows
from hedgerow.model.fed import FedLine, FedMember
from hedgerow.model.interface import Draft, Target, Verified
from kernels.tree_accept import WalkRows
from kernels.tree_build import PlainTree

PAGE, PLACES = 64, (1, 4, 8, 16, 32, 64)
HORIZON = 60  # as the device's, and sooner reached
Spoil = Callable[[int, PlainTree], PlainTree]  # of a member's tree


@dataclass
class Slot:
    member: FedMember
    anchor: int
    prefix: int
    until: int  # positions of its context that have a page
    live: bool = True
    features: list[torch.Tensor] = field(default_factory=list)  # that its context lacks


class HostFed:
    """`spoil` changes trees behind the drafter; `fails` says whether the n-th launch raises."""

    def __init__(
        self,
        target: Target,
        draft: Draft,
        spoil: Spoil | None = None,
        fails: Callable[[int], bool] = lambda n: False,
    ) -> None:
        self.block, self.most_nodes, self.most_members = draft.block_size, 63, 64
        self.positions, self.stale = draft.config.max_position_embeddings, False
        self._target, self._draft, self._spoil, self.fails = target, draft, spoil, fails
        self._slots: list[Slot] = []
        self._cache: Any = None
        self.launched = self.lines = self.computes = 0
        self.crowded = False
        self.members: list[int] = []  # of each line

    def prepare(self, sequences: int, budgets: Sequence[int]) -> None:
        pass

    def enter(self, members: Sequence[FedMember], cache: Any) -> Sequence[int]:
        for member in members:
            assert member.context is None or member.context.end == member.prefix
            assert 0 <= member.budget <= self.most_nodes
            assert member.context is not None or member.budget == 0
        until = [min(m.last, m.prefix + HORIZON) for m in members]
        self._slots = [Slot(m, m.anchor, m.prefix, end) for m, end in zip(members, until, strict=True)]
        self._cache = cache
        self.lines += 1
        self.members.append(len(members))
        return until

    def suits(self, asked: Sequence[int]) -> bool:
        count = sum(most >= 0 for most in asked)
        rows = sum(slot.member.budget + 1 for slot in self._slots)
        same = bisect.bisect_left(PLACES, count) == bisect.bisect_left(PLACES, len(self._slots))
        return same and sum(most for most in asked if most >= 0) + count <= rows

    def launch(self, asked: Sequence[int]) -> list[FedLine]:
        self.launched += 1
        if self.fails(self.launched):
            raise RuntimeError("the card is on fire")
        for slot, most in zip(self._slots, asked, strict=True):
            slot.live &= most >= 0
        live = [slot for slot in self._slots if slot.live]
        trees = self._trees([(slot, most) for slot, most in zip(self._slots, asked, strict=True) if slot.live])
        lines = dict(zip(map(id, live), self._verify(live, trees), strict=True))
        return [lines.get(id(slot), FedLine((), (), (), (), -1)) for slot in self._slots]

    def collect(self, launched: list[FedLine]) -> list[FedLine]:
        return launched

    def compute(self, rows: Sequence[SequenceRows], cache: Any, trees: Sequence[WalkRows] = ()) -> Verified | None:
        """`crowded`: there is no room for them."""
        if self.crowded:
            return None
        self.computes += 1
        if self.fails(-self.computes):
            raise RuntimeError("the card is on fire")
        done = self._target.forward(rows, cache)
        walked = self._target.walk(done.logits, trees) if trees else []
        return Verified(walked, done.features.clone())

    def computed(self, launched: Verified) -> Verified:
        return launched

    def leave(self, ends: Sequence[int]) -> None:
        for slot, end in zip(self._slots, ends, strict=True):
            context: Any = slot.member.context
            if context is None:
                continue
            if slot.live:
                self._append(slot)
            if context.end != end:
                context.reset(end)
        self._slots = []

    def _append(self, slot: Slot) -> None:
        context: Any = slot.member.context
        if context is not None and slot.features:
            rows = torch.cat(slot.features)
            assert context.end + len(rows) <= slot.until, "there is no page for it"
            self._draft.append(context, rows, context.end)
        slot.features.clear()

    def _trees(self, asked: Sequence[tuple[Slot, int]]) -> list[PlainTree]:
        trees = []
        for n, (slot, most) in enumerate(asked):
            self._append(slot)
            tree = PlainTree([], [], [])
            if most:
                context: Any = slot.member.context
                assert context.end == slot.prefix
                logits = self._draft.draft([context], [slot.anchor], [slot.prefix])
                (tree,) = self._draft.trees(logits, [most], [slot.member.cap])
            trees.append(self._spoil(n, tree) if self._spoil else tree)
        return trees

    def _verify(self, live: Sequence[Slot], trees: Sequence[PlainTree]) -> list[FedLine]:
        if not live:
            return []
        vocabulary, asked, walks, first = self._target.config.vocab_size, [], [], 0
        for slot, tree in zip(live, trees, strict=True):
            own = [token if 0 <= token < vocabulary else 0 for token in tree.tokens]
            up = [parent if -1 <= parent < n else -1 for n, parent in enumerate(tree.parents)]
            tokens, parents = [slot.anchor, *own], [-1, *(parent + 1 for parent in up)]
            m = slot.member
            asked.append(SequenceRows(slot.prefix, m.pages, tokens, parents, range(len(tokens)), limit=m.limit))
            walks.append(WalkRows(first, parents, tokens, m.law._replace(position=slot.prefix + 1)))
            first += len(tokens)
        done = self._target.forward(asked, self._cache)
        features, walked = done.features, self._target.walk(done.logits, walks)
        lines, moves = [], []
        for slot, tree, walk, rows in zip(live, trees, walked, walks, strict=True):
            pages = slot.member.pages
            at = [pages[p // PAGE] * PAGE + p % PAGE for p in range(slot.prefix, slot.prefix + len(rows.tokens))]
            moves += [(at[row], at[i]) for i, row in enumerate(walk.path) if row != i]
            slot.features = [features[[rows.first + row for row in walk.path]].clone()]
            slot.anchor, slot.prefix = walk.bonus, slot.prefix + len(walk.path)
            slot.live = slot.prefix <= slot.member.last
            lines.append(FedLine(tree.tokens, tree.parents, tree.logprobs, walk.path, walk.bonus))
        if moves:
            self._cache.copy([source for source, _ in moves], [target for _, target in moves])
        return lines
