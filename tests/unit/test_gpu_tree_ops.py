"""Trees, draws, walks and cache moves for GPUs, on a machine without one: interpreted, and compiled for cards."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[2]
OTHERS = [pytest.param(card, marks=pytest.mark.long) for card in ("100", "103", "120")]  # cards beside Hopper's


def run(*arguments: str, seconds: float = 110, **environment: str) -> str:
    """In a process of its own: whether Triton interprets is decided where it is imported."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | environment
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=env, capture_output=True, text=True, timeout=seconds, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("what", ["tree_ops", "block_attention", "bands", "fed_step"])
def test_in_the_interpreter(what: str) -> None:
    out = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "-x", f"tests/gpu/test_{what}.py", TRITON_INTERPRET="1")
    assert " passed" in out
    assert "needs a CUDA device" not in out


@pytest.mark.parametrize("capability", ["90", *OTHERS])
def test_compiled_for_a_card(capability: str) -> None:
    """No spills on sm_90, next to none elsewhere. One process a card, for each takes a second to import."""
    out = run("-m", "tests.gpu_compile_trees", capability)
    assert "15 kernels" in out
