"""In which order the end of a block between ranks does things. What it computes: tests/gpu/test_rank_norm.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(300)  # seconds of work, on cores that others use too
@pytest.mark.parametrize("capability", ["90", "120"])
def test_no_part_is_read_before_all_threads_know_that_it_is_there(capability: str) -> None:
    """Each thread waits for one rank; without a barrier behind the wait it read the others' parts too early, and a
    group on two GPUs had other bits than one process."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.gpu_compile_ranks", capability]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 kernels" in done.stdout, done.stdout
