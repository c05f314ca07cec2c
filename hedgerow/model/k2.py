"""The target: a K2-family model in float32 over a paged latent cache. A row's bits depend on nothing but its path."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from hedgerow.errors import InvalidRequest
from hedgerow.model.batch import ForwardOutput, SequenceRows
from hedgerow.model.cache import LatentCache
from hedgerow.model.config import K2Config
from hedgerow.model.invariance import Choice, choose_row_law, model_products
from hedgerow.model.layers import Layer
from hedgerow.model.layout import build_layout
from hedgerow.model.loader import Checkpoint, checkpoint_hash
from hedgerow.model.mla import attention
from hedgerow.model.moe import DenseWeights, dense, moe
from kernels.linear import RowLaw, column_blocks, pad_rows, wide_linear
from kernels.rmsnorm import rmsnorm
from kernels.rope import inverse_frequencies, yarn_frequencies
from kernels.tree_accept import Walked, WalkRows, walk_trees

# Raised with every change that alters the bits of any row.
KERNEL_LAW = 1


class K2Model:
    """Immutable once loaded; `forward` may be called from any one thread at a time.

    `feature_layers`: 0-based layers whose outputs are the drafter's features. `latent_eps`: epsilon of the norms of the
    query's and the key's latents; None: the config's (Hugging Face uses 1e-6 whatever the config says).
    """

    architecture = "cpu-torch"

    def __init__(
        self,
        config: K2Config,
        checkpoint: Checkpoint,
        feature_layers: Sequence[int],
        law: RowLaw | None = None,
        latent_eps: float | None = None,
    ) -> None:
        c = self.config = config
        for layer in feature_layers:
            if not 0 <= layer < c.num_hidden_layers:
                raise InvalidRequest("feature_layers", layer, f"within the target's {c.num_hidden_layers} layers")
        checkpoint.check(c)
        self.feature_layers = tuple(feature_layers)
        self.feature_width = len(self.feature_layers) * c.hidden_size
        self.latent_eps = c.rms_norm_eps if latent_eps is None else latent_eps
        self.embedding = checkpoint.weight("model.embed_tokens.weight", c.vocab_size, c.hidden_size)
        self.layers = [Layer.load(checkpoint, n, c) for n in range(c.num_hidden_layers)]
        self.norm = checkpoint.weight("model.norm.weight", c.hidden_size)
        self.head = column_blocks(checkpoint.weight("lm_head.weight", c.vocab_size, c.hidden_size).T)
        self.turns = rotations(c)
        self.checkpoint_hash = checkpoint_hash(checkpoint.folder)
        choice = Choice(law, True) if law else choose_row_law(model_products(c), row_widths(c))
        self.law = choice.law
        self.kernel_law = f"torch-{KERNEL_LAW}-{choice.name}"

    @classmethod
    def load(
        cls,
        folder: Path,
        feature_layers: Sequence[int],
        law: RowLaw | None = None,
        latent_eps: float | None = None,
    ) -> K2Model:
        """Raises ConfigError or CheckpointError, which name file, field or tensor, expected and actual."""
        return cls(K2Config.from_folder(folder), Checkpoint(folder), feature_layers, law, latent_eps)

    def new_cache(self, pages: int) -> LatentCache:
        """A cache of `pages` pages of 64 tokens for every layer."""
        return LatentCache(self.config.num_hidden_layers, pages, self.config.latent_width)

    @torch.inference_mode()
    def forward(self, rows: Sequence[SequenceRows], cache: LatentCache) -> ForwardOutput:
        """Computes all rows of a step and writes their latents into `cache`."""
        layout = build_layout(rows)
        count = len(layout.tokens)
        x = pad_rows(self.embedding.index_select(0, layout.tokens), self.law.padded(count))
        turns = self.turns.index_select(0, layout.positions)
        features: dict[int, torch.Tensor] = {}
        for number, layer in enumerate(self.layers):
            h = rmsnorm(x, layer.attention_norm, self.config.rms_norm_eps)
            x = attention(
                layer.attention, h, x, cache.layers[number], turns, layout.slots, layout.groups, self.config,
                self.latent_eps, self.law,
            )  # fmt: skip
            h = rmsnorm(x, layer.mlp_norm, self.config.rms_norm_eps)
            if isinstance(layer.mlp, DenseWeights):
                x = dense(layer.mlp, h, x, self.law)
            else:
                x = moe(layer.mlp, h, x, count, self.config, self.law)
            if number in self.feature_layers:
                features[number] = x[:count]
        tapped = [features[number] for number in self.feature_layers]
        return ForwardOutput(
            self.logits(x, count, layout.wanted), torch.cat(tapped, -1) if tapped else torch.empty(count, 0)
        )

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
        return wide_linear(x, self.head, self.law)[:rows]


def row_widths(c: K2Config) -> list[int]:
    """Widths of the row-wise ops, the router's apart: that is padded."""
    return [c.intermediate_size, c.moe_intermediate_size, c.moe_intermediate_size * c.n_shared_experts]


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
