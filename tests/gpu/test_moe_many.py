"""The experts' products for many rows on a GPU: the bits of those for few, whatever the routing leaves to an expert."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from kernels.gpu.int4_moe_gemm import HIDDEN, MANY_ROWS, SLOTS, Workspace, int4_moe_gemm
from kernels.gpu.moe_many_products import many_fit
from tests.gpu.test_int4_moe_gemm import EXPERTS, experts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def given(rows: int, routing: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, chosen, weights. idle: experts without a pair and with a few; ragged: rows and slots without an expert."""
    random = torch.Generator("cuda").manual_seed(rows)
    x = torch.randn(rows, HIDDEN, device="cuda", generator=random)
    x[5], x[6], x[7] = x[5] * 100, x[6] + 3, x[7] * 1e-3
    rank = torch.rand(rows, EXPERTS, device="cuda", generator=random)
    if routing == "skewed":
        rank[:, 3:43:5] += 1
    if routing == "idle":
        rank[:, :9], rank[:, 9] = -1, -1
        rank[:21, 9], rank[700:707, 8] = 2, 2
    chosen = rank.topk(SLOTS, 1).indices.int()
    if routing == "ragged":
        chosen[3], chosen[9:11], chosen[::7, 5] = -1, -1, -1
    return x.bfloat16(), chosen, torch.rand(rows, SLOTS, device="cuda", generator=random) + 0.1


def run(x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, many: bool) -> tuple[torch.Tensor, ...]:
    """hidden, the pairs' y and out, as bits; whatever of hidden and out is not written is NaN."""
    space = Workspace(len(x), EXPERTS)
    space.many_fit = many
    space.hidden.fill_(torch.nan)
    space.y.fill_(torch.nan)
    out = torch.full_like(x, torch.nan)
    int4_moe_gemm(x, chosen, weights, experts(), space, out)
    return tuple(t.view(torch.int16) for t in (space.hidden, space.y[chosen.flatten() >= 0], out))


@pytest.mark.parametrize(
    ("rows", "routing"),
    [
        (1024, "uniform"),
        (1536, "uniform"),
        (2048, "idle"),
        (2049, "skewed"),
        (2100, "ragged"),
        (4096, "uniform"),
        (8192, "uniform"),
    ],
)
def test_many_rows_have_the_bits_of_few(rows: int, routing: str) -> None:
    g = given(rows, routing)
    if not many_fit(g[0].device):
        pytest.skip("no room on this card")
    assert rows >= MANY_ROWS
    for name, got, expected in zip(("hidden", "y", "out"), run(*g, True), run(*g, False), strict=True):
        assert torch.equal(got, expected), name


def test_again_and_again() -> None:
    g = given(2100, "ragged")
    first = run(*g, True)
    for _ in range(10):
        assert all(torch.equal(a, b) for a, b in zip(run(*g, True), first, strict=True))
