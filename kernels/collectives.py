"""What the ranks of a group give each other: partial sums, added in rank order, and columns side by side.

    ordered_sum:  y = ((p[0] + p[1]) + p[2]) + ...        p [n, R, H] float32 -> y [R, H]

A library's all-reduce adds in an order of its own, which depends on its algorithm, the size and the topology. Here
every rank gathers all parts and adds them itself, so the bits are those of one process that computes the parts one
after the other. `Ranks` is that process; `PeerRanks` is one of several, over gloo or NCCL.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Literal, Protocol

import torch

from kernels.dispatch import op

TEST_SHAPES = [(1, 1, 32), (2, 4, 384), (3, 17, 64), (8, 5, 128)]  # (n, R, H)
Backend = Literal["gloo", "nccl"]


@op
def ordered_sum(parts: torch.Tensor) -> torch.Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total.add_(part)
    return total


class Ranks:
    """`count` ranks of which this process computes all, `mine`; their parts are at hand."""

    def __init__(self, count: int = 1) -> None:
        self.count, self.mine = count, range(count)

    def sum(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """[R, H], the sum over all ranks, of the parts [R, H] of `mine`."""
        return ordered_sum(torch.stack(tuple(parts)))

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """[R, columns of all ranks, in their order], of the columns [R, N] of `mine`."""
        return parts[0] if self.count == 1 else torch.cat(tuple(parts), -1)


class PeerRanks(Ranks):
    """Rank `rank` of `count`, each a process. Every rank calls the same collectives in the same order.

    Raises RuntimeError where a peer is gone or does not answer in time; the group is of no use then.
    """

    def __init__(self, rank: int, count: int, group: Gathers) -> None:
        super().__init__(count)
        self.mine, self._group = range(rank, rank + 1), group

    def sum(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return ordered_sum(self._gather(parts[0]))

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return self._gather(parts[0]).movedim(0, -2).flatten(-2)

    def _gather(self, part: torch.Tensor) -> torch.Tensor:
        """[n, ...] of every rank's part."""
        everybody = part.new_empty(self.count, *part.shape)
        self._group._allgather_base(everybody, part.contiguous().unsqueeze(0)).wait()
        return everybody


class Gathers(Protocol):
    """What is used of torch's process groups, whichever backend."""

    def _allgather_base(self, output: torch.Tensor, given: torch.Tensor) -> Any: ...


def connect(
    backend: Backend, meeting: str, rank: int, count: int, patience: float, waiting: Callable[[], None]
) -> PeerRanks:
    """Meets the other ranks at the file `meeting` of this machine, which must be a new one.

    Until all are there `waiting` is called again and again; it raises where that is in vain. A collective that takes
    longer than `patience` seconds raises RuntimeError. One process may have several groups.
    """
    import torch.distributed

    dist: Any = torch.distributed  # of which little is declared
    store = dist.FileStore(meeting, count)
    store.set(f"here-{rank}", "")
    while not store.check([f"here-{other}" for other in range(count)]):
        waiting()
        time.sleep(0.02)
    within = timedelta(seconds=patience)
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = within
        return PeerRanks(rank, count, dist.ProcessGroupNCCL(store, rank, count, options))
    gloo = dist.ProcessGroupGloo._Options()
    gloo._timeout = within
    gloo._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]  # nobody else's network
    return PeerRanks(rank, count, dist.ProcessGroupGloo(store, rank, count, gloo))
