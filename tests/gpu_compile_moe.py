"""Compiles what the experts' products launch, for every row of their plan: python -m tests.gpu_compile_moe 90"""

from __future__ import annotations

import sys

import torch

from kernels.gpu.int4_moe_gemm import HIDDEN, INNER, SLOTS, OrderedExperts, Workspace, closes_shared, products
from kernels.gpu.moe_many_products import ROOMY
from kernels.gpu.moe_pack import Ordered
from tests.gpu_compile import SHARED, Launch, build, launches

ROWS = (1, 2, 4, 8, 16, 32, 64, 200, 512, 2048)  # one of each row of the plan; the last only where it fits
EXPERTS = 16
MMA = ("gate_up_tiles", "down_tiles", "down_rows", "group_starts", "gate_up_many", "down_many", "shared_combine")
# bytes: addresses that 112 or 128 MMAs need once. The assembler rather has the registers for products under way.
SPILLED = {"gate_up_many": 96, "down_many": 96}


def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


def calls(capability: int) -> list[Launch]:
    some = ROWS if capability // 10 in ROOMY else ROWS[:-1]

    def matrix(tiles: int, chunks: int) -> Ordered:
        return Ordered(empty(EXPERTS, tiles, chunks, 2048), empty(EXPERTS, tiles, chunks, 256))

    experts = OrderedExperts(matrix(2 * INNER // 64, HIDDEN // 256), matrix(HIDDEN // 64, 1))
    space = Workspace(max(some), EXPERTS, "cpu")

    down = empty(HIDDEN, INNER, dtype=torch.bfloat16)

    def run() -> None:
        for rows in some:
            x, chosen = empty(rows, HIDDEN, dtype=torch.bfloat16), empty(rows, SLOTS)
            weights, out = empty(rows, SLOTS, dtype=torch.float32), empty(rows, HIDDEN, dtype=torch.float32)
            rest = x, chosen, weights, experts, space.tiles(chosen), space, out
            if closes_shared(rows):
                products(*rest, shared=(empty(rows, INNER, dtype=torch.bfloat16), down))
            else:
                products(*rest, out, settled=True)

    return launches(run)


def form(launch: Launch) -> tuple[object, ...]:
    """One of each kernel and set of constants is compiled; of work lists one a capacity."""
    left_out = ("total", "BLOCK") if launch.function.__name__ == "_tiles" else ("count",)
    constants = {name: value for name, value in launch.arguments.items() if isinstance(value, int)}
    return launch.function.__name__, *sorted((n, v) for n, v in constants.items() if n not in left_out)


if __name__ == "__main__":
    capability = int(sys.argv[1])
    different = {form(launch): launch for launch in calls(capability)}
    for launch in different.values():
        one = build(launch, capability)
        most = SPILLED.get(one.name, 0) if capability == 90 else 128  # bytes, where nothing was tuned
        assert one.spilled <= most, f"{one.name} spills {one.spilled} bytes"
        assert one.shared <= SHARED[capability], f"{one.name} takes {one.shared} bytes of shared memory"
        assert one.name not in MMA or one.instructions["HMMA"] + one.instructions["HGMMA"], one
        print(f"{one.name}: {one.registers} registers, {one.shared} bytes shared, {one.instructions.total()} long")
    print(f"{len(different)} kernels")
