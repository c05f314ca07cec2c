"""INT4 words of compressed-tensors `pack-quantized`, unpacked.

    value[n, 8w + i] = (((words[n, w] >> 4i) & 15) - 8) * scales[n, (8w + i) // 32]          exact in float32

words [..., N, K/8] int32, scales [..., N, K/32] -> values [..., N, K] float32, not rounded to bfloat16 (a bfloat16
scale times a 4-bit integer has 12 significant bits).
"""

from __future__ import annotations

import torch

from kernels.dispatch import op

TEST_SHAPES = [(1, 32), (6, 64), (256, 384)]  # (N, K)


@op
def int4_unpack(words: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    nibbles = (words.unsqueeze(-1) >> torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)) & 15
    codes = (nibbles - 8).flatten(-2).float()
    values: torch.Tensor = codes.unflatten(-1, (-1, 32)) * scales.float().unsqueeze(-1)
    return values.flatten(-2)
