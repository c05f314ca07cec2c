"""Multi-head latent attention in absorbed form: weights prepared at load, the forward pass over a paged cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hedgerow.model.config import K2Config
from hedgerow.model.loader import Checkpoint
from kernels.kv_write import kv_write
from kernels.linear import RowLaw, batched_linear, linear, pad_rows
from kernels.mla_tree_attention import AttentionGroup, mla_tree_attention
from kernels.rmsnorm import rmsnorm
from kernels.rope import rope_pairs


@dataclass(frozen=True)
class MlaWeights:
    """One layer's attention, of this share's heads. W_UK and W_UV are kv_b's two parts, per head; the softmax scale is
    folded into q_b."""

    qkv_a: torch.Tensor  # [hidden, q_lora + kv_lora + rope]
    q_norm: torch.Tensor  # [q_lora]
    kv_norm: torch.Tensor  # [kv_lora]
    q_b: torch.Tensor  # [q_lora, heads * (nope + rope)]
    uk: torch.Tensor  # [heads, nope, kv_lora]
    uv: torch.Tensor  # [heads, kv_lora, value]
    o: torch.Tensor  # [heads * value, hidden]

    @classmethod
    def load(cls, checkpoint: Checkpoint, base: str, c: K2Config) -> MlaWeights:
        heads, nope, rope, value = c.num_attention_heads, c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim
        held = heads // checkpoint.share.ranks
        q_a = checkpoint.weight(base + "q_a_proj.weight", c.q_lora_rank, c.hidden_size)
        kv_a = checkpoint.weight(base + "kv_a_proj_with_mqa.weight", c.latent_width, c.hidden_size)
        q_b = checkpoint.weight(base + "q_b_proj.weight", heads * (nope + rope), c.q_lora_rank)
        kv_b = checkpoint.weight(base + "kv_b_proj.weight", heads * (nope + value), c.kv_lora_rank)
        kv_b = kv_b.view(held, nope + value, c.kv_lora_rank)
        return cls(
            qkv_a=torch.cat([q_a, kv_a]).T.contiguous(),
            q_norm=checkpoint.weight(base + "q_a_layernorm.weight", c.q_lora_rank),
            kv_norm=checkpoint.weight(base + "kv_a_layernorm.weight", c.kv_lora_rank),
            q_b=(q_b * c.softmax_scale).T.contiguous(),
            uk=kv_b[:, :nope].contiguous(),
            uv=kv_b[:, nope:].mT.contiguous(),
            o=checkpoint.weight(base + "o_proj.weight", c.hidden_size, heads * value).T.contiguous(),
        )


def attention(
    w: MlaWeights,
    x: torch.Tensor,
    hidden: torch.Tensor | None,
    cache: torch.Tensor,
    turns: torch.Tensor,
    slots: torch.Tensor,
    groups: Sequence[AttentionGroup],
    c: K2Config,
    latent_eps: float,
    law: RowLaw,
) -> torch.Tensor:
    """hidden + Attn(x); x, hidden [R', hidden]. The first len(slots) rows are real; their latents go to `slots`.

    Without `hidden`: these heads' part of Attn(x).
    """
    rows, padded, q_end = len(slots), len(x), c.q_lora_rank
    a = linear(x, w.qkv_a, law)
    latent = rmsnorm(a[:rows, q_end : q_end + c.kv_lora_rank], w.kv_norm, latent_eps)
    kv_write(cache, slots, torch.cat([latent, rope_pairs(a[:rows, q_end + c.kv_lora_rank :], turns)], -1))
    q = linear(rmsnorm(a[:, :q_end], w.q_norm, latent_eps), w.q_b, law).view(padded, len(w.uk), -1)
    nope = c.qk_nope_head_dim
    absorbed = batched_linear(q[..., :nope].transpose(0, 1), w.uk, law).transpose(0, 1)
    q = torch.cat([absorbed[:rows], rope_pairs(q[:rows, :, nope:], turns.unsqueeze(1))], -1)
    context = pad_rows(mla_tree_attention(q, cache, groups, c.kv_lora_rank, law), padded)
    value = batched_linear(context.transpose(0, 1), w.uv, law).transpose(0, 1)
    return linear(value.reshape(padded, -1), w.o, law, hidden)
