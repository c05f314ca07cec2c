"""One rank of a test of `kernels.collectives`: `python -m tests.collective_rank BACKEND MEETING RANK COUNT OUT`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kernels.collectives import Ranks, connect

ROOT = Path(__file__).resolve().parents[1]
SHAPES = [(1, 32), (4, 384), (17, 7168), (5, 33)]  # (R, H)


def part(rank: int, shape: Sequence[int]) -> torch.Tensor:
    """A rank's part: of another size for each rank, so that the order of a sum shows in its bits."""
    draw = torch.Generator().manual_seed(100 * rank + shape[0])
    return torch.randn(*shape, generator=draw) * 10.0 ** (3 * (rank % 3))


def expected(count: int) -> list[torch.Tensor]:
    """What every rank must have: one process's sums and joins."""
    ranks, found = Ranks(count), list[torch.Tensor]()
    for shape in SHAPES:
        parts = [part(rank, shape) for rank in range(count)]
        found += [ranks.sum(parts), ranks.join(parts)]
    return found


def run(backend: str, count: int, folder: Path) -> list[list[torch.Tensor]]:
    """What each rank found."""
    outs = [folder / f"{rank}.pt" for rank in range(count)]
    module = [sys.executable, "-m", "tests.collective_rank", backend, str(folder / "meeting")]
    ranks = [
        subprocess.Popen([*module, str(rank), str(count), str(out)], cwd=ROOT, stderr=subprocess.PIPE, text=True)
        for rank, out in enumerate(outs)
    ]
    try:
        for rank in ranks:
            said = rank.communicate(timeout=100)[1]
            assert rank.returncode == 0, said
    finally:
        for rank in ranks:
            rank.kill()
    return [torch.load(out, weights_only=True) for out in outs]


def main() -> None:
    backend, meeting, rank, count, out = sys.argv[1:]
    given: Any = backend
    device = torch.device("cpu" if backend == "gloo" else f"cuda:{rank}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    peers, found = connect(given, meeting, int(rank), int(count), 30, lambda: None), list[torch.Tensor]()
    with torch.inference_mode():
        for shape in SHAPES:
            mine = part(int(rank), shape).to(device)
            found += [peers.sum([mine]).cpu(), peers.join([mine]).cpu()]
    torch.save(found, out)


if __name__ == "__main__":
    main()
