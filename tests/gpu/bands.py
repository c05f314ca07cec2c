"""Guard bands: what torch allocates lies between two bands of known bytes, and holds NaN before it is written."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

BAND, KNOWN, POISON = 4096, 0x5A, 0xFF  # bytes; 0xFF.. is NaN as a float, and -1
_empty = torch.empty


class Bands:
    """The allocations of a `banded` block."""

    def __init__(self) -> None:
        self.held: list[torch.Tensor] = []

    def empty(self, *shape: Any, dtype: torch.dtype | None = None, device: Any = None) -> torch.Tensor:
        sizes = tuple(shape[0]) if shape and not isinstance(shape[0], int) else shape
        dtype = dtype or torch.get_default_dtype()
        count = math.prod(sizes) * dtype.itemsize
        whole = _empty(BAND + -(-count // 16) * 16 + BAND, dtype=torch.uint8, device=device).fill_(KNOWN)
        self.held.append(whole)
        inside = whole[BAND : BAND + count].fill_(POISON)
        return inside.view(dtype).view(sizes)

    def full(self, shape: Any, value: Any, dtype: torch.dtype | None = None, device: Any = None) -> torch.Tensor:
        dtype = dtype or torch.tensor(value).dtype
        return self.empty(tuple(shape), dtype=dtype, device=device).fill_(value)

    def zeros(self, *shape: Any, dtype: torch.dtype | None = None, device: Any = None) -> torch.Tensor:
        return self.empty(*shape, dtype=dtype, device=device).zero_()

    def check(self) -> None:
        """AssertionError with the size of the first allocation that something was written beside."""
        assert self.held, "nothing was allocated"
        for whole in self.held:
            beside = torch.cat([whole[:BAND], whole[-BAND:]])
            wrong = int((beside != KNOWN).sum())
            assert wrong == 0, f"{wrong} bytes beside an allocation of {len(whole) - 2 * BAND} were written"


@contextmanager
def banded() -> Iterator[Bands]:
    """torch.empty, full, zeros and their likes give banded tensors; checked at the end."""
    bands = Bands()

    def like(make: Any) -> Any:
        def made(x: torch.Tensor, *value: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
            return make(tuple(x.shape), *value, dtype=dtype or x.dtype, device=x.device)

        return made

    with ExitStack() as stack:
        for name in ("empty", "full", "zeros"):
            make = getattr(bands, name)
            stack.enter_context(patch.object(torch, name, make))
            stack.enter_context(patch.object(torch, f"{name}_like", like(make)))
        yield bands
    bands.check()
