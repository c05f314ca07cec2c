"""Rotary position embedding, in the two layouts in use.

    pairs  (K2):     y[2i] + j y[2i+1]  = (x[2i] + j x[2i+1]) * exp(j p f_i)      x [..., D], turns [..., D/2] complex
    halves (DFlash): y[i] + j y[i+D/2]  = (x[i] + j x[i+D/2]) * exp(j p f_i)      x [..., D], cos, sin [..., D]

Frequencies f_i = theta^(-2i/D), with YaRN (arXiv 2309.00071 §3.2): f_i / factor below the ramp, f_i above it.
"""

from __future__ import annotations

import math

import torch

from kernels.dispatch import op
from kernels.row_blocks import by_row_blocks

TEST_SHAPES = [(4, 16), (5, 8, 32), (300, 8, 32)]  # [..., D]


def inverse_frequencies(dim: int, theta: float) -> torch.Tensor:
    """f_i, [dim / 2] float32."""
    return torch.pow(theta, -torch.arange(0, dim, 2, dtype=torch.float32) / dim)


def yarn_frequencies(
    dim: int, theta: float, factor: float, beta_fast: float, beta_slow: float, original: int
) -> torch.Tensor:
    """YaRN's f_i, [dim / 2] float32: what turns less than beta_slow times in `original` positions is slowed."""

    def dimension(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(dimension(beta_fast)), 0), min(math.ceil(dimension(beta_slow)), dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low if high != low else 0.001)
    ramp = ramp.clamp(0, 1)
    plain = inverse_frequencies(dim, theta)
    return plain / factor * ramp + plain * (1 - ramp)


@op
def rope_pairs(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    return by_row_blocks(torch.mul, x.view(torch.complex64), turns).view(torch.float32)


@op
def rope_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """`sin` carries the sign of the first half: [-sin, sin]."""
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin
