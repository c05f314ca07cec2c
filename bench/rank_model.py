"""One rank of a K2.6 on a GPU with drawn weights: the engine's own model, of a rank's sizes, with replayed routing.

Eight ranks divide heads, widths and vocabulary; a rank alone is a model with an eighth of each, whose step has every
product of a rank's at its true shape and no sum over ranks.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from hedgerow.model.batch import SequenceRows
from hedgerow.model.config import K2Config
from hedgerow.model.cuda import CudaK2
from hedgerow.model.cuda_cache import CudaCache
from hedgerow.model.cuda_graph import Recorded
from hedgerow.model.cuda_plan import Fields, Shape
from hedgerow.model.cuda_shapes import shape_of
from hedgerow.model.cuda_step import CudaStep
from hedgerow.model.cuda_weights import Experts, Packed, Reader
from hedgerow.weights.published import TRUE, Sizes, config
from kernels.sample import Law
from kernels.tree_accept import WalkRows

RANKS = 8
GREEDY = Law(0.0, 0, 1.0, 0.0, 1, 0, 0)
CODE = math.sqrt(21.5)  # root mean square of -8 .. 7
COMMON = 100.0  # added to a logit: that expert is chosen


def rank_sizes(layers: int = TRUE.layers, ranks: int = RANKS) -> Sizes:
    """Of one of `ranks` ranks."""
    return replace(
        TRUE, layers=layers, vocab=TRUE.vocab // ranks, dense_width=TRUE.dense_width // ranks,
        width=TRUE.width // ranks, heads=TRUE.heads // ranks,
    )  # fmt: skip


def rank_config(sizes: Sizes) -> K2Config:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config("k2.6", sizes)))
        return K2Config.from_folder(Path(folder))


class Drawn(Reader):
    """Random weights of the shapes that are asked for, made where they stay: products of variance one."""

    def __init__(self, device: torch.device, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> None:
        self.device, self.dtype, self._seed = device, dtype, seed
        self._draw = torch.Generator(device).manual_seed(seed)

    @property
    def folder(self) -> Path:
        return Path("drawn")

    @property
    def hash(self) -> str:
        return f"drawn-{self._seed}"

    def dense(self, *names_and_shapes: tuple[str, tuple[int, ...]]) -> torch.Tensor:
        (_, first), rows = names_and_shapes[0], sum(shape[0] for _, shape in names_and_shapes)
        out = torch.empty((rows, *first[1:]), device=self.device, dtype=self.dtype)
        if len(first) == 1:
            return out.uniform_(0.75, 1.25, generator=self._draw)
        return out.normal_(0.0, first[1] ** -0.5, generator=self._draw)

    def float32(self, name: str, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, device=self.device)

    def experts(self, names: list[list[str]], rows: int, columns: int, int4: bool) -> Experts:
        """Every code is as likely as any other."""
        assert int4
        count, height = len(names), len(names[0]) * rows
        words = torch.empty(count, height, columns // 8, dtype=torch.int32, device=self.device)
        words.view(torch.int64).random_(-(1 << 63), None, generator=self._draw)
        scales = torch.empty(count, height, columns // 32, dtype=self.dtype, device=self.device)
        scale = columns**-0.5 / CODE
        return Packed(words, scales.uniform_(0.75 * scale, 1.25 * scale, generator=self._draw))


class ReplayedStep(CudaStep):
    """The engine's step, whose router is overruled: its product is made, and replayed logits choose."""

    routing: torch.Tensor  # [layers, rows, experts] float32

    def choose(self, number: int, logits: torch.Tensor, bias: torch.Tensor) -> None:
        super().choose(number, self.routing[number, : len(logits)], bias)


class RankModel(CudaK2):
    """The engine's model, with replayed routing and its recorded steps at hand."""

    def __init__(self, config: K2Config, reader: Reader, feature_layers: Sequence[int], rows: int) -> None:
        self.routing = torch.zeros(config.num_hidden_layers, rows, config.n_routed_experts, device=reader.device)
        super().__init__(config, reader, feature_layers)

    def step(self, shape: Shape, fields: Fields[torch.Tensor]) -> CudaStep:
        made = ReplayedStep(
            self.config, self._weights, self.feature_layers, self.latent_eps, self._room, shape, fields
        )  # fmt: skip
        made.routing = self.routing
        return made

    def fill(self, pages: int) -> CudaCache:
        """A cache whose latents are random."""
        cache = self.new_cache(pages)
        for layer in self._arena.data:
            layer.normal_()
        return cache

    def recorded(self, rows: Sequence[SequenceRows], cache: CudaCache, trees: Sequence[WalkRows]) -> Recorded:
        """The step as a launch: from the rows' tokens to the accepted paths and the moved latents."""
        for _ in range(2):  # compiles; records
            self.verify(rows, cache, trees)
        asked = self._asked(rows, cache)
        shape = shape_of(asked, self._room.rows, self._most_pages)._replace(whole=True)
        return self._passes[shape].launch
