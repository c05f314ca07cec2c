"""Eight layers of K2.6 at true shapes on two GPUs: bit for bit what one process with two shards computes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")]
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mine", [2, 8])
def test_two_gpus_have_the_bits_of_one_with_two_shards(tmp_path: Path, mine: int) -> None:
    """Chunks of prompts, trees of 1 to 64 rows, 256 rows in a step; over the ranks' own memory, and gathered by an NCCL
    without peer access. `mine` of eight parts; of all 8, a rank and the
    reference take 100 GB on the first GPU."""
    env = os.environ | {"NCCL_P2P_DISABLE": "1"}  # NCCL's; `share` does without NCCL
    outs = {name: tmp_path / f"{name}.json" for name in ("all", "0", "1")}
    command = [sys.executable, "-m", "tests.cuda_slice", str(tmp_path / "meeting"), str(mine)]
    started = {name: subprocess.Popen([*command, name, "2", str(out)], cwd=ROOT, env=env) for name, out in outs.items()}
    try:
        ended = {name: process.wait(280) for name, process in started.items()}
    finally:
        for process in started.values():
            process.kill()
    assert ended == dict.fromkeys(outs, 0)
    read = {name: json.loads(out.read_text()) for name, out in outs.items()}
    expected = read["all"]["all"]
    assert len(expected) > 90
    for rank in ("0", "1"):
        for way in ("direct", "gathered"):
            wrong = [here[0] for here, there in zip(expected, read[rank][way], strict=True) if here != there]
            assert not wrong, f"rank {rank}, {way}: {wrong}"
