"""One rank of a test of `peer_norm` under Triton's interpreter: `python -m tests.peer_rank FOLDER RANK COUNT`.

Inboxes are files that every rank maps.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from kernels.gpu.peer_norm import ABSENT, peer_norm

HIDDEN, MOST = 96, 5
ROWS = (1, 5, 2, 5)  # of a step: two sums each


def part(rank: int, call: int, rows: int) -> torch.Tensor:
    """Each rank's of another size, so that the order of a sum shows in its bits; some are -0.0, some rows wholly."""
    draw = torch.Generator().manual_seed(1000 * rank + call)
    drawn = torch.randn(rows, HIDDEN, generator=draw) * 10.0 ** (3 * (rank % 3))
    drawn[:, call % 3 :: 3] = -0.0
    drawn[call % rows] *= -float(call % 4 != rank)
    return drawn.bfloat16()


def inboxes(folder: Path, turn: int, count: int) -> list[torch.Tensor]:
    size = count * MOST * HIDDEN
    files = [str(folder / f"{turn}-{rank}") for rank in range(count)]
    return [torch.from_file(file, True, size, dtype=torch.int16).view(count, MOST, HIDDEN) for file in files]


def create(folder: Path, count: int) -> None:
    empty = torch.full((count * MOST * HIDDEN,), ABSENT.value, dtype=torch.int16).numpy().tobytes()
    for turn in range(2):
        for rank in range(count):
            (folder / f"{turn}-{rank}").write_bytes(empty)


def peers(folder: Path, turn: int, rank: int, count: int) -> Any:
    boxes = inboxes(folder, turn, count)
    places = torch.tensor([box.data_ptr() - boxes[rank].data_ptr() for box in boxes]) // 2
    room = torch.empty(MOST, HIDDEN, dtype=torch.bfloat16)
    return SimpleNamespace(rank=rank, count=count, part=room, inbox=boxes[rank], places=places, keep=boxes)


def main() -> None:
    folder, rank, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    pair, w = [peers(folder, turn, rank, count) for turn in range(2)], torch.linspace(0.5, 2, HIDDEN).bfloat16()
    x, found = torch.full((MOST, HIDDEN), 0.5), list[torch.Tensor]()
    for step, rows in enumerate(ROWS):
        for turn, one in enumerate(pair):
            one.part[:rows] = part(rank, 2 * step + turn, rows)
            out = torch.empty(rows, HIDDEN, dtype=torch.bfloat16)
            peer_norm(x[:rows], one, w, out, 1e-5)
            found += [x[:rows].clone(), out]
    torch.save(found, folder / f"found-{rank}")


if __name__ == "__main__":
    main()
