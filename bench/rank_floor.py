"""The least that a rank's step must move and compute, and how routing decides it."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from hedgerow.model.config import K2Config
from hedgerow.model.memory import SIZE_OF
from hedgerow.model.tensors import tensors


class Least(NamedTuple):
    """Of one step."""

    dense: int  # bytes of weights that every step reads whole
    experts: int  # bytes of the experts that its rows chose
    cache: int  # bytes of latents
    flops: float  # of attention, the one part that may be bound by them

    @property
    def bytes(self) -> int:
        return self.dense + self.experts + self.cache

    def seconds(self, read: float, matmul: float) -> float:
        """At `read` bytes and `matmul` operations a second; attention takes the larger of its two."""
        return (self.dense + self.experts) / read + max(self.cache / read, self.flops / matmul)


def dense_bytes(c: K2Config) -> int:
    """All weights but the embedding, of which a step reads a row a token, and the routed experts."""
    kept = (t for t in tensors(c) if ".experts." not in t.name and "embed_tokens" not in t.name)
    return sum(math.prod(t.shape) * SIZE_OF[t.dtypes[0]] for t in kept)


def expert_bytes(c: K2Config) -> int:
    """One routed expert of one layer: half a byte a weight, two a group of 32."""
    return 3 * c.hidden_size * c.moe_intermediate_size * 9 // 16


def least(c: K2Config, dense: int, distinct: float, batch: int, rows: int, context: int) -> Least:
    """`distinct` experts a layer, `batch` sequences of `rows` rows after `context` tokens."""
    sparse = c.num_hidden_layers - c.first_k_dense_replace
    cached = batch * (context + rows) * c.num_hidden_layers
    products = 2 * c.num_attention_heads * rows * (2 * c.kv_lora_rank + c.qk_rope_head_dim)
    return Least(dense, round(sparse * distinct * expert_bytes(c)), cached * 2 * c.latent_width, cached * products)


def routing(c: K2Config, batch: int, rows: int, overlap: float, draw: torch.Generator, common: float) -> torch.Tensor:
    """Logits [layers, batch * rows, experts]: uniform; each tree has its own eight (top-k) common experts in a layer,
    and each of its rows takes each of them with probability `overlap`. `common` is added to those logits.
    """
    layers, experts, k = c.num_hidden_layers, c.n_routed_experts, c.num_experts_per_tok
    logits = torch.randn(layers, batch, rows, experts, generator=draw, device=draw.device)
    if overlap:
        shared = torch.randn(layers, batch, 1, experts, generator=draw, device=draw.device).topk(k, -1).indices
        taken = torch.rand(layers, batch, rows, k, generator=draw, device=draw.device) < overlap
        logits.scatter_add_(-1, shared.expand(-1, -1, rows, -1), taken.float() * common)
    return logits.view(layers, batch * rows, experts)


def distinct(c: K2Config, logits: torch.Tensor) -> float:
    """Experts that the rows of a sparse layer choose, on average."""
    chosen = logits[c.first_k_dense_replace :].topk(c.num_experts_per_tok, -1).indices.flatten(1)
    seen = torch.zeros(len(chosen), c.n_routed_experts, device=logits.device).scatter_(1, chosen, 1.0)
    return float(seen.sum(1).mean())
