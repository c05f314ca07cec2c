"""New latents into the paged cache.

cache[slots[r]] = values[r]         cache [S, W], slots [R] int64 (distinct), values [R, W]; in place
"""

from __future__ import annotations

import torch

from kernels.dispatch import op

TEST_SHAPES = [(128, 1, 48), (256, 9, 160)]  # (S, R, W)


@op
def kv_write(cache: torch.Tensor, slots: torch.Tensor, values: torch.Tensor) -> None:
    cache.index_copy_(0, slots, values)
