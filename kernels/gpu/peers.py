"""Memory that every rank of one host can read: a buffer of each rank for its parts, and flags that say they are there.

CUDA's inter-process handles go from rank to rank over the group's own collective, once. NVLink multicast is not used.
Where one rank cannot reach another's memory, no rank uses it: the answer is the same on all of them.
"""

from __future__ import annotations

import marshal
from typing import Any

import torch

from kernels.collectives import Ranks

HANDLE = 1024  # bytes, more than any handle has
ALIGNED = 256


class PeerBuffer:
    """Implements `kernels.gpu.rank_norm.Peers`. It lives as long as any rank's launches use it."""

    def __init__(self, rank: int, count: int, own: torch.Tensor, others: list[Any], rows: int, hidden: int) -> None:
        behind = aligned(count * rows * 4)  # the flags
        self.rank, self.count = rank, count
        self.flags = own[: count * rows * 4].view(torch.int32).view(count, rows)
        self.part = own[behind:].view(torch.bfloat16).view(rows, hidden)
        begins = torch.tensor([own.data_ptr() if other is None else other.data_ptr() for other in others])
        away = (begins - own.data_ptr()).to(own.device)
        self.part_offsets, self.flag_offsets = away // 2, away // 4
        self.turns = torch.zeros(rows, dtype=torch.int32, device=own.device)
        self._keep = own, others


def aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def share(ranks: Ranks, rank: int, rows: int, hidden: int, device: torch.device) -> PeerBuffer | None:
    """A buffer for parts [rows, hidden] in bfloat16 of every rank; None where some rank cannot reach another's. A call
    of all ranks."""
    own = torch.zeros(aligned(ranks.count * rows * 4) + rows * hidden * 2, dtype=torch.uint8, device=device)
    torch.cuda.synchronize(device)
    try:
        handle = marshal.dumps(own.untyped_storage()._share_cuda_())
    except RuntimeError:
        handle = b""
    others = list[Any]()
    for other, (size, *data) in enumerate(_exchanged(ranks, handle, device)):
        others.append(None if other == rank else _opened(bytes(data[: size or 0]), device))
    reached = all(found is not None for other, found in enumerate(others) if other != rank)
    if not all(line[0] for line in _exchanged(ranks, b"1" if reached else b"", device)):
        return None
    return PeerBuffer(rank, ranks.count, own, others, rows, hidden)


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
