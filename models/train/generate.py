"""Let the target write text in large batches: absorbed MLA over a latent cache, all experts side by side.

Absorbed, the eight heads are eight query rows over one 160-wide latent head, so a step of thousands of
sequences is a few large batched products.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from models.train.target import Attention, Moe, Target, rms_norm


def absorbed(a: Attention) -> tuple[Tensor, Tensor]:
    """W_UK and W_UV, `[heads, 32, kv_rank]` each, out of kv_b_proj."""
    s = a.s
    up = a.kv_b_proj.view(s.heads, s.nope + s.value, s.kv_rank)
    return up[:, : s.nope], up[:, s.nope :]


class Writer:
    """One batch of sequences with its cache `[layers, B, length, kv_rank + rope]`."""

    def __init__(self, model: Target, batch: int, length: int, chunk: int = 1024) -> None:
        s = model.s
        self.model, self.chunk = model, chunk
        shape = (s.layers, batch, length, s.kv_rank + s.rope)
        self.cache = torch.zeros(shape, device=model.embed.device, dtype=model.dtype)

    def prefill(self, ids: Tensor) -> Tensor:
        """Fill the cache for `[B, P]` prompts, in slices of the batch; logits of the last position."""
        return torch.cat([self._prefill(ids[i : i + self.chunk], i) for i in range(0, len(ids), self.chunk)])

    def _prefill(self, ids: Tensor, first: int) -> Tensor:
        m, (rows, length) = self.model, ids.shape
        cos, sin = m.cos[:length], m.sin[:length]
        x = F.embedding(ids, m.embed)
        for i, block in enumerate(m.layers()):
            normed = rms_norm(x, block.input_layernorm, m.s.eps).to(m.dtype)
            self.cache[i, first : first + rows, :length] = torch.cat(block.attention.latents(normed, cos, sin), -1)
            x, _ = block(x, cos, sin, m.qat, m.dtype)
        return m.logits(rms_norm(x[:, -1], m.norm, m.s.eps))

    def step(self, ids: Tensor, position: int) -> Tensor:
        """Logits after the tokens `[B]` at `position`."""
        m = self.model
        x = F.embedding(ids[:, None], m.embed)
        for i, block in enumerate(m.layers()):
            normed = rms_norm(x, block.input_layernorm, m.s.eps).to(m.dtype)
            x = x + self._attend(i, block.attention, normed, position)
            x, _ = block.feed(x, m.qat, m.dtype)
        return m.logits(rms_norm(x[:, 0], m.norm, m.s.eps))

    def _attend(self, layer: int, a: Attention, normed: Tensor, position: int) -> Tensor:
        m, s = self.model, a.s
        cos, sin = m.cos[position : position + 1], m.sin[position : position + 1]
        self.cache[layer, :, position] = torch.cat(a.latents(normed, cos, sin), -1)[:, 0]
        keys = self.cache[layer, :, : position + 1]
        w_uk, w_uv = (w.to(m.dtype) for w in absorbed(a))
        nope, rope = (q[:, 0] for q in a.queries(normed, cos, sin))
        queries = torch.cat((torch.einsum("bhd,hdr->bhr", nope, w_uk), rope), -1)
        scores = torch.bmm(queries, keys.mT).float() * s.softmax_scale
        mixed = torch.bmm(scores.softmax(-1).to(m.dtype), keys[..., : s.kv_rank])
        out = torch.einsum("bhr,hdr->bhd", mixed, w_uv).flatten(1)
        return (out @ a.o_proj.to(m.dtype).T).float()[:, None]


def choose(logits: Tensor, temperature: Tensor) -> Tensor:
    """Greedy where the temperature is 0, else a sample (Gumbel-max)."""
    noise = -torch.log(-torch.log(torch.rand_like(logits, dtype=torch.float32).clamp_(1e-20, 1 - 1e-7)))
    return (logits.float() + noise * temperature[:, None]).argmax(-1)


@torch.inference_mode()
def write(model: Target, prompts: Tensor, lengths: Tensor, temperature: Tensor) -> Tensor:
    """Continue each row of `prompts` `[B, S]` from its own length to S; rows keep their prompt tokens."""
    ids, total = prompts.clone(), prompts.shape[1]
    first = int(lengths.min())
    writer = Writer(model, len(ids), total)
    logits = writer.prefill(ids[:, :first])
    for position in range(first, total):
        token = torch.where(lengths > position, ids[:, position], choose(logits, temperature))
        ids[:, position] = token
        if position + 1 < total:
            logits = writer.step(token, position)
    return ids


def freeze(model: Target) -> Target:
    """Concatenate each layer's expert matrices once, in the type of the products."""
    for block in model.layers():
        if isinstance(block.mlp, Moe):
            block.mlp.freeze(model.dtype)
    return model
