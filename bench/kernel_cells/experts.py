"""The experts of one rank of K2-Instruct (384, top 8, FP8 in blocks of 128 x 128), uniform routing.

The floor counts the experts that rows choose in the mean, each once. Routing and lists are not in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch

from bench.kernel_cells import Call, Cell, Work
from kernels.gpu.plain_moe import BENCH_SHAPES, FP8, plain_moe, reference
from kernels.gpu.router import expert_lists

Matrix = tuple[torch.Tensor, torch.Tensor]


@cache
def weights(experts: int, n: int, k: int) -> Matrix:
    """Every code that is a number and below 2; shared by all data sets, which choose other experts."""
    codes = torch.randint(0, 256, (experts, n, k), dtype=torch.uint8, device="cuda") & 0xBF
    return codes.view(FP8), torch.rand(experts, n // 128, k // 128, device="cuda") * 0.02 + 0.01


def cell(rows: int, hidden: int, inner: int, experts: int, top_k: int) -> Cell:
    def make() -> Call:
        gate_up, down = weights(experts, 2 * inner, hidden), weights(experts, hidden, inner)
        x, share = torch.randn(rows, hidden, device="cuda").bfloat16(), torch.rand(rows, top_k, device="cuda")
        chosen = torch.rand(rows, experts, device="cuda").argsort(-1)[:, :top_k].int().contiguous()
        pairs = torch.empty(experts, rows, dtype=torch.int32, device="cuda")
        counts = torch.empty(experts, dtype=torch.int32, device="cuda")
        expert_lists(chosen, pairs, counts)
        room = torch.empty(rows * top_k, inner, dtype=torch.bfloat16, device="cuda")
        out = torch.empty(rows, top_k, hidden, device="cuda")

        def run() -> None:
            plain_moe(x, share, pairs, counts, gate_up, down, room, out)

        def check() -> None:
            """Of the last row, whose experts alone are unpacked."""
            its, row = chosen[-1].long(), slice(rows - 1, rows)
            wide, narrow = (
                (values.view(torch.uint8)[its].view(FP8), scales[its]) for values, scales in (gate_up, down)
            )
            renamed = torch.arange(top_k, dtype=torch.int32, device="cuda")[None]
            expected = reference(x[row], renamed, share[row], wide, narrow)
            assert (out[row] - expected).norm() < 1e-2 * expected.norm()

        return Call(run, [room, out], check)

    distinct = experts * (1 - (1 - top_k / experts) ** rows)
    work = Work(int(distinct * 3 * inner * hidden), rows * top_k * hidden * 4, 6.0 * rows * top_k * inner * hidden)
    return Cell("plain_moe", f"R={rows} D={distinct:.0f} FP8", work, make, work.read)


def cells() -> Iterator[Cell]:
    for shape in BENCH_SHAPES:
        yield cell(*shape)
