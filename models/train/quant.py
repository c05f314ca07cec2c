"""INT4 weights, group 32, symmetric: the fake form for training and the packed form of the checkpoint."""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """`[..., K]` -> integers in -7..7 (fp32, `[..., K/32, 32]`) and bf16-valued scales (fp32, `[..., K/32, 1]`)."""
    groups = weight.float().reshape(*weight.shape[:-1], -1, GROUP)
    scale = (groups.abs().amax(-1, keepdim=True) / 7).to(torch.bfloat16).float().clamp_min(1e-20)
    return (groups / scale).round().clamp(-7, 7), scale


def fake_quantize(weight: Tensor, on: Tensor) -> Tensor:
    """The served value of a weight, with the gradient passed straight through; `on` is a 0/1 tensor.

    A tensor, so that switching it on does not recompile the training step.
    """
    q, scale = quantize(weight)
    return weight + ((q * scale).flatten(-2) - weight).detach() * on


def pack(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """compressed-tensors `pack-quantized`: 8 nibbles (q + 8) per int32, lowest nibble first; scales; shape."""
    rows, columns = weight.shape
    q, scale = quantize(weight)
    nibbles = (q.to(torch.int64) + 8).reshape(rows, columns // 8, 8)
    words = (nibbles << (4 * torch.arange(8, device=weight.device))).sum(-1)
    words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    return words, scale.squeeze(-1).to(torch.bfloat16), torch.tensor([rows, columns], dtype=torch.int32)


def unpack(words: Tensor, scale: Tensor) -> Tensor:
    """fp32 weights of a packed matrix: (nibble - 8) * scale, not rounded to bf16."""
    nibbles = (words[..., None] >> (4 * torch.arange(8, device=words.device))) & 15
    q = (nibbles - 8).flatten(-2).float()
    return (q.reshape(*scale.shape, GROUP) * scale.float()[..., None]).flatten(-2)
