"""Runs the ranks of `tests.peer_rank`, and compares what they found with one process's sum."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from kernels.gpu.rank_norm import reference
from tests.peer_rank import SIZES, part, start, weights

ROOT = Path(__file__).resolve().parents[1]


def check_sums(folder: Path, ranks: int, device: str) -> None:
    """Every rank has the sum in rank order and one norm of it; in two shots it has the new x of its own rows."""
    command = [sys.executable, "-m", "tests.peer_rank", str(folder)]
    env = os.environ | {"OMP_NUM_THREADS": "1"} | ({"TRITON_INTERPRET": "1"} if device == "cpu" else {})
    running = [subprocess.Popen([*command, str(n), str(ranks), device], cwd=ROOT, env=env) for n in range(ranks)]
    try:
        assert [rank.wait(280) for rank in running] == [0] * ranks
    finally:
        for rank in running:
            rank.kill()
    found, sizes = [torch.load(folder / f"found-{n}", weights_only=True) for n in range(ranks)], SIZES[device]
    for call in range(2 * len(sizes.rows)):
        rows = sizes.rows[call // 2]
        if call % 2 == 0:
            x = start(call // 2, rows, sizes.hidden)
        x, normed = reference(
            x, torch.stack([part(n, call, rows, sizes.hidden) for n in range(ranks)]), weights(sizes.hidden), 1e-5
        )  # fmt: skip
        for rank, (got, out, tap) in enumerate(of[call] for of in found):
            mine = slice(rank if rows >= sizes.twice else 0, None, ranks if rows >= sizes.twice else 1)
            assert torch.equal(got[mine], x[mine]), f"rank {rank}, call {call}"
            assert torch.allclose(out.float(), normed, rtol=2**-7), f"rank {rank}, call {call}"
            assert torch.equal(out, found[0][call][1]), f"rank {rank}, call {call}: another norm than rank 0's"
            assert torch.equal(tap, x if call % 2 else torch.zeros_like(x)), f"rank {rank}, call {call}"
