"""The experts' products of a K2.6 rank as compiled and carried out in NumPy, a few of their columns: against the
reference, and a row alone against the row among others, which takes other tiles: python -m tests.gpu_emulate_moe"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from triton.runtime.jit import JITFunction

from kernels.gpu import checks, moe_tiles
from kernels.gpu.int4_moe_gemm import (
    HIDDEN,
    INNER,
    SLOTS,
    OrderedExperts,
    Workspace,
    int4_moe_gemm,
    order_experts,
    reference,
)
from tests.gpu_compile import Launch, kernel_of
from tests.gpu_emulate_attention import Attention

EXPERTS = 3
OF_DOWN = (0, 111)  # tiles of 64 output columns that are carried out
COLUMNS = [column for tile in OF_DOWN for column in range(64 * tile, 64 * tile + 64)]
Matrices = tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def argument(value: Any) -> Any:
    """As the emulator takes it; arrays are the tensors' own memory."""
    if not isinstance(value, torch.Tensor):
        return np.float32(value) if isinstance(value, float) else value
    whole = (
        value
        if value.is_contiguous()
        else value.as_strided((value.untyped_storage().nbytes() // value.itemsize,), (1,), 0)
    )
    return whole.view(
        torch.uint8
        if whole.dtype == torch.bool
        else {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[whole.itemsize]
    ).numpy()


def carry_out(launch: Launch, programs: list[tuple[int, int]]) -> None:
    """These programs of a launch on CPU tensors."""
    ptx = kernel_of(launch, 90).asm["ptx"]
    given = []
    for parameter in launch.function.params:
        value = launch.arguments[parameter.name]
        alone = type(value) is int and value == 1 and not parameter.do_not_specialize
        if not (parameter.is_constexpr or value is None or alone):
            given.append(argument(value))
    for block in programs:
        Attention(ptx, *given, block=block)


def wanted(name: str, grid: tuple[int, ...], tiles: int) -> list[tuple[int, int]]:
    """All of the first product's programs that have a tile; of the second's and the sum's, those of some columns."""
    if name == "gate_up_tiles":
        return [(x, y) for x in range(grid[0]) for y in range(tiles)]
    if name == "down_rows":  # 16 columns each
        return [(4 * tile + part, y) for tile in OF_DOWN for part in range(4) for y in range(grid[1])]
    if name == "down_tiles":
        each = HIDDEN // 64 // grid[0]
        return [(x, y) for x in sorted({tile // each for tile in OF_DOWN}) for y in range(tiles)]
    if name == "combine":  # the first argument of the grid is the row
        each = HIDDEN // grid[1]
        return [(r, y) for r in range(grid[0]) for y in sorted({column // each for column in COLUMNS})]
    return [(x, 0) for x in range(grid[0])]


def carried_out(call: Callable[[], object], tiles: int) -> None:
    """`tiles`: as many as there are where the work list is the routing itself."""

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        nonlocal tiles
        options = {name: kwargs.pop(name) for name in list(kwargs) if name not in self.arg_names}
        if self.__name__ == "_tiles":  # the interpreter runs it: tests/gpu/test_int4_moe_gemm.py
            tiles = listed(*args[:4], kwargs["V"], kwargs["HALVES"])
            return
        launch = Launch(self, dict(zip(self.arg_names, args, strict=False)) | kwargs, options)
        carry_out(launch, wanted(self.__name__, grid, tiles))

    with patch.object(JITFunction, "run", run), patch.object(checks, "INTERPRETED", True):
        call()


def listed(
    chosen: torch.Tensor, expert: torch.Tensor, pairs: torch.Tensor, number: torch.Tensor, size: int, halves: bool
) -> int:
    tiles = moe_tiles.reference(chosen, EXPERTS, size, halves)
    number[0] = len(tiles)
    for n, (e, mine) in enumerate(tiles):
        expert[n], pairs[n] = e, -1
        pairs[n, : len(mine)] = torch.tensor(mine)
    return len(tiles)


def matrices() -> Matrices:
    random = torch.Generator().manual_seed(1)

    def matrix(n: int, k: int, size: float) -> tuple[torch.Tensor, torch.Tensor]:
        words = torch.randint(-(2**31), 2**31, (EXPERTS, n, k // 8), dtype=torch.int64, generator=random)
        return words.int(), ((torch.rand(EXPERTS, n, k // 32, generator=random) + 0.5) * size).bfloat16()

    return matrix(2 * INNER, HIDDEN, 0.004), matrix(HIDDEN, INNER, 0.02)


def routed(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two slots of a row have an expert; in row 1 one has."""
    random = torch.Generator().manual_seed(7)
    x, weights = torch.randn(rows, HIDDEN, generator=random).bfloat16(), torch.rand(rows, SLOTS, generator=random) + 0.1
    chosen = torch.full((rows, SLOTS), -1, dtype=torch.int32)
    for row in range(rows):
        chosen[row, 0], chosen[row, 3] = row % EXPERTS, (row + 1) % EXPERTS
    if rows > 1:
        chosen[1, 3] = -1
    return x, chosen, weights


def computed(given: tuple[torch.Tensor, ...], experts: OrderedExperts) -> torch.Tensor:
    space = Workspace(len(given[0]), EXPERTS, "cpu")
    space.hidden.fill_(torch.nan)
    space.y.fill_(torch.nan)
    out = torch.full((len(given[0]), HIDDEN), torch.nan)
    carried_out(lambda: int4_moe_gemm(*given, experts, space, out), given[1].numel())  # type: ignore[arg-type]
    return out


ROWS = (5, 13)  # tiles of eight pairs; of four, and of eight in two halves where an expert has more

if __name__ == "__main__":
    plain = matrices()
    experts = order_experts(*((words.clone(), scales.clone()) for words, scales in plain))
    for rows in ROWS:
        many = routed(rows)
        got = computed(many, experts)[:, COLUMNS]
        expected = reference(*many, *plain)[:, COLUMNS]
        error = (got.double() - expected).norm(dim=1) / expected.norm(dim=1)
        assert float(error.max()) < 4e-3, error  # hidden and y have 8 bits
        for row in {0, 1, rows - 1}:
            alone = computed(tuple(part[row : row + 1].contiguous() for part in many), experts)[:, COLUMNS]
            assert torch.equal(alone.view(torch.int32), got[row : row + 1].view(torch.int32)), (rows, row)
    print(f"{len(ROWS)} steps")
