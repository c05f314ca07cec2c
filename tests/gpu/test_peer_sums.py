"""Ranks that write to each other's memory, all on one device: the sums of one process, in one shot and in two."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.peer_sums import check_sums

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_processes_on_one_device_have_the_sum_in_rank_order(tmp_path: Path, ranks: int) -> None:
    """They take turns of milliseconds there, so that a rank reads long before and long after another has written."""
    check_sums(tmp_path, ranks, "cuda")
