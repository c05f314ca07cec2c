"""What runs on a GPU, on a machine without one: in Triton's interpreter, which is chosen when Triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[2]


FILES = (
    ("model_ops", "int4_moe_gemm", "cuda_k2", "cuda_dflash", "cuda_walk"),
    ("rank_norm", "rank_step", "cuda_ranks"),
    ("cuda_dflash2",),
    ("cuda_fed",),
)


@pytest.mark.long
@pytest.mark.timeout(260)
@pytest.mark.parametrize("files", FILES, ids="-".join)
def test_in_the_interpreter(files: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-x"]
    command += [f"tests/gpu/test_{what}.py" for what in files]
    env = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert "needs a CUDA device" not in done.stdout, done.stdout


@pytest.mark.parametrize(
    "capability", ["90", *(pytest.param(card, marks=pytest.mark.long) for card in ("100", "103", "120"))]
)
def test_a_step_compiles(capability: str) -> None:
    """For Hopper without spills."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.gpu_compile_model", capability]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "21 kernels" in done.stdout, done.stdout
