"""Ranks on GPUs, over NCCL: the bits of one process. Needs two devices."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.collective_rank import expected, run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")]


def test_processes_over_nccl_have_the_bits_of_one(tmp_path: Path) -> None:
    """A device adds two float32 numbers as a CPU does, and nothing else is added: NCCL only gathers."""
    count = torch.cuda.device_count()
    for found in run("nccl", count, tmp_path):
        for there, here in zip(found, expected(count), strict=True):
            assert torch.equal(there, here)
