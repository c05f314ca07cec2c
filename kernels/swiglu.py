"""Gated activation.

    y = silu(g) * u,  silu(g) = g / (1 + exp(-g))          [g | u] [..., 2 W] -> y [..., W]

W must be a multiple of 32: torch rounds SiLU differently in and past the last whole vectors.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.dispatch import op

TEST_SHAPES = [(4, 32), (17, 128), (5, 4, 96)]  # [..., W]


@op
def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)
