"""Sums over ranks with the norm behind them. Peers' memory takes several GPUs: test_cuda_ranks.py."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from kernels.collectives import ordered_sum
from kernels.gpu import rank_norm
from kernels.gpu.add_rmsnorm import add_rmsnorm
from tests.gpu.test_model_ops import DEVICE, close, poison, pytestmark, rand

__all__ = ["pytestmark"]


def parts_of(count: int, rows: int, hidden: int) -> torch.Tensor:
    """Each rank's of another size, so that the order of a sum shows in its bits."""
    scale = torch.tensor([10.0 ** (3 * (n % 3)) for n in range(count)], device=DEVICE)
    return (rand(count, rows, hidden, dtype=torch.float32) * scale[:, None, None]).to(rand(1).dtype)


@pytest.mark.parametrize(("rows", "hidden", "count"), rank_norm.TEST_SHAPES)
def test_parts_are_added_in_rank_order_before_the_residual(rows: int, hidden: int, count: int) -> None:
    x, w, parts = rand(rows, hidden, dtype=torch.float32), rand(hidden), parts_of(count, rows, hidden)
    wider, out, got = poison(rows, 3 * hidden, dtype=torch.float32), poison(rows, hidden), x.clone()
    rank_norm.rank_norm(got, parts, w, out, 1e-5, wider[:, hidden : 2 * hidden])
    expected, normed = rank_norm.reference(x, parts, w, 1e-5)
    assert torch.equal(got, ordered_sum(parts.float()).add_(x)), "not the sum that the CPU's ranks make"
    assert torch.equal(got, expected)
    assert torch.equal(wider[:, hidden : 2 * hidden], got)
    assert wider[:, 2 * hidden :].isnan().all()
    close(out, normed)
    if count > 2:
        backwards = x.clone()
        rank_norm.rank_norm(backwards, parts.flip(0).contiguous(), w, out, 1e-5)
        assert not torch.equal(backwards, got), "the order does not show"


@pytest.mark.parametrize(("rows", "hidden", "count"), rank_norm.TEST_SHAPES)
def test_a_part_is_a_blocks_output_rounded_once(rows: int, hidden: int, count: int) -> None:
    delta, partials = rand(rows, hidden, dtype=torch.float32), rand(rows, count, hidden, dtype=torch.float32)
    out, total = poison(rows, hidden), torch.zeros(rows, hidden, device=DEVICE)
    for slot in range(count):
        total = total + partials[:, slot]
    rank_norm.rank_part(delta, partials, out)
    assert torch.equal(out, (delta + total).to(out.dtype))


def test_a_row_alone_has_the_same_bits() -> None:
    x, w, parts = rand(9, 384, dtype=torch.float32), rand(384), parts_of(2, 9, 384)
    got, out, alone, one = x.clone(), poison(9, 384), x[4:5].clone(), poison(1, 384)
    rank_norm.rank_norm(got, parts, w, out, 1e-5)
    rank_norm.rank_norm(alone, parts[:, 4:5], w, one, 1e-5)
    assert torch.equal(alone[0], got[4])
    assert torch.equal(one[0], out[4])


def test_one_rank_is_a_block_that_nobody_shares() -> None:
    """The norm's bits are those of `add_rmsnorm`, warps apart."""
    x, w, delta = rand(5, 96, dtype=torch.float32), rand(96), rand(5, 96)
    other, out, expected = x.clone(), poison(5, 96), poison(5, 96)
    rank_norm.rank_norm(x, delta.unsqueeze(0), w, out, 1e-5)
    add_rmsnorm(other, w, expected, 1e-5, delta=delta)
    assert torch.equal(x, other)
    close(out, expected.float())


@pytest.mark.parametrize("fault", ["parts", "x", "w", "out", "tap"])
def test_what_does_not_fit_is_refused_by_name(fault: str) -> None:
    good = {
        "x": rand(5, 64, dtype=torch.float32),
        "parts": rand(2, 5, 64),
        "w": rand(64),
        "out": rand(5, 64),
        "tap": None,
    }
    bad = {"x": rand(5, 64).half(), "parts": rand(2, 4, 64), "w": rand(32), "out": rand(4, 64), "tap": rand(5, 32)}
    with pytest.raises(ValueError, match=f"^{fault} "):
        rank_norm.rank_norm(**{**good, "eps": 1e-5, fault: bad[fault]})  # type: ignore[arg-type]
