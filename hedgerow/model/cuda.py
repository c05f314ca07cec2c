"""The target on a GPU: K2Model's interface in bfloat16, with bits of its own.

Every op is row-invariant (kernels/gpu): a row's bits depend on neither the rows beside it, nor the tree, the chunk, the
pages, nor the bucket that the step was padded to. One form of attention serves prompts and output alike.
A step of a shape is a CUDA graph from the shape's second use on; its first takes some milliseconds.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from hedgerow.errors import InvalidRequest
from hedgerow.model.batch import ForwardOutput, SequenceRows
from hedgerow.model.config import K2Config
from hedgerow.model.cuda_cache import Arena, CudaCache
from hedgerow.model.cuda_graph import Kept, Recorded
from hedgerow.model.cuda_plan import Fields, Ints, Shape, bucket, fill, read, split
from hedgerow.model.cuda_step import CudaStep, Room, Weights
from hedgerow.model.cuda_walk import CudaWalker
from hedgerow.model.cuda_weights import CudaLayer, Reader, check_sizes
from hedgerow.model.k2 import rotations
from hedgerow.model.loader import Checkpoint, checkpoint_hash
from kernels.gpu.row_layout import DEEPEST, PAGE
from kernels.tree_accept import Walked, WalkRows

LAW = "g1"  # of the arithmetic; the next number when a bit of any result, or a drawn token, changes
LEAST_ROOM = 512  # rows; more when a step has more


class Pass(NamedTuple):
    """A step of one shape, and where what it is asked goes."""

    sent: torch.Tensor  # [words] on the host
    fields: Fields[Ints]  # its parts
    block: torch.Tensor  # [words] on the device
    launch: Recorded


class CudaK2:
    """Immutable once loaded; calls of `forward` take turns. `device` may be a CPU under Triton's interpreter."""

    def __init__(
        self,
        config: K2Config,
        checkpoint: Checkpoint,
        feature_layers: Sequence[int],
        device: torch.device,
        dtype: torch.dtype = torch.bfloat16,
        latent_eps: float | None = None,
    ) -> None:
        c = self.config = config
        for layer in feature_layers:
            if not 0 <= layer < c.num_hidden_layers or feature_layers.count(layer) > 1:
                raise InvalidRequest("feature_layers", layer, f"distinct layers of the target's {c.num_hidden_layers}")
        check_sizes(c, checkpoint)
        self.feature_layers = tuple(feature_layers)
        self.feature_width = len(self.feature_layers) * c.hidden_size
        self.checkpoint_hash = checkpoint_hash(checkpoint.folder)
        self.device, self.dtype = device, dtype
        self.latent_eps = c.rms_norm_eps if latent_eps is None else latent_eps
        self.positions = c.max_position_embeddings
        self._weights = self._read(checkpoint)
        self._arena = Arena(c.num_hidden_layers, c.latent_width, device, dtype)
        self._room = self._new_room(LEAST_ROOM)
        self._passes, self._grown = Kept(self._make), 0
        self._walker, self._turn = CudaWalker(c.vocab_size, device), threading.Lock()

    @classmethod
    def load(cls, folder: Path, feature_layers: Sequence[int], device: torch.device) -> CudaK2:
        """Raises ConfigError or CheckpointError as K2Model does, also for a size without code here."""
        return cls(K2Config.from_folder(folder), Checkpoint(folder), feature_layers, device)

    @property
    def architecture(self) -> str:
        if self.device.type != "cuda":
            return "interpreted"
        return "cuda-sm{}{}".format(*torch.cuda.get_device_capability(self.device))

    def new_cache(self, pages: int) -> CudaCache:
        """A cache of `pages` pages of 64 tokens for every layer."""
        with self._turn:
            return CudaCache(self._arena, pages)

    @torch.inference_mode()
    def forward(self, rows: Sequence[SequenceRows], cache: CudaCache) -> ForwardOutput:
        """Computes all rows of a step and writes their latents into `cache`. Logits are on the device, features not.

        InvalidRequest for rows that make no sense or pages that are not the cache's; nothing has then been computed.
        """
        if cache.arena is not self._arena:
            raise InvalidRequest("cache", "another model's", "made by this model's new_cache")
        asked = read(rows, self.config.vocab_size, self.positions, cache.pages)
        wanted, full = len(asked.wanted), len(asked.wanted) == asked.rows
        with self._turn:
            size = bucket(asked.rows)
            shape = Shape(size, size if full else bucket(wanted) if wanted else 0, bucket(len(rows)), self._most_pages)
            self._prepare(size)
            step = self._passes[shape]
            fill(step.fields, asked, cache.base)
            step.block.copy_(step.sent, non_blocking=True)
            step.launch()
            logits = self._room.logits[:wanted].clone()
            features = self._to_host(self._room.features[: asked.rows])
        return ForwardOutput(logits, features)

    @torch.inference_mode()
    def walk(self, logits: torch.Tensor, trees: Sequence[WalkRows]) -> list[Walked]:
        """As `kernels.tree_accept.walk_trees`, by the engine's own law of rounding."""
        with self._turn:
            return self._walker(logits, trees)

    @property
    def _most_pages(self) -> int:
        """Of one sequence: every position, and a tree below the last."""
        return -(-(self.positions + DEEPEST) // PAGE)

    def _prepare(self, rows: int) -> None:
        """Makes room for `rows`. What a larger arena or room has made wrong is made again."""
        if rows > self._room.rows:
            self._room = self._new_room(rows)
            self._passes.clear()
        if self._grown != self._arena.grown:
            self._grown = self._arena.grown
            self._passes.clear()

    def _make(self, shape: Shape) -> Pass:
        sent = torch.zeros(shape.words, dtype=torch.int32, pin_memory=self.device.type == "cuda")
        block = sent.to(self.device)
        fields = split(block, shape)
        step = CudaStep(self.config, self._weights, self.feature_layers, self.latent_eps, self._room, shape, fields)
        return Pass(sent, split(sent.numpy(), shape), block, Recorded(lambda: step.run(self._arena.data), self.device))

    def _new_room(self, rows: int) -> Room:
        return Room(self.config, len(self.feature_layers), rows, self.device, self.dtype)

    def _to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in the host's memory, complete when this returns."""
        if tensor.device.type == "cpu":
            return tensor.clone()
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        torch.cuda.current_stream(self.device).synchronize()
        return host

    def _read(self, checkpoint: Checkpoint) -> Weights:
        import triton

        c, r = self.config, Reader(checkpoint, self.device, self.dtype)
        turns = torch.view_as_real(rotations(c)).movedim(-1, 0).contiguous()
        made = hashlib.sha256(turns.numpy().tobytes()).hexdigest()[:8]  # by torch, on this machine
        self.kernel_law = f"{LAW}-triton{triton.__version__}-{made}"
        cos, sin = turns.to(self.device)
        return Weights(
            embedding=r.dense(("model.embed_tokens.weight", (c.vocab_size, c.hidden_size))),
            layers=[CudaLayer.load(r, number, c) for number in range(c.num_hidden_layers)],
            norm=r.dense(("model.norm.weight", (c.hidden_size,))),
            head=r.dense(("lm_head.weight", (c.vocab_size, c.hidden_size))),
            cos=cos.contiguous(),
            sin=sin.contiguous(),
        )
