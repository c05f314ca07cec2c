"""One rank of a test of `peer_norm`: `python -m tests.peer_rank FOLDER RANK COUNT DEVICE`.

Under Triton's interpreter (DEVICE is cpu) inboxes are files that every rank maps; on a GPU that all ranks share, CUDA's
memory as `kernels.gpu.peers` shares it.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch

from kernels.collectives import Ranks
from kernels.gpu import peer_norm as op
from kernels.gpu.peers import PeerBuffer, empty, share


class Sizes(NamedTuple):
    hidden: int
    most: int
    rows: tuple[int, ...]  # of a step: two sums each, the second tapped
    twice: int  # rows that go in two shots


SIZES = {
    "cpu": Sizes(96, 5, (1, 5, 2, 5, 4, 3), 4),
    "cuda": Sizes(7168, 300, (1, 300, 2, 150, 64, 299, 300, 3) * 3, 240),
}


def part(rank: int, call: int, rows: int, hidden: int) -> torch.Tensor:
    """Each rank's of another size, so that the order of a sum shows in its bits; some are -0.0, some rows wholly."""
    draw = torch.Generator().manual_seed(1000 * rank + call)
    drawn = torch.randn(rows, hidden, generator=draw) * 10.0 ** (3 * (rank % 3))
    drawn[:, call % 3 :: 3] = -0.0
    drawn[call % rows] *= -float(call % 4 != rank)
    return drawn.bfloat16()


def lines(folder: Path, turn: int, count: int) -> list[torch.Tensor]:
    """What each rank has for the others to write to."""
    files, (hidden, most, *_) = [str(folder / f"{turn}-{rank}") for rank in range(count)], SIZES["cpu"]
    size = (count + 3) * most * hidden
    return [torch.from_file(file, True, size, dtype=torch.int16).view(-1, most, hidden) for file in files]


def create(folder: Path, count: int) -> None:
    made = empty(count, SIZES["cpu"].most, SIZES["cpu"].hidden, "cpu").numpy().tobytes()
    for turn in range(2):
        for rank in range(count):
            (folder / f"{turn}-{rank}").write_bytes(made)


def peers(folder: Path, turn: int, rank: int, count: int) -> PeerBuffer:
    boxes = lines(folder, turn, count)
    return PeerBuffer(rank, boxes[rank], [*boxes])


class Filed(Ranks):
    """A gather through files: NCCL refuses two ranks on one device."""

    def __init__(self, folder: Path, rank: int, count: int) -> None:
        super().__init__(count)
        self.mine, self._folder, self._calls = range(rank, rank + 1), folder, 0

    def gather(self, parts: object) -> torch.Tensor:
        (given,) = parts  # type: ignore[attr-defined]
        self._calls += 1
        names = [self._folder / f"gathered-{self._calls}-{rank}" for rank in range(self.count)]
        mine = names[self.mine[0]]
        torch.save(given.cpu(), mine.with_suffix(".new"))
        mine.with_suffix(".new").rename(mine)
        for name in names:
            while not name.exists():
                time.sleep(0.01)
        return torch.stack([torch.load(name, weights_only=True) for name in names]).to(given.device)


def start(step: int, rows: int, hidden: int) -> torch.Tensor:
    """The residual stream at a step's begin, which every rank has."""
    return torch.linspace(-1, 1, rows * hidden).view(rows, hidden) * (step + 1)


def weights(hidden: int) -> torch.Tensor:
    return torch.linspace(0.5, 2, hidden).bfloat16()


def steps(pair: list[PeerBuffer], sizes: Sizes, device: str) -> list[tuple[torch.Tensor, ...]]:
    """Of each sum: the residual stream, its norm, what was tapped. Nothing waits between them."""
    w, found = weights(sizes.hidden).to(device), list[tuple[torch.Tensor, ...]]()
    given = [[part(one.rank, 2 * step + turn, rows, sizes.hidden).to(device) for turn, one in enumerate(pair)]
             for step, rows in enumerate(sizes.rows)]  # fmt: skip
    for step, rows in enumerate(sizes.rows):
        x = start(step, rows, sizes.hidden).to(device)
        for turn, one in enumerate(pair):
            one.part[:rows] = given[step][turn]
            out, tap = torch.empty(rows, sizes.hidden, dtype=torch.bfloat16, device=device), torch.zeros_like(x)
            op.peer_norm(x, one, w, out, 1e-5, tap if turn else None)
            found.append((x.clone(), out, tap))
    return [tuple(tensor.cpu() for tensor in call) for call in found]


def main() -> None:
    folder, rank, count, device = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    sizes, filed = SIZES[device], Filed(folder, rank, count)
    if count > 2:
        op.HOP_BYTES = sizes.twice * sizes.hidden * 2 * (count - 1) * (count - 2) // count
    if device == "cpu":
        pair = [peers(folder, turn, rank, count) for turn in range(2)]
    else:
        made = [share(filed, rank, sizes.most, sizes.hidden, torch.device("cuda", 0)) for _ in range(2)]
        pair = [one for one in made if one is not None]
    torch.save(steps(pair, sizes, device), folder / f"found-{rank}")
    filed.gather([torch.zeros(1)])  # the others may still write here


if __name__ == "__main__":
    main()
