"""What `bench.kernels` measures: each module here gives `cells()`. The protocol is in bench/kernels.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

COLD = 160_000_000  # bytes that calls must touch between two uses of the same data: L2 has 60 MB on an H200


class Work(NamedTuple):
    """The least that any implementation must do in one call."""

    read: int  # bytes, every input once
    written: int = 0  # bytes, every output once
    flops: float = 0  # of the matrix unit


class Call(NamedTuple):
    """One call of an op, on data of its own."""

    run: Callable[[], object]  # launches and nothing else: it is captured in a graph
    outputs: Sequence[torch.Tensor] = ()  # what it writes: poisoned before the checked call
    check: Callable[[], object] | None = None  # after `run`; AssertionError where an output is wrong


class Cell(NamedTuple):
    """One op at one shape in one form. Cells of the same op and shape are measured by turns, in one script."""

    op: str
    shape: str  # as a reader knows it: "B=1 L=8k T=16"
    work: Work
    make: Callable[[], Call]  # called once a data set, `footprint` bytes each
    footprint: int  # bytes of one data set
    form: str = "kernel"  # or "peer NAME", "baseline NAME"
    limit: float | None = None  # us, the bar of this cell
    times: float | None = None  # the bar as so many times the floor
    most_sets: int = 400  # where a data set is dear to make
