"""Sums and joins between true processes have the bits of one process, on every rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.collective_rank import SHAPES, expected, part, run


@pytest.mark.parametrize("count", [2, 3])
def test_processes_over_gloo_have_the_bits_of_one(tmp_path: Path, count: int) -> None:
    for found in run("gloo", count, tmp_path):
        for there, here in zip(found, expected(count), strict=True):
            assert torch.equal(there, here)


def test_the_order_of_these_sums_shows() -> None:
    """Else the test above would pass with any order."""
    for shape in SHAPES:
        parts = [part(rank, shape) for rank in range(3)]
        assert not torch.equal(parts[0] + parts[1] + parts[2], parts[2] + parts[1] + parts[0])
