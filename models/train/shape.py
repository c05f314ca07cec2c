"""Dimensions of the bundled target and drafter, and the rotary tables that both use."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TargetShape:
    """A DeepSeek-V3/K2-shaped model small enough to ship: 30 M parameters, 12.6 M used per token."""

    vocab: int = 4096
    hidden: int = 384
    layers: int = 10
    dense_layers: int = 1
    dense_width: int = 768
    experts: int = 16
    top_k: int = 4
    expert_width: int = 128
    heads: int = 8
    q_rank: int = 128
    kv_rank: int = 128
    nope: int = 32
    rope: int = 32
    value: int = 32
    eps: float = 1e-5
    routed_scale: float = 2.827
    positions: int = 4096
    theta: float = 50000.0
    yarn_factor: float = 64.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    yarn_original: int = 4096

    @property
    def softmax_scale(self) -> float:
        """Kimi's scale: YaRN's m squared goes into the softmax, nothing goes into cos and sin."""
        m = 0.1 * math.log(self.yarn_factor) + 1
        return float((self.nope + self.rope) ** -0.5 * m * m)


@dataclass(frozen=True)
class DrafterShape:
    """A DFlash drafter: 2 layers (sliding causal, then full bidirectional) over 3 target layers' features."""

    vocab: int = 4096
    hidden: int = 384
    layers: int = 2
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 64
    width: int = 1024
    block: int = 8
    window: int = 256
    target_layers: int = 10
    target_layer_ids: tuple[int, ...] = (1, 4, 7)
    mask_token: int = 4094
    eps: float = 1e-5
    positions: int = 4096
    theta: float = 50000.0


# for a machine without a GPU, to see that every stage runs
TINY_TARGET = TargetShape(
    hidden=128, layers=2, dense_width=128, experts=8, expert_width=32, heads=2, q_rank=32, kv_rank=32
)
TINY_DRAFTER = DrafterShape(
    hidden=128, heads=2, kv_heads=1, width=128, window=64, target_layers=2, target_layer_ids=(0, 1)
)


def yarn_inverse_frequencies(shape: TargetShape) -> Tensor:
    """DeepSeek-YaRN: interpolate slow rotations by the factor, keep fast ones, ramp between."""

    def dimension_of(rotations: float) -> float:
        ratio = shape.yarn_original / (rotations * 2 * math.pi)
        return shape.rope * math.log(ratio) / (2 * math.log(shape.theta))

    low = max(math.floor(dimension_of(shape.beta_fast)), 0)
    high = min(math.ceil(dimension_of(shape.beta_slow)), shape.rope - 1)
    index = torch.arange(shape.rope // 2).float()
    ramp = ((index - low) / max(high - low, 0.001)).clamp(0, 1)
    plain = shape.theta ** (-2 * index / shape.rope)
    return plain / shape.yarn_factor * ramp + plain * (1 - ramp)


def rotary_table(inverse: Tensor, positions: int) -> tuple[Tensor, Tensor]:
    """cos and sin, `[positions, dim/2]`, angles in fp32."""
    angles = torch.arange(positions).float()[:, None] * inverse
    return angles.cos(), angles.sin()


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate adjacent pairs (2i, 2i+1) of the last dimension, as Kimi checkpoints are laid out."""
    even, odd = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate (i, i + dim/2) pairs, as Qwen-style drafters are laid out."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
