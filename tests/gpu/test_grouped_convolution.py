"""DFlash 2's convolution on a GPU against its reference. Under Triton's interpreter: in float32 and float16."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")

from hedgerow.model.convolution import GroupedConvolution
from kernels.gpu.grouped_convolution import BENCH_SHAPES, TEST_SHAPES, grouped_convolution, reference

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
HALF = torch.float16 if INTERPRETED else torch.bfloat16
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}  # of the largest value: one rounding
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Given:
    """x, base, dynamic and a poisoned out between guard rows."""

    def __init__(self, shape: tuple[int, ...], x_type: torch.dtype, out_type: torch.dtype) -> None:
        sequences, self.block, hidden, taps, group, parts = shape
        rows, g = sequences * self.block, torch.Generator().manual_seed(sum(shape))
        self.x = torch.randn(rows, hidden, generator=g).to(x_type).to(DEVICE)
        self.base = torch.randn(2, taps, hidden, generator=g).to(x_type).to(DEVICE)
        self.dynamic = torch.randn(parts, rows, 2 * taps * (hidden // group), generator=g).to(DEVICE)
        self.room = torch.full((rows + 2, hidden), torch.nan, dtype=out_type, device=DEVICE)
        self.out = self.room[1:-1]

    def run(self, side: int) -> torch.Tensor:
        grouped_convolution(self.x, self.base, self.dynamic, self.out, self.block, side)
        return self.out.float()


def close(got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    assert float((got - expected).abs().max()) <= tolerance * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("shape", TEST_SHAPES, ids=str)
def test_rows_are_the_references(shape: tuple[int, ...], side: int) -> None:
    """Into a half in the model's type; out of it in float32, which the bases are not."""
    for kind in (HALF, torch.float32):
        given = Given(shape, kind, kind)
        given.base = given.base.to(HALF)
        want = reference(given.x, given.base, given.dynamic, given.block, side)
        close(given.run(side), want, TOLERANCE[kind])
        assert given.room[0].isnan().all()
        assert given.room[-1].isnan().all(), "a row was written that is none of its own"


@pytest.mark.parametrize("side", [0, 1])
def test_the_cpu_engine_computes_the_same(side: int) -> None:
    for shape in TEST_SHAPES[1:4:2]:
        given = Given(shape, torch.float32, torch.float32)
        taps, group = shape[3:5]
        cpu = GroupedConvolution(given.base.cpu(), torch.empty(0), group)
        dynamic = given.dynamic.sum(0).view(len(given.x), 2, taps, -1)[:, side].cpu()
        want = cpu.apply(given.x.cpu(), cpu.base[side], dynamic, given.block)
        close(given.run(side).cpu(), want, 1e-5)


def test_a_block_reaches_into_no_other() -> None:
    """NaN in one leaves the bits of its neighbours alone, on both sides, and a row those before it."""
    shape = (3, 4, 96, 3, 8, 1)
    given, spoilt = (Given(shape, torch.float32, torch.float32) for _ in range(2))
    before = given.run(0).clone()
    spoilt.x[4:8] = torch.nan
    after = spoilt.run(0)
    assert torch.equal(after[:4], before[:4])
    assert torch.equal(after[8:], before[8:])
    assert after[4:8].isnan().all()
    spoilt.x[4:8] = given.x[4:8]
    spoilt.x[6] = torch.nan
    after = spoilt.run(0)
    assert torch.equal(after[4:6], before[4:6])
    assert after[6:8].isnan().all()


@pytest.mark.skipif(INTERPRETED, reason="slow: widths in plenty, and nothing of it is another branch")
@pytest.mark.parametrize("shape", BENCH_SHAPES, ids=str)
def test_true_widths(shape: tuple[int, int, int]) -> None:
    given = Given((*shape, 2, 16, 8 if shape[0] * shape[1] <= 64 else 1), torch.bfloat16, torch.bfloat16)
    for side in (0, 1):
        close(given.run(side), reference(given.x, given.base, given.dynamic, given.block, side), 1e-2)


@pytest.mark.parametrize("fault", ["x", "out", "base", "dynamic"])
def test_what_does_not_fit_is_refused_by_name(fault: str) -> None:
    given = Given(TEST_SHAPES[0], torch.float32, torch.float32)
    bad = {
        "x": lambda: setattr(given, "block", 3),
        "out": lambda: setattr(given, "out", given.x),
        "base": lambda: setattr(given, "base", given.base[:1]),
        "dynamic": lambda: setattr(given, "dynamic", given.dynamic[..., :-1].contiguous()),
    }
    bad[fault]()
    with pytest.raises(ValueError, match=f"^{fault} "):
        given.run(0)
