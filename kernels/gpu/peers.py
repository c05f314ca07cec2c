"""Memory that every rank of one host can write to: an inbox of each rank, for the others' parts and sums.

CUDA's inter-process handles go from rank to rank over the group's own collective, once. NVLink multicast is not used.
Where one rank cannot reach another's memory, no rank uses it: the answer is the same on all of them.
"""

from __future__ import annotations

import marshal
from typing import Any

import torch

from kernels.collectives import Ranks
from kernels.gpu.peer_norm import ABSENT, GONE

HANDLE = 1024  # bytes, more than any handle has


class PeerBuffer:
    """Implements `kernels.gpu.peer_norm.Peers`. It lives as long as any rank's launches use it."""

    def __init__(self, rank: int, lines: torch.Tensor, others: list[Any]) -> None:
        """`lines` [n + 3, rows, hidden] int16, as `empty` makes them; `others` are the other ranks'."""
        self.rank, self.count = rank, len(others)
        self.inbox, self.normed = lines[: self.count], lines[self.count]
        self.tapped = lines[self.count + 1 :].view(torch.int32).view(self.normed.shape)
        self.part = torch.zeros(self.normed.shape, dtype=torch.bfloat16, device=lines.device)
        ways = torch.tensor([0 if other is None else other.data_ptr() - lines.data_ptr() for other in others])
        self.places = torch.stack([ways // 2, ways // 4]).to(lines.device)
        self._keep = others


def empty(ranks: int, rows: int, hidden: int, device: torch.device | str) -> torch.Tensor:
    """What the other ranks write to: `ranks` lines of parts, one of norms, two for tapped rows in float32."""
    lines = torch.full((ranks + 3, rows, hidden), GONE.value, dtype=torch.int16, device=device)
    lines[:ranks] = ABSENT.value
    return lines


def share(ranks: Ranks, rank: int, rows: int, hidden: int, device: torch.device) -> PeerBuffer | None:
    """An inbox of every rank for parts [rows, hidden] in bfloat16; None where some rank cannot reach another's. A call
    of all ranks."""
    lines = empty(ranks.count, rows, hidden, device)
    torch.cuda.synchronize(device)
    try:
        handle = marshal.dumps(lines.untyped_storage()._share_cuda_())
    except RuntimeError:
        handle = b""
    others = list[Any]()
    for other, (size, *data) in enumerate(_exchanged(ranks, handle, device)):
        others.append(None if other == rank else _opened(bytes(data[: size or 0]), device))
    reached = all(found is not None for other, found in enumerate(others) if other != rank)
    if not all(line[0] for line in _exchanged(ranks, b"1" if reached else b"", device)):
        return None
    return PeerBuffer(rank, lines, others)


def _exchanged(ranks: Ranks, given: bytes, device: torch.device) -> list[list[int]]:
    """What every rank gave: its length, then its bytes."""
    assert len(given) < HANDLE
    line = torch.tensor([len(given), *given, *bytes(HANDLE - len(given))], dtype=torch.int32, device=device)
    return ranks.gather([line]).tolist()


def _opened(handle: bytes, device: torch.device) -> Any:
    """Another rank's memory as this device reaches it; None where it does not."""
    if not handle:
        return None
    _, *rest = marshal.loads(handle)
    try:
        return torch.UntypedStorage._new_shared_cuda(device.index or 0, *rest)
    except RuntimeError:
        return None
