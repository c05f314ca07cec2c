"""The experts' weights in the matrix unit's order: every code and scale at the place that the kernels read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("triton")

from hedgerow.model.cuda_weights import Packed, in_order
from kernels.gpu.int4_moe_gemm import MANY_ROWS, Workspace, plan, supports
from kernels.gpu.moe_pack import Ordered, pack_down, pack_gate_up

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(300)  # forty seconds of work, on cores that others use too
@pytest.mark.long
@pytest.mark.parametrize(
    ("capability", "kernels"), [("90", 25), ("100", 25), ("103", 25), ("120", 19)]
)  # many rows' have no room on the latter
def test_products_compile_without_spills(capability: str, kernels: int) -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.gpu_compile_moe", capability]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{kernels} kernels" in done.stdout, done.stdout


def stored(experts: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [E, N, K], and the words and scales that a checkpoint has for them."""
    random = torch.Generator().manual_seed(n)
    codes = torch.randint(0, 16, (experts, n, k), generator=random)
    words = (codes.view(experts, n, k // 8, 8) << torch.arange(0, 32, 4)).sum(-1)
    scales = torch.randn(experts, n, k // 32, generator=random).bfloat16()
    return codes, torch.where(words >= 2**31, words - 2**32, words).int(), scales


def unpacked(packed: Ordered, e: int, row: int, column: int) -> tuple[int, float]:
    """The code and the scale of one weight of a packed matrix, by the words of moe_pack.py."""
    tile, slab, r, g = row // 64, row // 16 % 4, row // 8 % 2, row % 8
    chunk, j, group = column // 256, column // 64 % 4, column // 32 % 2
    t, m, c, w = column // 8 % 4, column // 4 % 2, column // 2 % 2, column % 2
    at = (((j * 4 + slab) * 8 + g) * 4 + t) * 4 + group * 2 + m
    word = int(packed.words[e, tile, chunk, at]) & 0xFFFFFFFF
    word = (word >> 3 | word << 29) & 0xFFFFFFFF
    pair = packed.scales[e, tile, chunk, ((j * 4 + slab) * 8 + g) * 2 + group :][:1]
    return word >> 4 * (w * 4 + c * 2 + r) & 15, float(pair.view(torch.bfloat16)[r])


def check(packed: Ordered, source: list[int], codes: torch.Tensor, scales: torch.Tensor) -> None:
    experts, n, k = codes.shape
    for e in range(experts):
        for row in range(n):
            for column in range(row % 5, k, 5):
                expected = int(codes[e, source[row], column]), float(scales[e, source[row], column // 32])
                assert unpacked(packed, e, row, column) == expected


def test_gate_and_up_lie_beside_each_other() -> None:
    codes, words, scales = stored(2, 128, 512)
    source = [row // 8 % 2 * 64 + row // 16 * 8 + row % 8 for row in range(128)]
    check(pack_gate_up(words, scales.clone()), source, codes, scales)


def test_down_has_neighbours_in_one_thread() -> None:
    codes, words, scales = stored(17, 64, 256)
    source = [row // 16 * 16 + row % 8 * 2 + row // 8 % 2 for row in range(64)]
    check(pack_down(words, scales.clone()), source, codes, scales)


def test_what_cannot_be_packed_is_named() -> None:
    _, words, scales = stored(1, 96, 256)
    with pytest.raises(ValueError, match="96 rows of 256 weights, multiples of 64 and 256 were expected"):
        pack_down(words, scales)
    _, words, scales = stored(1, 64, 256)
    with pytest.raises(ValueError, match=r"scales \[1, 64, 4\]"):
        pack_down(words, scales[..., :4].contiguous())


def test_only_one_ranks_widths_have_code() -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert supports(7168, 256, 8, cuda, torch.bfloat16)
    assert not supports(384, 128, 4, cuda, torch.bfloat16)
    assert not supports(7168, 256, 6, cuda, torch.bfloat16)
    assert not supports(7168, 2048, 8, cuda, torch.bfloat16)
    assert not supports(7168, 256, 8, cuda, torch.float32)
    assert not supports(7168, 256, 8, cpu, torch.bfloat16)


def test_a_model_of_other_widths_keeps_its_experts_as_stored() -> None:
    """One way to choose, for the weights and for the room of a step."""
    _, words, scales = stored(2, 512, 7168)
    gate_up, down = Packed(words, scales), Packed(*stored(2, 7168, 256)[1:])
    kept = in_order(gate_up, down, 8)
    assert kept == (gate_up, down)
    before = words.clone()
    with patch("hedgerow.model.cuda_weights.supports", return_value=True):
        first, second = in_order(gate_up, down, 8)
    assert isinstance(first, Ordered)
    assert isinstance(second, Ordered)
    assert first.words.data_ptr() == words.data_ptr(), "they take no memory of their own"
    assert torch.equal(first.words, pack_gate_up(before, stored(2, 512, 7168)[2]).words)


def test_many_rows_have_tiles_of_64_where_they_fit() -> None:
    assert plan(MANY_ROWS - 1).capacity == 16
    assert plan(MANY_ROWS).capacity == plan(65536).capacity == 64
    assert plan(65536, False) == plan(MANY_ROWS - 1)
    space = Workspace(2048, 8, "cpu")
    assert space.many_fit
    assert len(space.starts) == 2048
    assert len(Workspace(MANY_ROWS - 1, 8, "cpu").starts) == 0


def test_every_plan_holds_a_step() -> None:
    for rows in range(1, 600):
        how = plan(rows)
        columns = how.gate_up["TILES"] * min(how.gate_up["V"], 8)
        assert how.capacity <= columns, rows
        assert how.down is None or how.down["TILES"] == how.gate_up["TILES"]
        assert not how.halves or (how.capacity == 4 and how.gate_up["SLABS"] == 4)
