"""A DFlash drafter's weights as the GPU's ops read them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from hedgerow.model.cuda_convolution import CudaConvolution
from hedgerow.model.cuda_weights import Reader
from hedgerow.model.dflash import rotary_tables
from hedgerow.model.draft_config import DraftConfig
from hedgerow.model.draft_tensors import borrow


@dataclass(frozen=True)
class CudaDraftLayer:
    """Weights of one layer, [N, K]."""

    input_norm: torch.Tensor
    qkv: torch.Tensor  # [(heads + 2 kv heads) * head_dim, hidden]
    qk_norm: torch.Tensor  # [heads + kv heads, head_dim]
    k_norm: torch.Tensor  # [kv heads, head_dim]
    o: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    convolutions: tuple[CudaConvolution, ...] = ()  # DFlash 2: around attention and MLP

    @classmethod
    def load(cls, r: Reader, number: int, c: DraftConfig) -> CudaDraftLayer:
        base, h, d = f"layers.{number}.", c.hidden_size, c.head_dim
        heads, groups = c.num_attention_heads, c.num_key_value_heads
        parts = (("q", heads), ("k", groups), ("v", groups))
        q_norm = r.dense((base + "self_attn.q_norm.weight", (d,))).expand(heads, d)
        k_norm = r.dense((base + "self_attn.k_norm.weight", (d,))).expand(groups, d)
        return cls(
            input_norm=r.dense((base + "input_layernorm.weight", (h,))),
            qkv=r.dense(*((f"{base}self_attn.{name}_proj.weight", (count * d, h)) for name, count in parts)),
            qk_norm=torch.cat([q_norm, k_norm]).contiguous(),
            k_norm=k_norm.contiguous(),
            o=r.dense((base + "self_attn.o_proj.weight", (h, heads * d))),
            mlp_norm=r.dense((base + "post_attention_layernorm.weight", (h,))),
            gate_up=r.dense(*((f"{base}mlp.{n}_proj.weight", (c.intermediate_size, h)) for n in ("gate", "up"))),
            down=r.dense((base + "mlp.down_proj.weight", (h, c.intermediate_size))),
            convolutions=CudaConvolution.both(r, base, c),
        )


class DraftWeights(NamedTuple):
    """All of the drafter, and the target's embedding and head."""

    embedding: torch.Tensor
    head: torch.Tensor
    fc: torch.Tensor | None  # [hidden, feature width]; None: features come projected
    hidden_norm: torch.Tensor
    context_kv: torch.Tensor  # [layers * 2 kv heads * head_dim, hidden]: every layer's keys and values
    layers: list[CudaDraftLayer]
    norm: torch.Tensor
    cos: torch.Tensor  # [positions, head_dim / 2] float32
    sin: torch.Tensor

    @classmethod
    def load(
        cls, c: DraftConfig, r: Reader, target_folder: Path, amplitude: float | None, projected: bool
    ) -> tuple[DraftWeights, str]:
        """The weights, and the hash of the target's embedding and head. ConfigError where these do not fit."""
        borrowed = borrow(c, r.checkpoint, target_folder, r.device)
        cos, sin = (table[:, c.head_dim // 2 :].contiguous().to(r.device) for table in rotary_tables(c, amplitude))
        layers = [CudaDraftLayer.load(r, n, c) for n in range(c.num_hidden_layers)]
        keys = c.num_attention_heads * c.head_dim
        weights = cls(
            embedding=borrowed.embedding.to(r.dtype),
            head=borrowed.head.to(r.dtype),
            fc=None if projected else r.dense(("fc.weight", (c.hidden_size, c.feature_width))),
            hidden_norm=r.dense(("hidden_norm.weight", (c.hidden_size,))),
            context_kv=torch.cat([layer.qkv[keys:] for layer in layers]),
            layers=layers,
            norm=r.dense(("norm.weight", (c.hidden_size,))),
            cos=cos,
            sin=sin,
        )
        return weights, borrowed.hash
