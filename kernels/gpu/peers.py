"""Memory that every rank of one host can write to: an inbox of each rank, for the others' parts.

CUDA's inter-process handles go from rank to rank over the group's own collective, once. NVLink multicast is not used.
Where one rank cannot reach another's memory, no rank uses it: the answer is the same on all of them.
"""

from __future__ import annotations

import marshal
from typing import Any

import torch

from kernels.collectives import Ranks
from kernels.gpu.peer_norm import ABSENT

HANDLE = 1024  # bytes, more than any handle has


class PeerBuffer:
    """Implements `kernels.gpu.peer_norm.Peers`. It lives as long as any rank's launches use it."""

    def __init__(self, rank: int, inbox: torch.Tensor, others: list[Any]) -> None:
        self.rank, self.count, self.inbox = rank, len(inbox), inbox
        self.part = torch.zeros(inbox.shape[1:], dtype=torch.bfloat16, device=inbox.device)
        begins = torch.tensor([inbox.data_ptr() if other is None else other.data_ptr() for other in others])
        self.places = ((begins - inbox.data_ptr()) // inbox.element_size()).to(inbox.device)
        self._keep = others


def share(ranks: Ranks, rank: int, rows: int, hidden: int, device: torch.device) -> PeerBuffer | None:
    """An inbox of every rank for parts [rows, hidden] in bfloat16; None where some rank cannot reach another's. A call
    of all ranks."""
    inbox = torch.full((ranks.count, rows, hidden), ABSENT.value, dtype=torch.int16, device=device)
    torch.cuda.synchronize(device)
    try:
        handle = marshal.dumps(inbox.untyped_storage()._share_cuda_())
    except RuntimeError:
        handle = b""
    others = list[Any]()
    for other, (size, *data) in enumerate(_exchanged(ranks, handle, device)):
        others.append(None if other == rank else _opened(bytes(data[: size or 0]), device))
    reached = all(found is not None for other, found in enumerate(others) if other != rank)
    if not all(line[0] for line in _exchanged(ranks, b"1" if reached else b"", device)):
        return None
    return PeerBuffer(rank, inbox, others)


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
