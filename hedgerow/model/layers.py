"""One decoder layer of the target: its weights by kind."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hedgerow.model.config import K2Config
from hedgerow.model.loader import Checkpoint
from hedgerow.model.mla import MlaWeights
from hedgerow.model.moe import DenseWeights, MoeWeights


@dataclass(frozen=True)
class Layer:
    """Pre-norm attention and feed-forward; the first layers are dense."""

    attention_norm: torch.Tensor  # [hidden]
    attention: MlaWeights
    mlp_norm: torch.Tensor  # [hidden]
    mlp: DenseWeights | MoeWeights

    @classmethod
    def load(cls, checkpoint: Checkpoint, number: int, c: K2Config) -> Layer:
        base = f"model.layers.{number}."
        sparse = number >= c.first_k_dense_replace
        return cls(
            attention_norm=checkpoint.weight(base + "input_layernorm.weight", c.hidden_size),
            attention=MlaWeights.load(checkpoint, base + "self_attn.", c),
            mlp_norm=checkpoint.weight(base + "post_attention_layernorm.weight", c.hidden_size),
            mlp=MoeWeights.load(checkpoint, base + "mlp.", c)
            if sparse
            else DenseWeights.load(checkpoint, base + "mlp.", c.intermediate_size, c.hidden_size),
        )
