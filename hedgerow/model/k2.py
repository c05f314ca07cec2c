"""The target: a K2-family model in float32 over a paged latent cache. A row's bits depend on nothing but its path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from hedgerow.errors import InvalidRequest
from hedgerow.model.batch import ForwardOutput, SequenceRows
from hedgerow.model.cache import LatentCache
from hedgerow.model.config import K2Config
from hedgerow.model.fields import ConfigError
from hedgerow.model.interface import checked_taps
from hedgerow.model.invariance import Choice, choose_row_law, model_products
from hedgerow.model.layers import Layer
from hedgerow.model.layout import Layout, build_layout
from hedgerow.model.loader import Checkpoint, checkpoint_hash
from hedgerow.model.mla import attention
from hedgerow.model.moe import DenseWeights, dense, moe
from hedgerow.model.tensors import Share
from kernels.collectives import Ranks
from kernels.linear import RowLaw, column_blocks, pad_rows, wide_linear
from kernels.rmsnorm import rmsnorm
from kernels.rope import inverse_frequencies, yarn_frequencies
from kernels.tree_accept import Walked, WalkRows, walk_trees

# Raised with every change that alters the bits of any row.
KERNEL_LAW = 1
WIDTH_MULTIPLE = 32  # kernels/swiglu.py


class Shard(NamedTuple):
    """One rank's weights. Norms, router and the projections into the latents are in every one."""

    embedding: torch.Tensor  # [vocabulary of the rank, hidden]
    layers: Sequence[Layer]
    head: torch.Tensor  # [hidden, vocabulary of the rank], in `column_blocks`

    @classmethod
    def load(cls, checkpoint: Checkpoint, c: K2Config) -> Shard:
        return cls(
            checkpoint.weight("model.embed_tokens.weight", c.vocab_size, c.hidden_size),
            [Layer.load(checkpoint, n, c) for n in range(c.num_hidden_layers)],
            column_blocks(checkpoint.weight("lm_head.weight", c.vocab_size, c.hidden_size).T),
        )


class K2Model:
    """Immutable once loaded; `forward` may be called from any one thread at a time.

    `feature_layers`: 0-based layers whose outputs are the drafter's features. `latent_eps`: epsilon of the norms of the
    query's and the key's latents; None: the config's (Hugging Face uses 1e-6 whatever the config says).
    `ranks`: into how many partial sums attention and experts are divided, and which of them this process computes. Two
    processes of a rank each have the bits of one process with two; another count has other bits.
    """

    architecture = "cpu-torch"

    def __init__(
        self,
        config: K2Config,
        folder: Path,
        feature_layers: Sequence[int],
        law: RowLaw | None = None,
        latent_eps: float | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        c = self.config = config
        for layer in feature_layers:
            if not 0 <= layer < c.num_hidden_layers:
                raise InvalidRequest("feature_layers", layer, f"within the target's {c.num_hidden_layers} layers")
        self.ranks = ranks or Ranks()
        self.shards = self.ranks.count
        parts = [Checkpoint(folder, Share(rank, self.shards)) for rank in self.ranks.mine]
        check_ranks(parts, c)
        for part in parts:
            part.compare()
        self.feature_layers = tuple(feature_layers)
        self.feature_width = len(self.feature_layers) * c.hidden_size
        self.latent_eps = c.rms_norm_eps if latent_eps is None else latent_eps
        self.parts = [Shard.load(part, c) for part in parts]
        self.embedding, self.layers, self.head = self.parts[0]
        self.norm = parts[0].weight("model.norm.weight", c.hidden_size)
        self.turns = rotations(c)
        self.checkpoint_hash = checkpoint_hash(folder) if 0 in self.ranks.mine else ""
        choice = (
            Choice(law, True) if law else choose_row_law(model_products(c, self.shards), row_widths(c, self.shards))
        )
        self.law, self.routes = choice.law, list[torch.Tensor]()  # of the last step: rows' experts, a layer each
        divided = f"-shards-{self.shards}" if self.shards > 1 else ""
        self.kernel_law = f"torch-{KERNEL_LAW}-{choice.name}{divided}"

    @classmethod
    def load(
        cls,
        folder: Path,
        feature_layers: Sequence[int],
        law: RowLaw | None = None,
        latent_eps: float | None = None,
        ranks: Ranks | None = None,
    ) -> K2Model:
        """Raises ConfigError or CheckpointError, which name file, field or tensor, expected and actual."""
        return cls(K2Config.from_folder(folder), folder, feature_layers, law, latent_eps, ranks)

    def tap(self, layers: Sequence[int]) -> None:
        """As `interface.Taps.tap`."""
        self.feature_layers = checked_taps(layers, self.feature_layers, self.config.num_hidden_layers)

    def new_cache(self, pages: int) -> LatentCache:
        """A cache of `pages` pages of 64 tokens for every layer."""
        return LatentCache(self.config.num_hidden_layers, pages, self.config.latent_width)

    @torch.inference_mode()
    def forward(self, rows: Sequence[SequenceRows], cache: LatentCache) -> ForwardOutput:
        """Computes all rows of a step and writes their latents into `cache`."""
        layout, self.routes = build_layout(rows), []
        count = len(layout.tokens)
        x = pad_rows(self.embedded(layout.tokens), self.law.padded(count))
        turns = self.turns.index_select(0, layout.positions)
        features: dict[int, torch.Tensor] = {}
        for number in range(self.config.num_hidden_layers):
            x = self.attended(number, x, cache.layers[number], layout, turns)
            x = self.fed(number, x, count)
            if number in self.feature_layers:
                features[number] = x[:count]
        tapped = [features[number] for number in self.feature_layers]
        return ForwardOutput(
            self.logits(x, count, layout.wanted), torch.cat(tapped, -1) if tapped else torch.empty(count, 0)
        )

    def experts(self) -> float | None:
        """As `interface.Routes.experts`. Counted when it is asked: some microseconds a layer. All ranks route alike."""
        found = [torch.bincount(chosen.flatten()).count_nonzero().item() for chosen in self.routes]
        return sum(found) / len(found) if found else None

    def embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        """[rows, hidden]: a row of one rank, zeros of all others."""
        if self.shards == 1:
            return self.embedding.index_select(0, tokens)
        held = self.config.vocab_size // self.shards
        found = []
        for rank, part in zip(self.ranks.mine, self.parts, strict=True):
            own = tokens // held == rank
            row = part.embedding.index_select(0, torch.where(own, tokens - rank * held, 0))
            found.append(torch.where(own.unsqueeze(-1), row, 0.0))
        return self.ranks.sum(found)

    def attended(
        self, number: int, x: torch.Tensor, cache: torch.Tensor, layout: Layout, turns: torch.Tensor
    ) -> torch.Tensor:
        """x + attention of layer `number`."""
        h = rmsnorm(x, self.layers[number].attention_norm, self.config.rms_norm_eps)

        def of(part: Shard, base: torch.Tensor | None) -> torch.Tensor:
            return attention(
                part.layers[number].attention, h, base, cache, turns, layout.slots, layout.groups, self.config,
                self.latent_eps, self.law,
            )  # fmt: skip

        return self.summed(of, x)

    def fed(self, number: int, x: torch.Tensor, rows: int) -> torch.Tensor:
        """x + feed-forward block of layer `number`, of which the first `rows` rows are real."""
        h = rmsnorm(x, self.layers[number].mlp_norm, self.config.rms_norm_eps)

        def of(part: Shard, base: torch.Tensor | None) -> torch.Tensor:
            mlp = part.layers[number].mlp
            if isinstance(mlp, DenseWeights):
                return dense(mlp, h, base, self.law)
            return moe(mlp, h, base, rows, self.config, self.law, self.routes)

        return self.summed(of, x)

    def summed(self, of: Callable[[Shard, torch.Tensor | None], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """x + the ranks' parts, added in rank order before x is."""
        if self.shards == 1:
            return of(self.parts[0], x)
        return self.ranks.sum([of(part, None) for part in self.parts]).add_(x)

    def walk(self, logits: torch.Tensor, trees: Sequence[WalkRows]) -> list[Walked]:
        """Draws from `logits` and walks the trees: `kernels.tree_accept.walk_trees`."""
        return walk_trees(logits, trees)

    def logits(self, x: torch.Tensor, rows: int, wanted: torch.Tensor | None) -> torch.Tensor:
        """[wanted, vocabulary] of the residual stream x after the last layer, whose first `rows` rows are real."""
        if wanted is not None:
            rows = len(wanted)
            if rows == 0:
                return torch.empty(0, self.config.vocab_size)
            x = pad_rows(x.index_select(0, wanted), self.law.padded(rows))
        x = rmsnorm(x, self.norm, self.config.rms_norm_eps)
        return self.ranks.join([wide_linear(x, part.head, self.law) for part in self.parts])[:rows]


def row_widths(c: K2Config, ranks: int = 1) -> list[int]:
    """Widths of the row-wise ops of a rank, the router's apart: that is padded."""
    widths = (c.intermediate_size, c.moe_intermediate_size, c.moe_intermediate_size * c.n_shared_experts)
    return [width // ranks for width in widths]


def check_ranks(parts: Sequence[Checkpoint], c: K2Config) -> None:
    """CheckpointError with the first tensor that the ranks cannot share. ConfigError where a rank's part of a
    feed-forward width would end within a vector of 32, whose bits would differ."""
    for part in parts:
        part.check(c)
    folder, ranks = parts[0].folder, parts[0].share.ranks
    for field in ("intermediate_size", "moe_intermediate_size"):
        if ranks > 1 and getattr(c, field) % (WIDTH_MULTIPLE * ranks):
            limit = f"a multiple of {WIDTH_MULTIPLE * ranks} for {ranks} ranks"
            raise ConfigError(folder / "config.json", field, getattr(c, field), limit)


def rotations(c: K2Config) -> torch.Tensor:
    """exp(j p f_i), [positions, rope / 2] complex64. YaRN's amplitude is 1 in the K2 family."""
    yarn, dim = c.rope.yarn, c.qk_rope_head_dim
    if yarn is None:
        inverse, amplitude = inverse_frequencies(dim, c.rope.theta), 1.0
    else:
        inverse = yarn_frequencies(dim, c.rope.theta, yarn.factor, yarn.beta_fast, yarn.beta_slow, yarn.original)
        amplitude = yarn.amplitude
    angle = torch.arange(c.max_position_embeddings, dtype=torch.float32)[:, None] * inverse
    return torch.complex(angle.cos() * amplitude, angle.sin() * amplitude)
