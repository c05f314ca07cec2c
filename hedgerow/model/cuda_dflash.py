"""The drafter on a GPU: DFlashModel's interface in bfloat16. A draft is one pass, captured as a graph by its bucket.

Features are kept on the host until their sequence drafts, and then go through in the same pass; many go at once.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from hedgerow.errors import InvalidRequest
from hedgerow.model.draft_config import DraftConfig
from hedgerow.model.cuda_cache import Arena
from hedgerow.model.cuda_draft_step import CudaDraftLayer, DraftFields, DraftRoom, DraftShape, DraftStep, DraftWeights
from hedgerow.model.cuda_graph import Device, Kept, Recorded
from hedgerow.model.cuda_plan import bucket
from hedgerow.model.cuda_trees import CudaTrees
from hedgerow.model.cuda_weights import Reader
from hedgerow.model.dflash import check_append, rotary_tables
from hedgerow.model.fields import ConfigError
from hedgerow.model.loader import Checkpoint, checkpoint_hash, load_embedding_and_head
from kernels.gpu.row_layout import PAGE
from kernels.tree_build import PlainTree

MOST_FEATURES = 1024  # rows of one pass
FLUSH_FROM = 256  # rows of one sequence that wait for its next draft
LEAST_FEATURES = 8
LEAST_SEQUENCES = 8  # of a room
LEAST_PAGES = 256  # of a pool


class CudaDraftState:
    """A sequence's context: positions start .. end - 1 have been appended, the last of them still on the host."""

    def __init__(self, arena: Arena) -> None:
        self.arena, self.pages = arena, list[int]()
        self.waiting: list[torch.Tensor] = []  # rows of features
        self.start = self.end = 0
        weakref.finalize(self, _give_all, arena, self.pages)

    def reset(self, position: int) -> None:
        """Forgets everything; the next features are those of `position`."""
        _give_all(self.arena, self.pages)
        self.waiting.clear()
        self.start = self.end = position

    @property
    def behind(self) -> int:
        """Rows that wait."""
        return sum(map(len, self.waiting))

    def reserve(self) -> None:
        """Takes pages up to `end`."""
        needed = (self.end - 1) // PAGE - self.start // PAGE + 1
        while len(self.pages) < needed:
            if not self.arena.free:
                more = max(LEAST_PAGES, self.arena.pages)  # doubling: each move makes captured passes wrong
                self.arena.give(self.arena.take(more), more)
            self.pages.append(self.arena.take(1))


def _give_all(arena: Arena, pages: list[int]) -> None:
    for page in pages:
        arena.give(page, 1)
    pages.clear()


class Pass(NamedTuple):
    """A pass of one shape, and where its integers go."""

    asked: DraftFields  # on the host
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
        self._weights = self._read(Checkpoint(folder), target_folder, amplitude, projected)
        width = 2 * c.num_key_value_heads * c.head_dim
        self._arena = Arena(c.num_hidden_layers, width, self.device, dtype)
        self._given = self.device.host_room(MOST_FEATURES, self.feature_width, of=dtype)
        self._trees = CudaTrees(c.block_size - 1, c.vocab_size, self.device)
        self._passes, self._grown = Kept(self._make), 0
        self._turn = threading.Lock()
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

    @torch.inference_mode()
    def append(self, state: CudaDraftState, features: torch.Tensor, position: int) -> None:
        """Appends features [n, feature_width] of positions position .. position+n-1; position is the state's end."""
        check_append(features, position, state.end, self.feature_width, self.config.max_position_embeddings)
        if len(features) == 0:
            return
        state.waiting.append(features.to("cpu", copy=True))
        state.end += len(features)
        with self._turn:
            state.reserve()
            if state.behind >= FLUSH_FROM:
                self._flush([state], 0)

    @torch.inference_mode()
    def draft(self, states: Sequence[CudaDraftState], anchors: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        """Logits [S, block_size - 1, vocabulary] float32 on the device, for positions P+1 .. P+L of each sequence.

        The anchor of a sequence stands at its position P; the context is what was appended, all before P. The next
        call overwrites the logits. InvalidRequest for an anchor or a position that makes no sense.
        """
        c, count = self.config, len(states)
        if not count == len(anchors) == len(positions):
            raise InvalidRequest("states", count, "as many as anchors and positions")
        for n, (state, anchor, position) in enumerate(zip(states, anchors, positions, strict=True)):
            if not 0 <= anchor < c.vocab_size:
                raise InvalidRequest(f"anchors[{n}]", anchor, "within the vocabulary")
            if not state.end <= position < c.max_position_embeddings:
                limit = f"at least the end of its context, {state.end}, and below {c.max_position_embeddings}"
                raise InvalidRequest(f"positions[{n}]", position, limit)
        with self._turn:
            self._flush(states, MOST_FEATURES)
            rows = self._gather(states)
            step = self._pass(self._shape(rows, count))
            self._fill(step, states, rows)
            self._fill_blocks(step, states, anchors, positions)
            step.launch()
            return self._logits[:count]

    @torch.inference_mode()
    def trees(self, logits: torch.Tensor, budgets: Sequence[int], caps: Sequence[int]) -> list[PlainTree]:
        """One tree a sequence from `draft`'s logits, as `kernels.tree_build.plain_trees`."""
        with self._turn:
            return self._trees(logits, budgets, caps)

    def _flush(self, states: Sequence[CudaDraftState], most: int) -> None:
        """Computes what waits, sequence by sequence, until at most `most` rows do."""
        waiting = sum(state.behind for state in states)
        for state in states:
            if waiting <= most:
                return
            waiting -= state.behind
            while state.waiting:
                rows = self._gather([state])
                step = self._pass(self._shape(rows, 0))
                self._fill(step, [state], rows)
                step.launch()

    def _gather(self, states: Sequence[CudaDraftState]) -> list[int]:
        """Puts waiting rows, at most a pass's, into `_given`; how many of each state."""
        self.device.wait()  # what was put there last may still be on its way
        taken, parts, room = list[int](), list[torch.Tensor](), MOST_FEATURES
        for state in states:
            count = min(state.behind, room)
            room -= count
            taken.append(count)
            while count:
                rows = state.waiting.pop(0)
                if len(rows) > count:
                    state.waiting.insert(0, rows[count:])
                    rows = rows[:count]
                parts.append(rows)
                count -= len(rows)
        if parts:
            self._given[: MOST_FEATURES - room] = torch.cat(parts)
        return taken

    def _shape(self, rows: Sequence[int], sequences: int) -> DraftShape:
        features = sum(rows)
        pages = -(-(self.config.max_position_embeddings + PAGE) // PAGE)
        return DraftShape(
            max(LEAST_FEATURES, bucket(features)) if features else 0,
            bucket(sequences) if sequences else 0,
            self.config.block_size,
            pages,
        )

    def _fill(self, step: Pass, states: Sequence[CudaDraftState], rows: Sequence[int]) -> None:
        """Where the gathered rows go: each state's last, but for what still waits behind them."""
        slots, at = list[int](), list[int]()
        for state, count in zip(states, rows, strict=True):
            if count:
                end, first, pages = state.end - state.behind, state.start // PAGE, state.pages
                at += range(end - count, end)
                slots += [pages[p // PAGE - first] * PAGE + p % PAGE for p in range(end - count, end)]
        f, n = step.asked, len(slots)
        slot, place = f.slot.numpy(), f.at.numpy()
        slot[:n], slot[n:] = slots, -1
        place[:n], place[n:] = at, 0

    def _fill_blocks(
        self, step: Pass, states: Sequence[CudaDraftState], anchors: Sequence[int], positions: Sequence[int]
    ) -> None:
        f, c, count = step.asked, self.config, len(states)
        tokens = f.tokens.numpy().reshape(-1, c.block_size)
        tokens[:, 0], tokens[:, 1:] = 0, c.mask_token_id
        tokens[:count, 0] = anchors
        place = f.position.numpy().reshape(-1, c.block_size)
        place[:count] = np.array(positions)[:, None] + np.arange(c.block_size)
        place[count:] = 0
        for field in (f.start, f.end, f.anchor):
            field.zero_()
        f.start.numpy()[:count] = [state.start for state in states]
        f.end.numpy()[:count] = [state.end for state in states]
        f.anchor.numpy()[:count] = positions
        pages = f.pages.numpy()
        for n, state in enumerate(states):
            pages[n, : len(state.pages)] = state.pages

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
        room, given = self._room, self._given
        step = DraftStep(self.config, self._weights, room, shape, DraftFields.of(block, shape))

        def launch() -> None:
            block.copy_(sent, non_blocking=True)
            room.given[: shape.features].copy_(given[: shape.features], non_blocking=True)
            step.run(self._pool())

        return Pass(DraftFields.of(sent, shape), self.device.recorded(launch))

    def _make_room(self, sequences: int) -> None:
        c = self.config
        rows = sequences * c.block_size
        self._room = DraftRoom(c, MOST_FEATURES, rows, self.device.place, self.dtype, self.feature_width)
        drafted = sequences * (c.block_size - 1)
        self._logits = self._room.logits[:drafted].view(sequences, c.block_size - 1, c.vocab_size)
        self._trees.attach(self._logits)
        self._passes.clear()

    def _read(
        self, checkpoint: Checkpoint, target_folder: Path, amplitude: float | None, projected: bool
    ) -> DraftWeights:
        c, r = self.config, Reader(checkpoint, self.device.place, self.dtype)
        borrowed = load_embedding_and_head(target_folder)
        if borrowed.embedding.shape != (c.vocab_size, c.hidden_size):
            limit = f"the target's vocabulary and hidden size, {tuple(borrowed.embedding.shape)}"
            file = checkpoint.folder / "config.json"
            raise ConfigError(file, "vocab_size, hidden_size", (c.vocab_size, c.hidden_size), limit)
        self.target_head_hash = borrowed.hash
        cos, sin = (
            table[:, c.head_dim // 2 :].contiguous().to(self.device.place) for table in rotary_tables(c, amplitude)
        )
        layers = [CudaDraftLayer.load(r, n, c) for n in range(c.num_hidden_layers)]
        keys = c.num_attention_heads * c.head_dim
        return DraftWeights(
            embedding=borrowed.embedding.to(self.device.place, self.dtype),
            head=borrowed.head.to(self.device.place, self.dtype),
            fc=None if projected else r.dense(("fc.weight", (c.hidden_size, c.feature_width))),
            hidden_norm=r.dense(("hidden_norm.weight", (c.hidden_size,))),
            context_kv=torch.cat([layer.qkv[keys:] for layer in layers]),
            layers=layers,
            norm=r.dense(("norm.weight", (c.hidden_size,))),
            cos=cos,
            sin=sin,
        )
