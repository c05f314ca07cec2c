"""Elementwise work in blocks that torch computes on one thread.

Above 32,768 elements torch splits an elementwise op between threads wherever the count divides; an element at such a
seam is computed by scalar code, which rounds SiLU, sigmoid and complex products differently from the vector code.
Blocks below that size have no seams, so the bits depend neither on the number of rows nor on that of threads.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

GRAIN = 32_768  # at::internal::GRAIN_SIZE: fewer elements are never split


def by_row_blocks(f: Callable[..., torch.Tensor], x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    """f(x, *others), row-wise in dimension 0, over blocks of rows with fewer than GRAIN elements of x each."""
    if x.numel() < GRAIN:
        return f(x, *others)
    rows = max(1, (GRAIN - 1) // (x.numel() // x.shape[0]))
    return torch.cat([f(*parts) for parts in zip(*(torch.split(t, rows) for t in (x, *others)), strict=True)])
