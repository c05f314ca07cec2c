"""Compiles the kernel of conditional trees: python -m tests.gpu_compile_pairs 90"""

from __future__ import annotations

import sys

import torch

from kernels.gpu.tree_pairs import tree_pairs
from tests.gpu_compile import compiled


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.int32)


if __name__ == "__main__":
    capability = int(sys.argv[1])
    spilled = 0 if capability == 90 else 128  # bytes, where nothing was tuned
    shape = (64, 7, 16)
    built = [
        kernel
        for nodes in (16, 63)
        for kernel in compiled(
            lambda nodes=nodes: tree_pairs(torch.zeros(*shape, 16), ints(*shape, 16), ints(*shape), ints(64), nodes),  # type: ignore[misc]
            capability,
            spilled,
        )
    ]
    for one in built:
        print(f"{one.name}: {one.registers} registers, {one.shared} bytes shared, {one.spilled} spilled")
    print(f"{len(built)} kernels")
