"""Bytes of memory that a process of its own has at the most while it loads one true-width layer."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest

from hedgerow.weights.published import ONE_LAYER
from hedgerow.weights.rehearse import write

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = """
import sys
from pathlib import Path
from hedgerow.model.loader import Checkpoint, share_bytes
{imports}
peak = lambda: next(int(l.split()[1]) * 1024 for l in open("/proc/self/status") if l.startswith("VmHWM"))
folder, before = Path(sys.argv[1]), peak()
{load}
print(share_bytes(checkpoint.stored, checkpoint.share), before, peak())
"""
needs_proc = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak of memory from /proc")


class Loaded(NamedTuple):
    """Bytes: of the weights in their stored types, and of the process before the load and at the most."""

    share: int
    before: int
    peak: int

    def __str__(self) -> str:
        return f"{self.peak / 1e9:.2f} GB at the most ({self.before / 1e9:.2f} before) for {self.share / 1e9:.2f} GB"


def loaded(imports: str, load: str, experts: int, seconds: float) -> Loaded:
    """`load` reads `folder`, K2.6's widths and `experts` experts, and leaves what it read as `checkpoint`."""
    with tempfile.TemporaryDirectory() as folder:  # pytest keeps its own folders for three runs
        write(Path(folder), "k2.6", dataclasses.replace(ONE_LAYER, experts=experts, vocab=20480))
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT.format(imports=imports, load=load), folder],
            cwd=ROOT, capture_output=True, text=True, check=True, timeout=seconds,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    return Loaded(*map(int, done.stdout.split()))
