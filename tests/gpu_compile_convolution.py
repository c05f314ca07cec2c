"""Compiles DFlash 2's convolution at its true widths: python -m tests.gpu_compile_convolution 90"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

from kernels.gpu.grouped_convolution import BENCH_SHAPES, TEST_SHAPES, grouped_convolution
from kernels.gpu.linear import apart, linear_parts, room_of_parts
from tests.gpu_compile import NOT_READ, Compiled, compiled

HALF = torch.bfloat16


def built(capability: int, sequences: int, block: int, hidden: int, taps: int, group: int) -> Iterator[Compiled]:
    """The product that makes the kernel of both sides, into a half in bfloat16, out of it in float32."""
    rows, width = sequences * block, 2 * taps * (hidden // group)
    x, w, base = (torch.zeros(*size, dtype=HALF) for size in ((rows, hidden), (width, hidden), (2, taps, hidden)))
    room = torch.zeros(room_of_parts(rows, width, hidden))
    dynamic = torch.zeros(apart(rows, width, hidden), rows, width)
    yield from compiled(lambda: linear_parts(x, w, room), capability, served=True)
    for side, kind in ((0, HALF), (1, torch.float32)):
        given, out = (torch.zeros(rows, hidden, dtype=kind) for _ in range(2))

        def run(x: torch.Tensor = given, out: torch.Tensor = out, side: int = side) -> None:
            grouped_convolution(x, base, dynamic, out, block, side)

        yield from compiled(run, capability, served=True)


if __name__ == "__main__":
    capability = int(sys.argv[1])
    shapes = [(*BENCH_SHAPES[1], 2, 16), (*BENCH_SHAPES[-1], 2, 16), TEST_SHAPES[1][:5]]  # eight parts, one, three taps
    every = [kernel for shape in shapes for kernel in built(capability, *shape)]
    for one in every:
        assert capability in NOT_READ or (one.instructions["ACQBULK"] and one.instructions["PREEXIT"]), one
        print(f"{one.name}: {one.registers} registers, {one.shared} bytes shared, {one.spilled} spilled")
    print(f"{len(every)} kernels")
