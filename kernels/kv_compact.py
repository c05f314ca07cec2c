"""Latents of an accepted path, moved to where plain decoding would have put them.

    cache[:, target[i]] = cache[:, source[i]]      all sources are read before any target is written; in place

cache [layers, S, W], source and target [n] int64, targets distinct.
"""

from __future__ import annotations

import torch

from kernels.dispatch import op

TEST_SHAPES = [(3, 128, 48, 3), (2, 256, 160, 1)]  # (layers, S, W, n)


@op
def kv_compact(cache: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    cache[:, target] = cache[:, source]
