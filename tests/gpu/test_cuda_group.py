"""A group whose ranks are processes with a GPU each: one process with two shards, token for token; and a lost rank."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from kernels.collectives import Ranks
from tests.cuda_group import BUNDLED, LAYERS, TOKENS, both

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")]
ROOT = Path(__file__).resolve().parents[2]
GROUP = [sys.executable, "-m", "tests.cuda_group"]


@pytest.mark.timeout(200)
def test_the_bundled_model_on_two_gpus_is_the_one_with_two_shards(tmp_path: Path) -> None:
    """Trees and plain, sampled and greedy, three sequences beside each other; whole steps on every rank."""
    from hedgerow.model.cuda_ranked import RankedK2

    one = RankedK2.of(BUNDLED, LAYERS, torch.device("cuda", 0), Ranks(2))
    expected = both(one)
    assert all(len(tokens) == TOKENS for tokens in expected[0].values())
    assert expected[1] == expected[0]
    done = subprocess.run(
        [*GROUP, "tokens", str(tmp_path / "out")], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "out").read_text())
    assert found == {"tokens": expected, "law": one.kernel_law, "direct": True}
    assert "should dump" not in done.stderr


@pytest.mark.timeout(100)
@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_rank_ends_the_first_that_waits_for_it_on_its_device(blow: signal.Signals) -> None:
    """Within ten seconds, and no step is an error before that."""
    first = subprocess.Popen([*GROUP, "steps"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert first.stdout is not None
        other = int(first.stdout.readline())
        assert first.stdout.readline() == "alive\n"
        begun = time.monotonic()
        os.kill(other, blow)
        assert first.wait(20) == 7
        assert time.monotonic() - begun < 10
    finally:
        first.kill()
