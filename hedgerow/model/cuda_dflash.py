"""The drafter on a GPU: DFlashModel's interface in bfloat16. A draft is one pass, captured as a graph by its bucket.

Features are kept on the host until their sequence drafts, and then go through in the same pass; many go at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import torch

from hedgerow.model.cuda_cache import Arena
from hedgerow.model.cuda_draft_state import (
    LEAST_PAGES,
    CudaDraftState,
    check_draft,
    fill_blocks,
    fill_features,
    take_waiting,
)
from hedgerow.model.cuda_draft_step import DraftFields, DraftRoom, DraftShape, DraftStep, split_draft
from hedgerow.model.cuda_draft_weights import DraftWeights
from hedgerow.model.cuda_graph import Device, Kept, Recorded, inference, prepare_all
from hedgerow.model.cuda_pairs import CudaSelector
from hedgerow.model.cuda_plan import SEQUENCES, Ints, at_least
from hedgerow.model.cuda_trees import NODES, CudaTrees, build, fill_trees, read_trees
from hedgerow.model.cuda_weights import Reader
from hedgerow.model.dflash import check_append
from hedgerow.model.draft_config import DraftConfig
from hedgerow.model.fields import ConfigError
from hedgerow.model.loader import Checkpoint, checkpoint_hash
from hedgerow.model.proposer import FromLogits, Proposed
from hedgerow.model.selector import Selector
from kernels.gpu.follow import one_after_another
from kernels.gpu.row_layout import PAGE
from kernels.tree_build import PlainTree

FEATURES = (8, 32, 128, 512, 1024)  # rows of one pass are rounded up to these
MOST_FEATURES = FEATURES[-1]
FLUSH_FROM = 64  # rows of one sequence that wait for its next draft: of more, each few chunks would make one step late
LEAST_SEQUENCES = 8  # of a room
MOST_CLOSE = 4  # sequences of a pass whose kernels are launched before their turn; with more that costs time
MOST_RESERVED = 1 << 30  # bytes of pages that `prepare` takes at most


class Pass(NamedTuple):
    """A pass of one shape, where its integers go, and where its trees are."""

    asked: DraftFields[Ints]  # on the host
    back: Ints  # [sequences, 3 nodes + 1]
    launch: Recorded


class CudaDFlash:
    """Immutable once loaded; states are their callers'; calls take turns."""

    def __init__(
        self,
        folder: Path,
        target_folder: Path,
        device: torch.device,
        dtype: torch.dtype = torch.bfloat16,
        amplitude: float | None = None,
        projected: bool = False,
    ) -> None:
        c = self.config = DraftConfig.from_folder(folder)
        if c.head_dim < 16 or c.head_dim & (c.head_dim - 1):
            raise ConfigError(
                folder / "config.json", "head_dim", c.head_dim, "a power of two from 16 on, on a CUDA device"
            )
        self.feature_layers, self.block_size, self.vocab_size = c.target_layer_ids, c.block_size, c.vocab_size
        self.feature_width = c.hidden_size if projected else c.feature_width
        self.checkpoint_hash = checkpoint_hash(folder)
        self.device, self.dtype = Device(device), dtype
        self._weights, self.target_head_hash = DraftWeights.load(
            c, Reader(Checkpoint(folder), device, dtype), target_folder, amplitude, projected
        )
        width = 2 * c.num_key_value_heads * c.head_dim
        self._arena = Arena(c.num_hidden_layers, width, self.device, dtype)
        self._given = self.device.host_room(MOST_FEATURES, self.feature_width, of=torch.float32)
        self._trees = CudaTrees(c.block_size - 1, c.vocab_size, self.device)
        self._passes, self._grown = Kept(self._make), 0
        self._selector: CudaSelector | None = None
        self._turn = threading.Lock()
        self._sent = self.device.mark()  # the end of the last pass that was not waited for
        self._make_room(LEAST_SEQUENCES)

    @classmethod
    def load(
        cls,
        folder: Path,
        target_folder: Path,
        device: torch.device,
        amplitude: float | None = None,
        projected: bool = False,
    ) -> CudaDFlash:
        """Raises ConfigError or CheckpointError as DFlashModel does, also for a size without code here."""
        return cls(folder, target_folder, device, amplitude=amplitude, projected=projected)

    def new_state(self) -> CudaDraftState:
        """An empty context that starts at position 0."""
        return CudaDraftState(self._arena)

    @inference
    def append(self, state: CudaDraftState, features: torch.Tensor, position: int) -> None:
        """Appends features [n, feature_width] of positions position .. position+n-1; position is the state's end."""
        check_append(features, position, state.end, self.feature_width, self.config.max_position_embeddings)
        rows = features.shape[0]
        if rows == 0:
            return
        state.waiting.append(features.cpu().numpy().copy())
        state.end += rows
        with self._turn:
            state.reserve()
            if state.behind >= FLUSH_FROM:
                self._flush([state], 0)

    @inference
    def draft(self, states: Sequence[CudaDraftState], anchors: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        """Logits [S, block_size - 1, vocabulary] float32 on the device, for positions P+1 .. P+L of each sequence.

        The anchor of a sequence stands at its position P; the context is what was appended, all before P. The next
        call overwrites the logits. InvalidRequest for an anchor or a position that makes no sense.
        """
        check_draft(states, anchors, positions, self.config)
        with self._turn:
            self._start(states, anchors, positions, 0).launch()
            self._sent = self.device.mark()
            return self._logits[: len(states)]

    @inference
    def draft_states(
        self, states: Sequence[CudaDraftState], anchors: Sequence[int], positions: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`draft`'s logits, and the normed states [S, block_size - 1, hidden] that they are of."""
        logits, rows = self.draft(states, anchors, positions), self._room.normed[: len(states) * self.block_size]
        return logits, rows.view(len(states), self.block_size, -1)[:, 1:]

    @inference
    def propose(
        self,
        states: Sequence[CudaDraftState],
        anchors: Sequence[int],
        positions: Sequence[int],
        budgets: Sequence[int],
        caps: Sequence[int],
        pairs: bool = False,
    ) -> Proposed:
        """`draft` and `trees` in one pass: one copy in, one launch, one wait. `pairs`: conditional trees, by what was
        given to `select`."""
        if max(budgets) > NODES[-1]:
            return FromLogits(self).propose(states, anchors, positions, budgets, caps)
        check_draft(states, anchors, positions, self.config)
        with self._turn:
            step = self._start(states, anchors, positions, at_least(max(budgets), NODES), pairs)
            fill_trees(step.asked.budgets, step.asked.caps, budgets, caps)
            step.launch()
            self.device.wait()
            return Proposed(read_trees(step.back[: len(states)]), time.perf_counter_ns())

    def select(self, selector: Selector) -> None:
        """What conditional trees go by; `prepare` records these then, and none of marginals."""
        with self._turn:
            self.device.wait()
            self._selector = CudaSelector(selector, self.device.place, self.dtype)
            self._passes.clear()

    def _start(
        self,
        states: Sequence[CudaDraftState],
        anchors: Sequence[int],
        positions: Sequence[int],
        nodes: int,
        pairs: bool = False,
    ) -> Pass:
        """A pass of these, filled."""
        self._flush(states, MOST_FEATURES)
        rows = self._gather(states)
        step = self._pass(self._shape(rows, len(states), nodes, pairs))
        fill_features(step.asked, states, rows)
        fill_blocks(step.asked, states, anchors, positions)
        return step

    @inference
    def trees(self, logits: torch.Tensor, budgets: Sequence[int], caps: Sequence[int]) -> list[PlainTree]:
        """One tree a sequence from `draft`'s logits, as `kernels.tree_build.plain_trees`."""
        with self._turn:
            return self._trees(logits, budgets, caps)

    @property
    def waited(self) -> float:
        return self.device.waited

    @property
    def positions(self) -> int:
        return self.config.max_position_embeddings

    def warm(self, sizes: Sequence[int]) -> None:
        """Nothing: `prepare` has done it, or the first drafts of each shape do."""

    @inference
    def prepare(self, sequences: int, each: int, prompt_rows: int = 0) -> None:
        """Compiles and records every pass of up to `sequences` sequences and `each` nodes. The log tells how far."""
        with self._turn:
            row = self._arena.data.shape[0] * self._arena.data.shape[2] * self._arena.data.element_size()
            most = max(LEAST_PAGES, min(sequences * self._most_pages, MOST_RESERVED // (row * PAGE)))
            if self._arena.pages < most:
                more = most - self._arena.pages
                self._arena.give(self._arena.take(more), more)
            sizes = [size for size in SEQUENCES if size < sequences] + [at_least(sequences, SEQUENCES)]
            nodes = [n for n in NODES if n < each] + [at_least(min(each, NODES[-1]), NODES)]
            shapes = [self._shape([rows], 0, 0) for rows in FEATURES]
            pairs = self._selector is not None
            shapes += [self._shape([rows], q, n, pairs) for n in nodes for q in sizes for rows in (0, *FEATURES)]
            self._pass(shapes[-1])  # makes room
            prepare_all("a draft", shapes, lambda shape: self._pass(shape).launch, self.device)

    @property
    def _most_pages(self) -> int:
        """Of one sequence."""
        return -(-(self.config.max_position_embeddings + PAGE) // PAGE)

    def _flush(self, states: Sequence[CudaDraftState], most: int) -> None:
        """Computes what waits, sequence by sequence, until at most `most` rows do."""
        waiting = sum(state.behind for state in states)
        for state in states:
            if waiting <= most:
                return
            waiting -= state.behind
            while state.waiting:
                rows = self._gather([state])
                step = self._pass(self._shape(rows, 0, 0))
                fill_features(step.asked, [state], rows)
                step.launch()
                self._sent = self.device.mark()

    def _gather(self, states: Sequence[CudaDraftState]) -> list[int]:
        """Puts waiting rows, at most a pass's, into `_given`; how many of each state."""
        self.device.reach(self._sent)  # what was put there last may still be on its way
        return take_waiting(states, self._given.numpy())

    def _shape(self, rows: Sequence[int], sequences: int, nodes: int, pairs: bool = False) -> DraftShape:
        features = sum(rows)
        return DraftShape(
            at_least(features, FEATURES) if features else 0,
            at_least(sequences, SEQUENCES) if sequences else 0,
            self.config.block_size,
            self._most_pages,
            nodes,
            pairs,
        )

    def _pool(self) -> torch.Tensor:
        c, data = self.config, self._arena.data
        return data.view(*data.shape[:2], 2, c.num_key_value_heads, c.head_dim)

    def _pass(self, shape: DraftShape) -> Pass:
        """What a larger pool or room has made wrong is made again."""
        if shape.sequences * shape.block > self._room.rows:
            self._make_room(shape.sequences)
        if self._grown != self._arena.grown:
            self._grown = self._arena.grown
            self._passes.clear()
        return self._passes[shape]

    def _make(self, shape: DraftShape) -> Pass:
        sent, block = self.device.host_room(shape.words), self.device.room(shape.words)
        room, given, logits = self._room, self._given, self._logits[: shape.sequences]
        step = DraftStep(self.config, self._weights, room, shape, split_draft(block, shape))
        lines = (shape.sequences if shape.nodes else 0, 3 * shape.nodes + 1)
        back, out = self.device.host_room(*lines), self.device.room(*lines)
        asked = split_draft(sent.numpy(), shape)
        asked.slot[:] = -1  # padding, until it is filled
        asked.tokens.reshape(-1, shape.block)[:, 1:] = self.config.mask_token_id

        def build_pairs(out: torch.Tensor) -> None:
            assert self._selector is not None
            f, drafted = step.fields, room.drafted[: logits.shape[0] * logits.shape[1]]
            anchors = f.tokens.view(shape.sequences, shape.block)[:, 0]
            self._selector.build(room.normed, drafted, logits, anchors, f.budgets, f.caps, out)

        def launch() -> None:
            block.copy_(sent, non_blocking=True)
            room.came[: shape.features].copy_(given[: shape.features], non_blocking=True)
            with one_after_another() if shape.sequences > MOST_CLOSE else nullcontext():
                step.run(self._pool())
                if shape.pairs:
                    build_pairs(out)
                elif shape.nodes:
                    build(logits, step.fields.budgets, step.fields.caps, out)
            if shape.nodes:
                back.copy_(out, non_blocking=True)

        return Pass(asked, back.numpy(), self.device.recorded(launch))

    def _make_room(self, sequences: int) -> None:
        c = self.config
        rows = sequences * c.block_size
        self._room = DraftRoom(
            c, MOST_FEATURES, rows, self._most_pages, self.device.place, self.dtype, self.feature_width
        )
        drafted = sequences * (c.block_size - 1)
        self._logits = self._room.logits[:drafted].view(sequences, c.block_size - 1, c.vocab_size)
        self._trees.attach(self._logits)
        self._passes.clear()
