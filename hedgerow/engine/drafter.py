"""The drafter's engine: per sequence a proposer's context, per step one tree for each sequence that wants one.

Its state is a cache. A sequence that is not held, was evicted or has a gap in its features simply starts later; what is
missing is told by `features_from`. Not thread-safe: one thread calls it.
"""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hedgerow.engine.types import DraftAnswer, DraftBatch, DraftTree, DraftWork, TreeNodes
from hedgerow.errors import InvalidRequest
from hedgerow.model.interface import Context, Draft
from hedgerow.model.proposer import Proposed, Proposer, proposer
from kernels.tree_build import BUILD_SIZES, build_size

NO_NODES = TreeNodes((), (), ())


@dataclass(frozen=True)
class DrafterConfig:
    """Limits of one DrafterEngine. Raises InvalidRequest with the field, the value and the limit."""

    max_sequences: int = 64  # whose context is kept; also the most in one batch
    max_budget: int = 63

    def __post_init__(self) -> None:
        _check("max_sequences", self.max_sequences, self.max_sequences >= 1, "at least 1")
        _check("max_budget", self.max_budget, 0 <= self.max_budget <= BUILD_SIZES[-1], f"0 to {BUILD_SIZES[-1]}")


class DrafterEngine:
    """Trees from a DFlash model, or from another proposer.

    `incarnation`: 16 random bytes, new whenever all state is gone.
    """

    def __init__(self, model: Draft | Proposer, config: DrafterConfig) -> None:
        self.config = config
        self._model = proposer(model)
        self._reach = self._model.positions
        self._states: OrderedDict[int, Context] = OrderedDict()  # least recently used first
        self.incarnation = os.urandom(16)
        self._model.warm(BUILD_SIZES[: BUILD_SIZES.index(build_size(config.max_budget)) + 1])

    @property
    def held(self) -> int:
        """Sequences whose context is held."""
        return len(self._states)

    def drop_all(self) -> None:
        """Forgets every sequence, as a restart would."""
        self._states.clear()
        self.incarnation = os.urandom(16)

    @torch.inference_mode()
    def draft(self, batch: DraftBatch) -> DraftAnswer:
        """Takes every work's features, then builds one tree for each work with a budget, in their order.

        A tree is empty where the context does not reach the anchor. A batch for another incarnation follows a state
        that is not here: no features are taken, and every sequence lacks all. InvalidRequest for a work that makes no
        sense; nothing of the batch has then been done.
        """
        self._check(batch)
        begun = time.perf_counter_ns()
        for sequence in batch.release:
            self._states.pop(sequence, None)
        if batch.drafter not in (b"", self.incarnation):
            lacking = [DraftTree(work.sequence, NO_NODES, 0) for work in batch.works if work.budget]
            return DraftAnswer(batch.step_id, lacking, self.incarnation)
        ends = [self._take(work) for work in batch.works]
        while len(self._states) > self.config.max_sequences:
            self._states.popitem(last=False)
        ready = [work for work in batch.works if work.budget and self._whole(work)]
        proposed = self._propose(ready)
        nodes = {work.sequence: TreeNodes(*tree) for work, tree in zip(ready, proposed.trees, strict=True)}
        trees = [
            DraftTree(work.sequence, nodes.get(work.sequence, NO_NODES), end)
            for work, end in zip(batch.works, ends, strict=True)
            if work.budget
        ]
        built = time.perf_counter_ns()
        return DraftAnswer(
            batch.step_id, trees, self.incarnation, proposed.forwarded_ns - begun, built - proposed.forwarded_ns
        )

    def context(self, sequence: int, position: int) -> Context | None:
        """What is held of a sequence, if it ends right before `position`."""
        state = self._states.get(sequence)
        return state if state is not None and state.end == position else None

    def _take(self, work: DraftWork) -> int:
        """Appends what is new of the work's features; gives the first position that is still missing."""
        position, rows = work.feature_position, len(work.features)
        end = position + rows
        if end > self._reach:  # nothing can be drafted from here on, and sending it again would not help
            self._states.pop(work.sequence, None)
            return end
        state = self._states.get(work.sequence)
        if state is None:
            if rows == 0:
                return 0
            state = self._states[work.sequence] = self._model.new_state()
            state.reset(position)
        self._states.move_to_end(work.sequence)
        if rows and not state.start <= position <= state.end:  # a gap, or older context after all
            state.reset(position)
        if end > state.end:
            self._model.append(state, work.features[state.end - position :], state.end)
        return state.end

    def _whole(self, work: DraftWork) -> bool:
        """Whether the context is there and ends right before the anchor."""
        state = self._states.get(work.sequence)
        return state is not None and state.end == work.anchor_position < self._reach

    def _propose(self, works: Sequence[DraftWork]) -> Proposed:
        if not works:
            return Proposed([], time.perf_counter_ns())
        return self._model.propose(
            [self._states[work.sequence] for work in works],
            [work.anchor for work in works],
            [work.anchor_position for work in works],
            [work.budget for work in works],
            [work.topk_cap for work in works],
        )

    def _check(self, batch: DraftBatch) -> None:
        count, distinct = len(batch.works), len({work.sequence for work in batch.works})
        _check("works", count, count <= self.config.max_sequences, f"at most {self.config.max_sequences} sequences")
        _check("works", count - distinct, count == distinct, "no sequence twice")
        for work in batch.works:
            self._check_work(work)

    def _check_work(self, work: DraftWork) -> None:
        width, features = self._model.feature_width, work.features
        shape = tuple(features.shape)
        wide = len(shape) == 2 and (shape[1] == width or shape[0] == 0)
        _check("features", shape, wide, f"[rows, {width}]")
        _check("features", features.dtype, features.dtype == torch.float32, "float32")
        _check("feature_position", work.feature_position, work.feature_position >= 0, "at least 0")
        _check("budget", work.budget, 0 <= work.budget <= self.config.max_budget, f"0 to {self.config.max_budget}")
        _check("topk_cap", work.topk_cap, work.topk_cap >= 0, "at least 0")
        _check("anchor", work.anchor, 0 <= work.anchor < self._model.vocab_size, f"below {self._model.vocab_size}")
        _check("anchor_position", work.anchor_position, work.anchor_position >= 0, "at least 0")
        if work.budget:
            state = self._states.get(work.sequence)
            end = max(work.feature_position + shape[0], state.end if state else 0)
            limit = f"at least {end}: every context position is below it"
            _check("anchor_position", work.anchor_position, work.anchor_position >= end, limit)


def _check(field: str, value: object, holds: bool, limit: str) -> None:
    if not holds:
        raise InvalidRequest(field, value, limit)
