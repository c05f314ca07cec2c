"""The target as a training model: MLA attention, dense first layer, all experts computed side by side.

At 16 experts of width 128, one product with every expert and a routing weight of 0 for those not chosen
is faster than sorting tokens by expert, has static shapes and gives exact gradients.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.train.quant import fake_quantize
from models.train.shape import TargetShape, rotary_table, rotate_pairs, yarn_inverse_frequencies


def matrix(*shape: int, gain: float = 0.6) -> nn.Parameter:
    """A weight with std gain / sqrt(fan-in)."""
    return nn.Parameter(torch.randn(*shape) * gain * shape[-1] ** -0.5)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


class Attention(nn.Module):
    """MLA in its expanded form; names are the checkpoint's."""

    def __init__(self, s: TargetShape) -> None:
        super().__init__()
        self.s = s
        self.q_a_proj = matrix(s.q_rank, s.hidden)
        self.q_a_layernorm = nn.Parameter(torch.ones(s.q_rank))
        self.q_b_proj = matrix(s.heads * (s.nope + s.rope), s.q_rank)
        self.kv_a_proj_with_mqa = matrix(s.kv_rank + s.rope, s.hidden)
        self.kv_a_layernorm = nn.Parameter(torch.ones(s.kv_rank))
        self.kv_b_proj = matrix(s.heads * (s.nope + s.value), s.kv_rank)
        self.o_proj = matrix(s.hidden, s.heads * s.value, gain=0.5 * (2 * s.layers) ** -0.5)

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Per-head nope and rotated rope parts, `[B, T, heads, dim]`."""
        s, dt = self.s, x.dtype
        low = rms_norm((x @ self.q_a_proj.to(dt).T).float(), self.q_a_layernorm, s.eps).to(dt)
        q = (low @ self.q_b_proj.to(dt).T).reshape(*x.shape[:-1], s.heads, s.nope + s.rope)
        nope, rope = torch.split(q, [s.nope, s.rope], -1)
        return nope, rotate_pairs(rope.float(), cos[..., None, :], sin[..., None, :]).to(dt)

    def latents(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """What a KV cache keeps: the normed latent and the rotated shared key part."""
        s = self.s
        both = (x @ self.kv_a_proj_with_mqa.to(x.dtype).T).float()
        latent, rope = torch.split(both, [s.kv_rank, s.rope], -1)
        latent = rms_norm(latent, self.kv_a_layernorm, s.eps)
        return latent.to(x.dtype), rotate_pairs(rope, cos, sin).to(x.dtype)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        s, dt = self.s, x.dtype
        q_nope, q_rope = self.queries(x, cos, sin)
        latent, k_rope = self.latents(x, cos, sin)
        kv = (latent @ self.kv_b_proj.to(dt).T).reshape(*x.shape[:-1], s.heads, s.nope + s.value)
        k_nope, value = torch.split(kv, [s.nope, s.value], -1)
        q = torch.cat((q_nope, q_rope), -1).transpose(1, 2)
        k = torch.cat((k_nope, k_rope[:, :, None].expand(-1, -1, s.heads, -1)), -1).transpose(1, 2)
        # the fused kernels want values as wide as keys
        v = F.pad(value, (0, s.nope + s.rope - s.value)).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=s.softmax_scale)
        out = out[..., : s.value].transpose(1, 2).flatten(-2)
        return (out @ self.o_proj.to(dt).T).float()


class DenseMlp(nn.Module):
    """The SwiGLU of layer 0; `gate_up` holds both matrices."""

    def __init__(self, s: TargetShape) -> None:
        super().__init__()
        self.gate_up = matrix(2, s.dense_width, s.hidden)
        self.down = matrix(s.hidden, s.dense_width, gain=0.5 * (2 * s.layers) ** -0.5)

    def forward(self, x: Tensor, normed: Tensor, qat: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = (normed @ self.gate_up.to(normed.dtype).flatten(0, 1).T).chunk(2, -1)
        out = (F.silu(gate) * up) @ self.down.to(normed.dtype).T
        return out.float(), qat.new_zeros(1)


class Moe(nn.Module):
    """Sigmoid router with a selection bias, routed experts (INT4 when served) and one shared expert."""

    bias: Tensor

    def __init__(self, s: TargetShape) -> None:
        super().__init__()
        self.s = s
        down_gain = 0.5 * (2 * s.layers) ** -0.5
        self.router = matrix(s.experts, s.hidden)
        self.register_buffer("bias", torch.zeros(s.experts))
        self.gate_up = matrix(s.experts, 2, s.expert_width, s.hidden)
        self.down = matrix(s.experts, s.hidden, s.expert_width, gain=down_gain)
        self.shared_gate_up = matrix(2, s.expert_width, s.hidden)
        self.shared_down = matrix(s.hidden, s.expert_width, gain=down_gain)
        self.frozen: tuple[Tensor, Tensor] | None = None

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Routing weights `[.., experts]`, 0 where not chosen, and the number of tokens per expert."""
        s = self.s
        score = (x.float() @ self.router.T).sigmoid()
        chosen = torch.topk(score.detach() + self.bias, s.top_k, dim=-1).indices
        mask = torch.zeros_like(score).scatter_(-1, chosen, 1.0)
        weight = score * mask
        weight = weight / (weight.sum(-1, keepdim=True) + 1e-20) * s.routed_scale
        return weight, mask.flatten(0, -2).sum(0)

    def forward(self, x: Tensor, normed: Tensor, qat: Tensor) -> tuple[Tensor, Tensor]:
        s, dt = self.s, normed.dtype
        weight, load = self.route(x)
        into, back = self.frozen or self.matrices(qat, dt)
        gate, up = (normed @ into.T).chunk(2, -1)
        weight = F.pad(weight, (0, 1), value=1.0).to(dt)
        active = (F.silu(gate) * up).reshape(*weight.shape, s.expert_width) * weight[..., None]
        return (active.flatten(-2) @ back.T).float(), load

    def matrices(self, qat: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """All routed experts and the shared one side by side: `[2 * 17 * width, H]` and `[H, 17 * width]`."""
        gate_up = fake_quantize(self.gate_up, qat).to(dtype).transpose(0, 1).flatten(1, 2)
        shared = self.shared_gate_up.to(dtype)
        down = fake_quantize(self.down, qat).to(dtype).transpose(0, 1).flatten(1)
        into = torch.cat((gate_up[0], shared[0], gate_up[1], shared[1]))
        return into, torch.cat((down, self.shared_down.to(dtype)), 1)

    def freeze(self, dtype: torch.dtype) -> None:
        """Keep the concatenated matrices: for a model that only writes or is evaluated."""
        self.frozen = self.matrices(torch.zeros((), device=self.down.device), dtype)


class Block(nn.Module):
    """One layer; the residual stream is fp32, products run in `dtype`."""

    def __init__(self, s: TargetShape, layer: int) -> None:
        super().__init__()
        self.s = s
        self.input_layernorm = nn.Parameter(torch.ones(s.hidden))
        self.post_attention_layernorm = nn.Parameter(torch.ones(s.hidden))
        self.attention = Attention(s)
        self.mlp: DenseMlp | Moe = DenseMlp(s) if layer < s.dense_layers else Moe(s)

    def feed(self, x: Tensor, qat: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        normed = rms_norm(x, self.post_attention_layernorm, self.s.eps)
        out, load = self.mlp(normed, normed.to(dtype), qat)
        return x + out, load

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, qat: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        x = x + self.attention(rms_norm(x, self.input_layernorm, self.s.eps).to(dtype), cos, sin)
        return self.feed(x, qat, dtype)


class Target(nn.Module):
    """The whole model. `dtype` is the type of the products: bf16 to train, fp32 to evaluate."""

    cos: Tensor
    sin: Tensor
    qat: Tensor

    def __init__(self, s: TargetShape, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.s, self.dtype = s, dtype
        self.embed = nn.Parameter(torch.randn(s.vocab, s.hidden) * 0.05)
        self.blocks = nn.ModuleList(Block(s, i) for i in range(s.layers))
        self.norm = nn.Parameter(torch.ones(s.hidden))
        self.head = nn.Parameter(torch.randn(s.vocab, s.hidden) * 0.01)
        cos, sin = rotary_table(yarn_inverse_frequencies(s), s.positions)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.register_buffer("qat", torch.zeros(()), persistent=False)

    def layers(self) -> list[Block]:
        return [block for block in self.blocks if isinstance(block, Block)]

    def hidden(self, ids: Tensor, keep: tuple[int, ...] = ()) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Final normed states, the residual stream after the layers in `keep`, and expert loads per layer."""
        x = F.embedding(ids, self.embed)
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        kept, loads = [], []
        for i, block in enumerate(self.layers()):
            x, load = block(x, cos, sin, self.qat, self.dtype)
            loads.append(load)
            if i in keep:
                kept.append(x)
        return rms_norm(x, self.norm, self.s.eps), kept, loads

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden.to(self.dtype) @ self.head.to(self.dtype).T
