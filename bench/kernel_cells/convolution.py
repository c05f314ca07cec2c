"""DFlash 2's convolution: what goes into a half of a layer, and what comes out of it."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from bench.kernel_cells import Call, Cell, Work
from kernels.gpu.grouped_convolution import BENCH_SHAPES, grouped_convolution, reference
from kernels.gpu.linear import apart

TAPS, GROUP = 2, 16


def cells() -> Iterator[Cell]:
    for shape in BENCH_SHAPES:
        for side in (0, 1):
            yield cell(*shape, side)


def cell(sequences: int, block: int, hidden: int, side: int) -> Cell:
    rows, width = sequences * block, 2 * TAPS * (hidden // GROUP)
    kind, parts = (torch.bfloat16, torch.float32)[side], apart(rows, width, hidden)

    def make() -> Call:
        x = torch.randn(rows, hidden, device="cuda").to(kind)
        base = torch.randn(2, TAPS, hidden, device="cuda").bfloat16()
        dynamic = torch.randn(parts, rows, width, device="cuda")
        out = torch.empty_like(x)

        def run() -> None:
            grouped_convolution(x, base, dynamic, out, block, side)

        def check() -> None:
            expected = reference(x, base, dynamic, block, side)
            torch.testing.assert_close(out.float(), expected, atol=5e-2, rtol=1e-2)

        return Call(run, [out], check)

    values, given = rows * hidden * kind.itemsize, parts * rows * width // 2 * 4
    work = Work(values + given + TAPS * hidden * 2, values)
    return Cell("grouped_convolution", f"S={sequences} H={hidden} side {side}", work, make, 2 * values + 2 * given)
