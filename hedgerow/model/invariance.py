"""Which row law this process needs: a self-check of the BLAS library, run when a model is loaded."""

from __future__ import annotations

import logging

import torch

from kernels.linear import MIN_4, TILE_16, RowLaw

log = logging.getLogger(__name__)
ROW_COUNTS = (*range(4, 18), 33)


def choose_row_law(shapes: list[tuple[int, int]]) -> RowLaw:
    """`MIN_4` where products of every row count from 4 on give equal rows for these (K, N); else `TILE_16`."""
    for k, n in shapes:
        x, w = torch.randn(64, k), torch.randn(k, n)
        whole = torch.mm(x, w)
        if not all(torch.equal(torch.mm(x[:m], w), whole[:m]) for m in ROW_COUNTS):
            log.warning("row law tile-16: products of %dx%d depend on the row count", k, n)
            return TILE_16
    return MIN_4
