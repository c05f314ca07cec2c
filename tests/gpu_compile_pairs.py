"""Compiles the kernels of conditional trees: python -m tests.gpu_compile_pairs 90"""

from __future__ import annotations

import sys

import torch

from kernels.gpu.pair_scores import pair_scores
from kernels.gpu.tree_pairs import tree_pairs
from tests.gpu_compile import NOT_READ, compiled


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
    books = [torch.zeros(512, 256) for _ in range(2)]
    for width in (16, 31):
        given = (torch.zeros(64, 7, width), ints(64, 7, width), torch.zeros(64, 7, 256), ints(64, 8)[:, 0], ints(64))
        built += compiled(lambda given=given: pair_scores(*given, *books), capability, served=True)  # type: ignore[misc]
    for one in built:
        waits = bool(one.instructions["ACQBULK"]) and bool(one.instructions["PREEXIT"])
        assert capability in NOT_READ or waits == (one.name == "_pair_scores"), one
        print(f"{one.name}: {one.registers} registers, {one.shared} bytes shared, {one.spilled} spilled")
    print(f"{len(built)} kernels")
