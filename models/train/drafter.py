"""The DFlash drafter as a training model, its masks and its D-PACE loss.

A block is the anchor and 7 masks at positions a..a+7; row j predicts the token at a+j. Context keys come
from the target's features at positions strictly before the anchor: the anchor itself has none yet.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.train.shape import DrafterShape, rotary_table, rotate_halves
from models.train.target import matrix, rms_norm


def ones(size: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(size))


class DrafterAttention(nn.Module):
    """The weights of one attention; names are the checkpoint's."""

    def __init__(self, s: DrafterShape, gain: float) -> None:
        super().__init__()
        q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
        self.q_proj, self.k_proj, self.v_proj = matrix(q, s.hidden), matrix(kv, s.hidden), matrix(kv, s.hidden)
        self.o_proj = matrix(s.hidden, q, gain=gain)
        self.q_norm, self.k_norm = ones(s.head_dim), ones(s.head_dim)


class DrafterMlp(nn.Module):
    """The weights of one SwiGLU; names are the checkpoint's."""

    def __init__(self, s: DrafterShape, gain: float) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = matrix(s.width, s.hidden), matrix(s.width, s.hidden)
        self.down_proj = matrix(s.hidden, s.width, gain=gain)


class DrafterLayer(nn.Module):
    """Pre-norm attention over context and block, then SwiGLU."""

    def __init__(self, s: DrafterShape) -> None:
        super().__init__()
        self.s = s
        gain = 0.5 * (2 * s.layers) ** -0.5
        self.input_layernorm, self.post_attention_layernorm = ones(s.hidden), ones(s.hidden)
        self.self_attn = DrafterAttention(s, gain)
        self.mlp = DrafterMlp(s, gain)

    def heads(self, x: Tensor, weight: Tensor, norm: Tensor | None, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """Project, norm per head and rotate (keys and queries), or only project (values): `[B, heads, T, dim]`."""
        out = (x @ weight.to(x.dtype).T).reshape(*x.shape[:-1], -1, self.s.head_dim)
        if norm is not None:
            cos, sin = rotary
            normed = rms_norm(out.float(), norm, self.s.eps)
            out = rotate_halves(normed, cos[:, :, None], sin[:, :, None]).to(x.dtype)
        return out.transpose(1, 2)

    def forward(
        self, x: Tensor, context: Tensor, before: tuple[Tensor, Tensor], at: tuple[Tensor, Tensor], mask: Tensor
    ) -> Tensor:
        s, a, m, dt = self.s, self.self_attn, self.mlp, context.dtype
        y = rms_norm(x, self.input_layernorm, s.eps).to(dt)
        q = self.heads(y, a.q_proj, a.q_norm, at)
        k = torch.cat((self.heads(context, a.k_proj, a.k_norm, before), self.heads(y, a.k_proj, a.k_norm, at)), 2)
        v = torch.cat((self.heads(context, a.v_proj, None, before), self.heads(y, a.v_proj, None, at)), 2)
        groups = s.heads // s.kv_heads
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + (out.transpose(1, 2).flatten(-2) @ a.o_proj.to(dt).T).float()
        y = rms_norm(x, self.post_attention_layernorm, s.eps).to(dt)
        inner = F.silu(y @ m.gate_proj.to(dt).T) * (y @ m.up_proj.to(dt).T)
        return x + (inner @ m.down_proj.to(dt).T).float()


def masks(s: DrafterShape, anchors: Tensor, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Additive masks `[B, 1, rows, length + rows]`: sliding (causal in the block) and full (both ways)."""
    batch, blocks = anchors.shape
    rows = blocks * s.block
    offset = torch.arange(s.block, device=anchors.device).repeat(blocks)
    block = torch.arange(blocks, device=anchors.device).repeat_interleave(s.block)
    anchor = anchors.repeat_interleave(s.block, 1)[:, :, None]
    key = torch.arange(length, device=anchors.device)
    context = key < anchor
    recent = context & (anchor + offset[:, None] - key < s.window)
    same = (block[:, None] == block).expand(batch, rows, rows)
    causal = same & (offset[:, None] >= offset)
    both = (torch.cat((recent, causal), -1), torch.cat((context, same), -1))
    sliding, full = (torch.zeros_like(m, dtype=dtype).masked_fill_(~m, float("-inf"))[:, None] for m in both)
    return sliding, full


class Drafter(nn.Module):
    """Embedding and head are the target's and stay frozen; only what is here is in the checkpoint."""

    cos: Tensor
    sin: Tensor

    def __init__(self, s: DrafterShape) -> None:
        super().__init__()
        self.s = s
        self.fc = matrix(s.hidden, len(s.target_layer_ids) * s.hidden)
        self.hidden_norm, self.norm = ones(s.hidden), ones(s.hidden)
        self.layers = nn.ModuleList(DrafterLayer(s) for _ in range(s.layers))
        inverse = s.theta ** (-2 * torch.arange(s.head_dim // 2).float() / s.head_dim)
        cos, sin = rotary_table(inverse, s.positions + s.block)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, features: Tensor, ids: Tensor, anchors: Tensor, embed: Tensor) -> Tensor:
        """Normed states `[B, blocks, block - 1, hidden]` of rows 1.. of the blocks at `anchors` `[B, blocks]`."""
        s, (batch, blocks), length = self.s, anchors.shape, features.shape[1]
        context = rms_norm((features @ self.fc.to(features.dtype).T).float(), self.hidden_norm, s.eps)
        context = context.to(features.dtype)
        tokens = torch.full((batch, blocks, s.block), s.mask_token, device=ids.device)
        tokens[:, :, 0] = ids.gather(1, anchors)
        x = F.embedding(tokens.flatten(1), embed)
        positions = (anchors[:, :, None] + torch.arange(s.block, device=ids.device)).flatten(1)
        before = (self.cos[None, :length], self.sin[None, :length])
        at = (self.cos[positions], self.sin[positions])
        for layer, mask in zip(self.layers, masks(s, anchors, length, features.dtype), strict=True):
            x = layer(x, context, before, at, mask)
        x = rms_norm(x, self.norm, s.eps)
        return x.view(batch, blocks, s.block, s.hidden)[:, :, 1:]


@dataclass(frozen=True)
class Losses:
    """The loss and the simulated acceptance (tokens per step over all anchors of the batch)."""

    loss: Tensor
    accepted: Tensor


def d_pace(logits: Tensor, labels: Tensor, alpha: float = 0.5) -> Losses:
    """Weight each position by the expected accepted length that still depends on it.

    s_j = (1 - alpha) p_j + alpha, c_j = prod_{m<=j} s_m, w_j = sum_{m>=j} c_m (detached).
    """
    entropy = F.cross_entropy(logits.float().flatten(0, -2), labels.flatten(), reduction="none").view(labels.shape)
    with torch.no_grad():
        reach = ((1 - alpha) * (-entropy).exp() + alpha).cumprod(-1)
        weight = reach.flip(-1).cumsum(-1).flip(-1)
        right = (logits.argmax(-1) == labels).float()
        accepted = 1 + right.cumprod(-1).sum(-1).mean()
    return Losses((weight * entropy).sum(-1).mean(), accepted)


def labels_at(ids: Tensor, anchors: Tensor, block: int) -> Tensor:
    """The tokens at a+1 .. a+block-1, `[B, blocks, block - 1]`."""
    index = anchors[:, :, None] + torch.arange(1, block, device=ids.device)
    return ids.gather(1, index.flatten(1)).view(index.shape)
