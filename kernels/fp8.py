"""FP8 (e4m3) matrices with one scale for each block of 128 x 128, as DeepSeek's checkpoints store them, unpacked.

    value[n, k] = codes[n, k] * scales[n // 128, k // 128]          one float32 product

codes [N, K] float8_e4m3fn, scales [ceil(N / 128), ceil(K / 128)] -> values [N, K] float32.
"""

from __future__ import annotations

import torch

from kernels.dispatch import op

BLOCK = 128
TEST_SHAPES = [(1, 1), (128, 128), (576, 256), (130, 300)]  # (N, K)


@op
def fp8_unpack(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    rows, columns = codes.shape
    values = codes.float()
    wide = scales.float().repeat_interleave(BLOCK, 1)[:, :columns]
    for block, line in enumerate(wide):
        values[block * BLOCK : min(rows, (block + 1) * BLOCK)] *= line
    return values
