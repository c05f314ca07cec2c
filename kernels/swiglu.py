"""Gated activation.

    y = silu(g) * u,  silu(g) = g / (1 + exp(-g))          [g | u] [..., 2 W] -> y [..., W]

For rows whose bits depend on nothing else W must be a multiple of 32: torch rounds SiLU differently past the last whole
vectors.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.dispatch import op
from kernels.row_blocks import by_row_blocks

TEST_SHAPES = [(4, 32), (17, 128), (5, 4, 96), (300, 160)]  # [..., W]


@op
def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    return by_row_blocks(_swiglu, gate_up)


def _swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)
