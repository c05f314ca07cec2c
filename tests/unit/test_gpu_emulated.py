"""Gluon kernels without a GPU, as compiled and carried out in NumPy.

Pieces against the kernels whose bits they have; portable attention and
INT4 experts against their references, and rows alone against rows among others.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("what", "told"),
    [
        pytest.param("norm", "3 products", marks=pytest.mark.long),
        pytest.param("moe", "2 steps", marks=pytest.mark.long),
        ("attention", "5 trees"),
    ],
)
def test_the_bits_are_the_same(what: str, told: str) -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", f"tests.gpu_emulate_{what}"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert told in done.stdout, done.stdout
