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

    def gather(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """[n, ...], the parts of all ranks in their order, of the parts of `mine`."""
        return torch.stack(tuple(parts))

    def sum(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """[R, H], the sum over all ranks, of the parts [R, H] of `mine`."""
        return ordered_sum(self.gather(parts))

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """[R, columns of all ranks, in their order], of the columns [R, N] of `mine`."""
        return parts[0] if self.count == 1 else torch.cat(tuple(parts), -1)


class PeerRanks(Ranks):
    """Rank `rank` of `count`, each a process. Every rank calls the same collectives in the same order.

    Raises RuntimeError where a peer is gone or does not answer in time; the group is of no use then.
    """

    def __init__(self, rank: int, count: int, group: Gathers, store: object = None) -> None:
        super().__init__(count)
        self.mine, self._group = range(rank, rank + 1), group
        self._store = store  # which the group may ask for as long as it lives

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return self.gather(parts).movedim(0, -2).flatten(-2)

    def gather(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        (part,) = parts
        everybody = part.new_empty(self.count, *part.shape)
        self._group._allgather_base(everybody, part.contiguous().unsqueeze(0)).wait()
        return everybody


class Notes(Protocol):
    """What ranks leave for each other before they are connected: where each listens. Raises where that is in vain."""

    def put(self, key: str, value: bytes) -> None: ...

    def get(self, key: str) -> bytes:
        """Waits until some rank has put it."""
        ...


class Gathers(Protocol):
    """What is used of torch's process groups, whichever backend."""

    def _allgather_base(self, output: torch.Tensor, given: torch.Tensor) -> Any: ...


def connect(
    backend: Backend,
    meeting: str | Notes,
    rank: int,
    count: int,
    patience: float,
    waiting: Callable[[], None] = lambda: None,
    address: str = "127.0.0.1",
) -> PeerRanks:
    """Meets the other ranks, by notes or at a file of this machine, which must be a new one.

    Until all are there `waiting` is called again and again; it raises where that is in vain. A collective that takes
    longer than `patience` seconds raises RuntimeError. `address`: this host's, which the other ranks can reach; gloo
    listens there and nowhere else. One process may have several groups.
    """
    import torch.distributed

    dist: Any = torch.distributed  # of which little is declared
    store = dist.FileStore(meeting, count) if isinstance(meeting, str) else _noted(meeting)
    store.set(f"here-{rank}", "")
    if isinstance(meeting, str):
        while not store.check([f"here-{other}" for other in range(count)]):
            waiting()
            time.sleep(0.02)
    else:
        store.wait([f"here-{other}" for other in range(count)])
    within = timedelta(seconds=patience)
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = within
        return PeerRanks(rank, count, dist.ProcessGroupNCCL(store, rank, count, options), store)
    gloo = dist.ProcessGroupGloo._Options()
    gloo._timeout = within
    gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]  # nobody else's network
    return PeerRanks(rank, count, dist.ProcessGroupGloo(store, rank, count, gloo), store)


def _noted(notes: Notes) -> Any:
    import torch.distributed

    stores: Any = torch.distributed

    class Noted(stores.Store):  # type: ignore[misc]
        """Notes in the form that torch's process groups ask for."""

        def set(self, key: str, value: Any) -> None:
            notes.put(key, value.encode() if isinstance(value, str) else bytes(value))

        def get(self, key: str) -> bytes:
            return notes.get(key)

        def check(self, keys: Sequence[str]) -> bool:
            """NCCL's watcher asks every second whether a rank wants all to write down what they do: none does."""
            return False

        def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
            for key in keys:
                notes.get(key)

    return Noted()
