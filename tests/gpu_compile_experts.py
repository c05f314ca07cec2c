"""Compiles the experts of K2-Instruct's widths, FP8 and plain: python -m tests.gpu_compile_experts 90"""

from __future__ import annotations

import sys

import torch

from kernels.gpu.plain_moe import FP8, plain_moe
from tests.gpu_compile import compiled

HIDDEN, INNER, EXPERTS, TOP_K, ROWS = 7168, 2048, 2, 8, 16


def run(scaled: bool) -> None:
    def weights(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        values = torch.empty(EXPERTS, n, k, dtype=FP8 if scaled else torch.bfloat16)
        return values, torch.empty(EXPERTS, n // 128, k // 128) if scaled else None

    plain_moe(
        torch.empty(ROWS, HIDDEN, dtype=torch.bfloat16), torch.empty(ROWS, TOP_K),
        torch.empty(EXPERTS, ROWS, dtype=torch.int32), torch.empty(EXPERTS, dtype=torch.int32),
        weights(2 * INNER, HIDDEN), weights(HIDDEN, INNER),
        torch.empty(ROWS * TOP_K, INNER, dtype=torch.bfloat16), torch.empty(ROWS, TOP_K, HIDDEN),
    )  # fmt: skip


if __name__ == "__main__":
    for scaled in (True, False):
        for one in compiled(lambda scaled=scaled: run(scaled), int(sys.argv[1])):  # type: ignore[misc]
            assert one.instructions["HMMA"] or one.instructions["HGMMA"], one
            print(f"{one.name} {'FP8' if scaled else 'plain'}: {one.registers} registers, {one.shared} bytes shared")
