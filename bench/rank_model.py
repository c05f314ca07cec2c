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
from zlib import crc32

import torch

from hedgerow.model.batch import SequenceRows
from hedgerow.model.config import K2Config
from hedgerow.model.cuda import CudaK2
from hedgerow.model.cuda_cache import CudaCache
from hedgerow.model.cuda_graph import Recorded
from hedgerow.model.cuda_plan import Fields, Shape
from hedgerow.model.cuda_ranked import RankedK2
from hedgerow.model.cuda_shapes import shape_of
from hedgerow.model.cuda_step import CudaStep, Gated
from hedgerow.model.cuda_weights import Experts, Packed, Reader
from hedgerow.model.tensors import WHOLE, Share, Wanted, axis_of
from hedgerow.weights.published import TRUE, Sizes, config
from kernels.collectives import Ranks
from kernels.sample import Law
from kernels.tree_accept import WalkRows

RANKS = 8
GREEDY = Law(0.0, 0, 1.0, 0.0, 1, 0, 0)
CODE = math.sqrt(21.5)  # root mean square of -8 .. 7
MOST_PARTS = 8  # of a product (kernels/gpu/linear.py)
COMMON = 100.0  # added to a logit: that expert is chosen


def rank_sizes(layers: int = TRUE.layers, mine: int = 1) -> Sizes:
    """Of `mine` of eight ranks together."""
    return replace(
        TRUE, layers=layers, vocab=TRUE.vocab * mine // RANKS, dense_width=TRUE.dense_width * mine // RANKS,
        width=TRUE.width * mine // RANKS, heads=TRUE.heads * mine // RANKS,
    )  # fmt: skip


def rank_config(sizes: Sizes) -> K2Config:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config("k2.6", sizes)))
        return K2Config.from_folder(Path(folder))


class Drawn(Reader):
    """Random weights of the shapes that are asked for, made where they stay: products of variance one. Of a `share`
    its part; what is on every rank is the same there."""

    def __init__(
        self, device: torch.device, dtype: torch.dtype = torch.bfloat16, seed: int = 0, share: Share = WHOLE
    ) -> None:
        self.device, self.dtype, self.share, self._seed = device, dtype, share, seed

    @property
    def folder(self) -> Path:
        return Path("drawn")

    @property
    def hash(self) -> str:
        return f"drawn-{self._seed}"

    def part(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        return Wanted(name, shape, (), axis_of(name)).part(self.share.ranks)

    def draw(self, name: str) -> torch.Generator:
        rank = 0 if axis_of(name) is None else self.share.rank
        return torch.Generator(self.device).manual_seed(crc32(f"{self._seed} {rank} {name}".encode()))

    def dense(self, *names_and_shapes: tuple[str, tuple[int, ...]]) -> torch.Tensor:
        parts = [self.part(*pair) for pair in names_and_shapes]
        out = torch.empty((sum(part[0] for part in parts), *parts[0][1:]), device=self.device, dtype=self.dtype)
        for (name, shape), place in zip(names_and_shapes, out.split([part[0] for part in parts]), strict=True):
            if len(shape) == 1:
                place.uniform_(0.75, 1.25, generator=self.draw(name))
            else:
                place.normal_(0.0, shape[1] ** -0.5, generator=self.draw(name))
        return out

    def float32(self, name: str, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, device=self.device)

    def experts(self, names: list[list[str]], rows: int, columns: int, int4: bool) -> Experts:
        """Every code is as likely as any other."""
        assert int4
        height, width = self.part(f"{names[0][0]}.weight", (rows, columns))
        count, height, draw = len(names), len(names[0]) * height, self.draw(f"{names[0][0]}.weight")
        words = torch.empty(count, height, width // 8, dtype=torch.int32, device=self.device)
        words.view(torch.int64).random_(-(1 << 63), None, generator=draw)
        scales = torch.empty(count, height, width // 32, dtype=self.dtype, device=self.device)
        scale = columns**-0.5 / CODE
        return Packed(words, scales.uniform_(0.75 * scale, 1.25 * scale, generator=draw))


class Replays(CudaK2):
    """A model whose routers are overruled: their products are made, and replayed logits choose. They are read in as
    many parts as the product's, the others of zeros."""

    told: torch.Tensor  # [layers, most parts, rows, experts] float32

    @property
    def routing(self) -> torch.Tensor:
        """[layers, rows, experts]"""
        return self.told[:, 0]

    def step(self, shape: Shape, fields: Fields[torch.Tensor]) -> CudaStep:
        made = super().step(shape, fields)
        choose, told = made.choose, self.told

        def replayed(number: int, logits: torch.Tensor, bias: torch.Tensor, gated: Gated | None) -> None:
            choose(number, told[number, : len(logits), : logits.shape[1]], bias, gated)

        made.choose = replayed  # type: ignore[method-assign]
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


class RankModel(Replays):
    """One rank alone: the engine's model."""

    def __init__(self, config: K2Config, reader: Reader, feature_layers: Sequence[int], rows: int) -> None:
        self.told = no_routing(config, rows, reader.device)
        super().__init__(config, reader, feature_layers)


class RankedModel(Replays, RankedK2):
    """Some ranks of several, with the sums between them."""

    def __init__(
        self, config: K2Config, readers: Sequence[Reader], ranks: Ranks, feature_layers: Sequence[int], rows: int
    ) -> None:
        self.told = no_routing(config, rows, readers[0].device)
        RankedK2.__init__(self, config, readers, ranks, feature_layers)


def no_routing(config: K2Config, rows: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(config.num_hidden_layers, MOST_PARTS, rows, config.n_routed_experts, device=device)
