"""Matrix products whose rows never depend on how many rows there are.

    linear:          y[m, n] = sum_k x[m, k] w[k, n] (+ base[m, n])      x [M, K], w [K, N] -> y [M, N]
    batched_linear:  y[b, m, n] = sum_k x[b, m, k] w[b, k, n]            x [B, M, K], w [B, K, N] -> y [B, M, N]
    wide_linear:     linear with w in blocks of columns                  x [M, K], w [N/n, K, n] -> y [M, N]

A BLAS picks its kernel by the row count M, so one row alone and the same row among seventeen differ in the last bits. A
`RowLaw` says with which M a product may be called so that they do not: any M >= 4 where MKL honours its strict mode,
tiles of exactly 16 rows elsewhere. The caller pads; a product with another M is our own mistake.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels.dispatch import op

TEST_SHAPES = [(4, 32, 96), (5, 160, 64), (17, 384, 288), (33, 128, 384)]  # (M, K, N)


class RowLaw(NamedTuple):
    """The row counts that products are called with: any from `least` on, or exactly `tile` where that is not 0."""

    least: int
    tile: int = 0

    @property
    def name(self) -> str:
        return f"tile-{self.tile}" if self.tile else f"min-{self.least}"

    def padded(self, rows: int) -> int:
        """The smallest lawful row count that holds `rows`."""
        return -(-rows // self.tile) * self.tile if self.tile else max(self.least, rows)

    def allows(self, rows: int) -> bool:
        return rows % self.tile == 0 if self.tile else rows >= self.least


ANY_ROWS = RowLaw(1)  # for a drafter: its bits are nobody's business
MIN_4 = RowLaw(4)
TILE_16 = RowLaw(16, 16)


def pad_rows(x: torch.Tensor, rows: int, dim: int = 0) -> torch.Tensor:
    """`x` with its first row repeated up to `rows` along `dim`; `x` itself where it has them."""
    have, shape = x.shape[dim], list(x.shape)
    if have == rows:
        return x
    shape[dim] = rows if have == 1 else rows - have
    first = x.narrow(dim, 0, 1).expand(shape)
    # rows of stride 0 would take bmm to another kernel, whose bits differ with two threads
    return first.contiguous() if have == 1 else torch.cat([x, first], dim)


@op
def linear(x: torch.Tensor, w: torch.Tensor, law: RowLaw, base: torch.Tensor | None = None) -> torch.Tensor:
    rows = x.shape[0]
    assert law.allows(rows), "pad the rows first"
    if law.tile and rows > law.tile:
        y = torch.cat([torch.mm(x[i : i + law.tile], w) for i in range(0, rows, law.tile)])
        return y if base is None else y.add_(base)
    return torch.mm(x, w) if base is None else torch.mm(x, w).add_(base)


@op
def batched_linear(x: torch.Tensor, w: torch.Tensor, law: RowLaw) -> torch.Tensor:
    rows = x.shape[1]
    assert law.allows(rows), "pad the rows first"
    if law.tile and rows > law.tile:
        return torch.cat([torch.bmm(x[:, i : i + law.tile], w) for i in range(0, rows, law.tile)], 1)
    return torch.bmm(x, w)


@op
def wide_linear(x: torch.Tensor, w: torch.Tensor, law: RowLaw) -> torch.Tensor:
    """For few rows: of 384 x 4096, sixteen narrow products take half the time of a wide one."""
    return batched_linear(x.expand(len(w), -1, -1), w, law).transpose(0, 1).flatten(1)


def column_blocks(w: torch.Tensor) -> torch.Tensor:
    """[K, N] as `wide_linear` takes it: blocks of 256 columns where N is 1,024 or more and divides, else one."""
    k, n = w.shape
    width = 256 if n >= 1024 and n % 256 == 0 else n
    return w.reshape(k, n // width, width).transpose(0, 1).contiguous()
