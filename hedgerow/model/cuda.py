"""The target on a GPU: K2Model's interface in bfloat16, with bits of its own.

Every op is row-invariant (kernels/gpu): a row's bits depend on neither the rows beside it, nor the tree, the chunk, the
pages, nor the bucket that the step was padded to. Output rows attend by path D, prompts' by path P.
A step of a shape is a CUDA graph from the shape's second use on; its first takes some milliseconds, or seconds where
Triton has to compile. `prepare` meets them all. A step of trees is one graph, from its rows to the accepted paths.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from hedgerow.errors import InvalidRequest
from hedgerow.model.batch import ForwardOutput, SequenceRows
from hedgerow.model.config import K2Config
from hedgerow.model.cuda_cache import Arena, CudaCache
from hedgerow.model.cuda_graph import Device, Kept, Recorded, inference, prepare_all
from hedgerow.model.cuda_plan import MOST_SEQUENCES, Fields, Ints, Shape, Step, fill, fill_laws, in_turns, read, split
from hedgerow.model.cuda_shapes import shape_of, shapes_beside, tree_shapes
from hedgerow.model.cuda_step import CudaStep, Weights
from hedgerow.model.cuda_step_room import Room
from hedgerow.model.cuda_walk import BACK, CudaWalker, read_walks
from hedgerow.model.cuda_weights import CudaLayer, Reader, SparseMlp, check_sizes
from hedgerow.model.interface import Verified, checked_taps, shards
from hedgerow.model.k2 import rotations
from hedgerow.model.loader import Checkpoint
from kernels.gpu.row_layout import DEEPEST, PAGE
from kernels.tree_accept import Walked, WalkRows

LAW = "g5"  # of the arithmetic; the next number when a bit of any result, or a drawn token, changes
LEAST_ROOM = 512  # rows; more when a step has more
FEW_ROWS = 16  # whose features are copied sooner than a second branch of the graph begins and ends
COUNTED = 16  # of so many steps one has its experts counted


class Pass(NamedTuple):
    """A step of one shape, and where what it is asked goes."""

    asked: Fields[Ints]  # on the host
    launch: Recorded


class CudaK2:
    """Immutable once loaded; calls of `forward` take turns. `device` may be a CPU under Triton's interpreter."""

    def __init__(
        self,
        config: K2Config,
        reader: Reader,
        feature_layers: Sequence[int],
        latent_eps: float | None = None,
    ) -> None:
        c = self.config = self.share = config  # `share`: the sizes of what this process computes
        for layer in feature_layers:
            if not 0 <= layer < c.num_hidden_layers or feature_layers.count(layer) > 1:
                raise InvalidRequest("feature_layers", layer, f"distinct layers of the target's {c.num_hidden_layers}")
        check_sizes(c, reader.folder / "config.json", shards(self), reader.device.type == "cuda")
        self.feature_layers = tuple(feature_layers)
        self.feature_width = len(self.feature_layers) * c.hidden_size
        self.checkpoint_hash = reader.hash
        self.device, self.dtype = Device(reader.device), reader.dtype
        self.latent_eps = c.rms_norm_eps if latent_eps is None else latent_eps
        self.positions = c.max_position_embeddings
        self._weights = self._read(reader)
        self._arena = Arena(c.num_hidden_layers, c.latent_width, self.device, self.dtype)
        self._walker, self._turn = CudaWalker(c.vocab_size, self.device), threading.Lock()
        self._passes, self._grown = Kept(self._make), 0
        self._steps = self._counted = 0  # of the last step, rows whose experts are counted
        self._make_room(LEAST_ROOM)

    @classmethod
    def load(
        cls, folder: Path, feature_layers: Sequence[int], device: torch.device, dtype: torch.dtype = torch.bfloat16
    ) -> CudaK2:
        """Raises ConfigError or CheckpointError as K2Model does, also for a size without code here."""
        return cls(K2Config.from_folder(folder), Reader(Checkpoint(folder), device, dtype), feature_layers)

    @property
    def architecture(self) -> str:
        if not self.device.real:
            return "interpreted"
        return "cuda-sm{}{}".format(*torch.cuda.get_device_capability(self.device.place))

    @property
    def waited(self) -> float:
        return self.device.waited

    def tap(self, layers: Sequence[int]) -> None:
        """As `interface.Taps.tap`: every step is recorded anew, so this is for before `prepare`."""
        with self._turn:
            self.feature_layers = checked_taps(layers, self.feature_layers, self.config.num_hidden_layers)
            self._passes.clear()

    def new_cache(self, pages: int) -> CudaCache:
        """A cache of `pages` pages of 64 tokens for every layer."""
        with self._turn:
            return CudaCache(self._arena, pages)

    @inference
    def forward(self, rows: Sequence[SequenceRows], cache: CudaCache) -> ForwardOutput:
        """Computes all rows of a step and writes their latents into `cache`.

        Logits are on the device, features on the host; both are overwritten by the next call. Where logits are wanted,
        features are there when `walk` has returned.
        InvalidRequest for rows that make no sense or pages that are not the cache's; nothing has then been computed.
        """
        asked = self._asked(rows, cache)
        wanted = len(asked.wanted)
        if len(asked.parts) > MOST_SEQUENCES:
            return self._forward_in_turns(in_turns(rows), cache)
        with self._turn:
            self._begin(asked, shape_of(asked, self._room.rows, self._most_pages), cache).launch()
            self._count_experts(asked.rows)
            if not wanted:
                self.device.wait()
        return ForwardOutput(self._room.logits[:wanted], self._features[: asked.rows])

    def _forward_in_turns(self, turns: Sequence[Sequence[SequenceRows]], cache: CudaCache) -> ForwardOutput:
        logits, features = list[torch.Tensor](), list[torch.Tensor]()
        for rows in turns:
            done = self.forward(rows, cache)
            logits.append(done.logits.clone())
            self.device.wait()
            features.append(done.features.clone())
        return ForwardOutput(torch.cat(logits), torch.cat(features))

    @inference
    def walk(self, logits: torch.Tensor, trees: Sequence[WalkRows]) -> list[Walked]:
        """As `kernels.tree_accept.walk_trees`, by the engine's own law of rounding."""
        with self._turn:
            return self._walker(logits, trees)

    @inference
    def verify(self, rows: Sequence[SequenceRows], cache: CudaCache, trees: Sequence[WalkRows]) -> Verified:
        """`forward`, `walk` and the cache's moves, in one pass: one copy in, one launch, one wait.

        First come trees, whose rows are all wanted, then chunks of prompts, of which none is. Errors as theirs.
        """
        asked = self._asked(rows, cache)
        count = asked.outputs
        drawn = sum(asked.counts[:count])
        if not count or len(trees) != count or len(asked.wanted) != drawn or asked.wanted[-1] != drawn - 1:
            limit = "trees, all of whose rows have logits, a law for each, and behind them prompts without logits"
            raise InvalidRequest("rows", len(rows), limit)
        if len(asked.parts) > MOST_SEQUENCES:
            walked, features = self.verify(rows[:count], cache, trees)
            return Verified(walked, torch.cat([features.clone(), self.forward(rows[count:], cache).features]))
        with self._turn:
            step = self._begin(asked, shape_of(asked, self._room.rows, self._most_pages)._replace(whole=True), cache)
            fill_laws(step.asked.laws, [tree.law for tree in trees])
            step.launch()
            self._count_experts(asked.rows)
            self.device.wait()
            return Verified(read_walks(self._walks.numpy(), trees), self._features[: asked.rows])

    def experts(self) -> float | None:
        """As `interface.Routes.experts`: of the last layer, of every COUNTED-th step, once that has been waited for."""
        counted, self._counted = self._counted, 0
        return float(np.unique(self._chosen[:counted].numpy()).size) if counted else None

    @property
    def made(self) -> int:
        """As `interface.Records.made`."""
        return self.device.made

    def _count_experts(self, rows: int) -> None:
        """What the last layer's router chose goes to the host behind the step, and no step waits for it alone."""
        self._counted = (
            rows if self._steps % COUNTED == 0 and isinstance(self._weights.layers[-1].mlp, SparseMlp) else 0
        )
        self._steps += 1
        if self._counted:
            self._chosen[:rows].copy_(self._room.chosen[:rows], non_blocking=True)

    @inference
    def prepare(self, sequences: int, each: int, prompt_rows: int = 0) -> None:
        """Compiles and records every step of up to `sequences` trees of `each` rows; of others those with up to
        `prompt_rows` rows of prompts, alone and beside trees. The log tells how far it is."""
        with self._turn:
            self._prepare(sequences * each + prompt_rows)
            room, pages = self._room.rows, self._most_pages
            shapes = [
                *tree_shapes(sequences, each, room, pages),
                *shapes_beside(sequences, each, prompt_rows, room, pages),
            ]
            prepare_all("a step", list(dict.fromkeys(shapes)), lambda shape: self._passes[shape].launch, self.device)

    def _asked(self, rows: Sequence[SequenceRows], cache: CudaCache) -> Step:
        if cache.arena is not self._arena:
            raise InvalidRequest("cache", "another model's", "made by this model's new_cache")
        return read(rows, self.config.vocab_size, self.positions, cache.pages)

    def _begin(self, asked: Step, shape: Shape, cache: CudaCache) -> Pass:
        self.device.wait()  # the last step's numbers may still be on their way
        self._prepare(shape.rows)
        step = self._passes[shape]
        fill(step.asked, asked, cache.base)
        return step

    @property
    def _most_pages(self) -> int:
        """Of one sequence: every position, and a tree below the last."""
        return -(-(self.positions + DEEPEST) // PAGE)

    def _prepare(self, rows: int) -> None:
        """Makes room for `rows`. What a larger arena or room has made wrong is made again."""
        if rows > self._room.rows:
            self._make_room(rows)
        if self._grown != self._arena.grown:
            self._grown = self._arena.grown
            self._passes.clear()

    def _make_room(self, rows: int) -> None:
        vocabulary, taps = self.config.vocab_size, len(self.feature_layers)
        self._room = Room(self.share, vocabulary, taps, rows, self.device.place, self.dtype)
        self._features = self.device.host_room(rows, self.feature_width, of=torch.float32)
        self._walks = self.device.host_room(MOST_SEQUENCES, BACK)
        self._chosen = self.device.host_room(rows, self.config.num_experts_per_tok)
        self._walker.attach(self._room.logits)
        self._passes.clear()

    def _make(self, shape: Shape) -> Pass:
        sent, block = self.device.host_room(shape.words), self.device.room(shape.words)
        room, features, walks = self._room, self._features, self._walks
        step = self.step(shape, split(block, shape))
        asked = split(sent.numpy(), shape)
        asked.seq[:], asked.widths[:] = -1, PAGE  # padding, until it is filled

        def give() -> None:
            features[: shape.rows].copy_(room.features[: shape.rows], non_blocking=True)

        def tapped() -> None:  # the layers behind the last tap hide it: 0.2 ms of a K2.6's 64 rows
            with self.device.beside():
                give()

        def launch() -> None:
            block.copy_(sent, non_blocking=True)
            if shape.rows > FEW_ROWS:
                step.run(self._arena.data, tapped)
            else:
                step.run(self._arena.data)
                give()
            if shape.whole:
                walks[: shape.sequences].copy_(room.walks[: shape.sequences], non_blocking=True)
            self.device.joined()

        return Pass(asked, self.device.recorded(launch))

    def step(self, shape: Shape, fields: Fields[torch.Tensor]) -> CudaStep:
        """The pass over steps of this shape, whose block on the device `fields` are."""
        return CudaStep(self.config, self._weights, self.feature_layers, self.latent_eps, self._room, shape, fields)

    def _read(self, r: Reader) -> Weights:
        import triton

        c = self.config
        turns = torch.view_as_real(rotations(c)).movedim(-1, 0).contiguous()
        made = hashlib.sha256(turns.numpy().tobytes()).hexdigest()[:8]  # by torch, on this machine
        self.kernel_law = f"{LAW}-triton{triton.__version__}-{made}"
        cos, sin = turns.to(self.device.place)
        return Weights(
            embedding=r.dense(("model.embed_tokens.weight", (c.vocab_size, c.hidden_size))),
            layers=[CudaLayer.load(r, number, c) for number in range(c.num_hidden_layers)],
            norm=r.dense(("model.norm.weight", (c.hidden_size,))),
            head=r.dense(("lm_head.weight", (c.vocab_size, c.hidden_size))),
            cos=cos.contiguous(),
            sin=sin.contiguous(),
        )
