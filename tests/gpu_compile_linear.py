"""Compiles the dense products of a K2.6 rank as they are cut: python -m tests.gpu_compile_linear 90"""

from __future__ import annotations

import sys

import torch

from kernels.gpu.linear import CUTS, apart, cut_of, multiply
from tests.gpu_compile import SHARED, build, launches

HEADS = {(512, 128): 8, (128, 512): 8}


def one(rows: int, n: int, k: int, capability: int) -> None:
    heads = HEADS.get((n, k), 1)
    x, w = torch.empty(rows, heads, k, dtype=torch.bfloat16), torch.empty(heads, n, k, dtype=torch.bfloat16)
    out, cut = torch.empty(apart(rows, n, k), rows, heads, n), cut_of(rows, n, k, SHARED[capability] - 4096)
    for launch in launches(lambda: multiply(x, w, out, None, 1.0, cut)):
        launch.arguments["PDL"] = True
        launch.options["launch_pdl"] = True
        got = build(launch, capability)
        assert got.spilled == 0, f"{n}x{k}: {got}"
        assert got.shared <= SHARED[capability], f"{n}x{k}: {got}"
        assert got.instructions["HMMA"] or got.instructions["HGMMA"], f"{n}x{k}: {got}"
        print(f"{n}x{k}, {rows} rows: {got.registers} registers, {got.shared} bytes shared")


if __name__ == "__main__":
    for n, k in CUTS:
        for rows in (16, 64):
            one(rows, n, k, int(sys.argv[1]))
    print(f"{2 * len(CUTS)} products")
