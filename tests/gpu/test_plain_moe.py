"""Routed experts in FP8 and in the model's own type on a GPU, against their reference; interpreted without one."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")

from kernels.gpu import plain_moe, router

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
TYPE = torch.float32 if INTERPRETED else torch.bfloat16
EXACT = 2e-5 if INTERPRETED else 1e-2  # of the largest value
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Case:
    """Random experts and a routing, of which row 1 is padding."""

    def __init__(self, rows: int, hidden: int, inner: int, experts: int, top_k: int, scaled: bool) -> None:
        self.draw, self.experts, self.scaled = torch.Generator().manual_seed(rows), experts, scaled
        self.x = self.randn(rows, hidden).to(TYPE)
        self.gate_up, self.down = self.matrices(2 * inner, hidden), self.matrices(hidden, inner)
        chosen = torch.rand(rows, experts, generator=self.draw).argsort(-1)[:, :top_k].int()
        if rows > 1:
            chosen[1] = -1
        self.chosen, self.weights, self.inner = chosen.to(DEVICE), self.randn(rows, top_k), inner

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.draw).to(DEVICE)

    def matrices(self, n: int, k: int) -> plain_moe.Weights:
        values = self.randn(self.experts, n, k)
        if not self.scaled:
            return (values * 0.1).to(TYPE), None
        scales = (self.randn(self.experts, n // 128, k // 128).abs() * 0.05 + 0.01).contiguous()
        return (values * 2).to(torch.float8_e4m3fn), scales

    def run(self, some: slice) -> torch.Tensor:
        chosen, x = self.chosen[some].contiguous(), self.x[some].contiguous()
        rows, top_k = chosen.shape
        pairs = torch.zeros(self.experts, rows, dtype=torch.int32, device=DEVICE)
        counts = torch.zeros(self.experts, dtype=torch.int32, device=DEVICE)
        router.expert_lists(chosen, pairs, counts)
        room = torch.full((rows * top_k, self.inner), torch.nan, dtype=TYPE, device=DEVICE)
        partials = torch.full((rows, top_k, x.shape[1]), torch.nan, device=DEVICE)
        weights = self.weights[some].contiguous()
        plain_moe.plain_moe(x, weights, pairs, counts, self.gate_up, self.down, room, partials)
        return partials


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert float((got - expected).abs().max()) <= EXACT * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("shape", plain_moe.TEST_SHAPES)
def test_experts_are_what_their_definition_says(shape: tuple[int, ...], scaled: bool) -> None:
    case = Case(*shape, scaled)
    got, real = case.run(slice(None)), case.chosen[:, 0] >= 0
    expected = plain_moe.reference(case.x, case.chosen, case.weights, case.gate_up, case.down)
    close(got[real], expected[real])
    assert got[~real].isnan().all(), "padding was computed"
    alone = case.run(slice(shape[0] - 1, shape[0]))[0]
    if INTERPRETED:  # NumPy's products depend on the row count
        close(alone, got[-1])
    else:
        assert torch.equal(alone, got[-1]), "a row alone has other bits"


def test_every_block_has_a_scale_of_its_own() -> None:
    """One block's scale changes what that block gives, and nothing else."""
    case = Case(5, 256, 256, 4, 2, True)
    before = case.run(slice(None))
    scales = case.down[1]
    assert scales is not None
    chosen = int(case.chosen[0, 0])
    scales[chosen, 1, 0] *= 2
    after = case.run(slice(None))
    changed = (before != after) & before.isfinite()
    assert changed[0, 0, 128:].any()
    assert not changed[:, :, :128].any(), "rows of another block changed"
    other = (case.chosen != chosen).nonzero()
    assert not any(changed[r, j].any() for r, j in other.tolist())


@pytest.mark.parametrize(
    ("width", "scaled", "message"),
    [(160, True, "multiples of 128"), (48, False, "multiples of 32")],
)
def test_a_width_without_code_is_refused(width: int, scaled: bool, message: str) -> None:
    x, hidden = torch.zeros(1, width, dtype=TYPE), torch.zeros(1, 128, dtype=TYPE)
    counts, pairs = torch.zeros(1, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    weights = (torch.zeros(1, 256, width), torch.zeros(1, 2, 1) if scaled else None)
    with pytest.raises(ValueError, match=message):
        plain_moe.plain_moe(x, torch.zeros(1, 1), pairs, counts, weights, weights, hidden, torch.zeros(1, 1, width))


def test_weights_of_two_kinds_are_refused() -> None:
    case = Case(1, 128, 128, 4, 2, True)
    case.down = case.down[0].to(TYPE), None
    with pytest.raises(ValueError, match="down values is"):
        case.run(slice(None))
