"""Reads tensors, or a rank's part of them, out of files into memory or onto a device, through little memory of its own.

Files are read by position, never mapped: a mapped page counts as memory of the process, and a part of a matrix's
columns touches all of its pages. To a CUDA device bytes go through two halves of pinned memory in turn.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch

from hedgerow.model.headers import CheckpointError, Entry
from hedgerow.model.tensors import COLUMNS, WHOLE, Share

CHUNK = 16 << 20  # bytes of one read, and of the memory that reading needs beside the tensors (twice that to a device)
DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "I16": torch.int16, "F16": torch.float16, "BF16": torch.bfloat16,
    "I32": torch.int32, "F32": torch.float32, "I64": torch.int64, "F64": torch.float64,
}  # fmt: skip
EVERY = 2.0  # seconds between two words of progress
EVERY_LOGGED = 10.0  # of them in a log


class Progress(NamedTuple):
    """How far a long piece of work is, in bytes and seconds."""

    done: int
    total: int
    seconds: float

    @property
    def left(self) -> float:
        """Seconds at the speed so far."""
        return self.seconds * (self.total - self.done) / max(self.done, 1)

    def __str__(self) -> str:
        rate = self.done / max(self.seconds, 1e-9) / 1e9
        return f"{self.done / 1e9:.1f} of {self.total / 1e9:.1f} GB, {rate:.2f} GB/s, {self.left:.0f} s left"


Watcher = Callable[[Progress], None]


class Meter:
    """Counts bytes, and tells a watcher every few seconds, and of an end that took longer."""

    def __init__(
        self,
        total: int,
        watcher: Watcher | None,
        clock: Callable[[], float] = time.monotonic,
        every: float = EVERY,
    ) -> None:
        self.total, self.done, self._watcher, self._clock, self._every = total, 0, watcher, clock, every
        self._began = self._told = clock()

    def add(self, count: int) -> None:
        """`count` more bytes are done."""
        self.done += count
        now = self._clock()
        due = now - self._told >= self._every or (self.done == self.total and now - self._began >= self._every)
        if self._watcher is not None and due:
            self._told = now
            self._watcher(Progress(self.done, self.total, now - self._began))


class Files:
    """Open files, read by position. Not for several threads at once."""

    def __init__(self) -> None:
        self._open: dict[Path, int] = {}
        self._scratch: torch.Tensor | None = None
        self._staging: Staging | None = None
        weakref.finalize(self, close, self._open)

    def read(self, entry: Entry, axis: int | None, share: Share, device: torch.device | str = "cpu") -> torch.Tensor:
        """The share of a tensor along `axis`, of its stored type and of its own memory.

        Raises CheckpointError where the file ends early or has become another.
        """
        shape = list(entry.shape)
        if axis is not None:
            shape[axis] = len(share.of(shape[axis]))
        out = torch.empty(shape, dtype=DTYPES[entry.dtype], device=device)
        if out.numel():
            self.into(out.view(-1).view(torch.uint8), entry, axis, share)
        return out

    def into(self, out: torch.Tensor, entry: Entry, axis: int | None, share: Share) -> None:
        """The same into `out`, [bytes] uint8 of the share's size, anywhere."""
        if axis == COLUMNS and share != WHOLE:
            self._columns(out, entry, share)
            return
        start = entry.start + (0 if axis is None else share.rank * out.numel())
        staging = self._staging_for(out)
        if staging is not None:
            for at in range(0, out.numel(), CHUNK):
                part = out[at : at + CHUNK]
                self.fill(staging.free(part.numel()), entry.file, start + at)
                staging.move(part)
            return
        for at in range(0, out.numel(), CHUNK):
            self.fill(out[at : at + CHUNK], entry.file, start + at)

    def fill(self, out: torch.Tensor, file: Path, start: int) -> None:
        """`out`, [bytes] uint8 of host memory, from byte `start` of the file."""
        view = memoryview(out.numpy().data)
        while view:
            try:
                count = os.preadv(self._descriptor(file), [view], start)
            except OSError as error:
                raise CheckpointError(file, "", "a file that can be read", error.strerror) from None
            if count == 0:
                raise CheckpointError(file, "", f"at least {start + len(view)} bytes", f"{start} bytes, while reading")
            view, start = view[count:], start + count

    def _columns(self, out: torch.Tensor, entry: Entry, share: Share) -> None:
        """Whole rows go through the scratch; of each, the share's bytes are kept."""
        rows = entry.shape[0]
        wide, part = entry.bytes // rows, out.numel() // rows
        scratch = self._room()
        at_once = max(1, len(scratch) // wide)
        if wide > len(scratch):
            raise CheckpointError(entry.file, "", f"rows of at most {len(scratch)} bytes", wide)
        target, staging = out.view(rows, part), self._staging_for(out)
        for row in range(0, rows, at_once):
            count = min(at_once, rows - row)
            lines = scratch[: count * wide]
            self.fill(lines, entry.file, entry.start + row * wide)
            mine = lines.view(count, wide)[:, share.rank * part : (share.rank + 1) * part]
            if staging is not None:
                staging.free(mine.numel()).view(count, part).copy_(mine)
                staging.move(target[row : row + count].view(-1))
            else:
                np.copyto(target[row : row + count].numpy(), mine.numpy())

    def _staging_for(self, out: torch.Tensor) -> Staging | None:
        """What stands before the device of `out`; None before host memory."""
        if not out.is_cuda:
            return None
        if self._staging is None or self._staging.device != out.device:
            halves = [torch.empty(CHUNK, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
            self._staging = Staging(out.device, halves, [torch.cuda.Event() for _ in halves])
        return self._staging

    def _room(self) -> torch.Tensor:
        if self._scratch is None:
            self._scratch = torch.empty(CHUNK, dtype=torch.uint8)
        return self._scratch

    def _descriptor(self, file: Path) -> int:
        if file not in self._open:
            self._open[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        return self._open[file]


class Event(Protocol):
    """As torch.cuda.Event: recorded behind a copy, waited for before its memory is written again."""

    def record(self) -> None: ...
    def synchronize(self) -> None: ...


class Staging:
    """Two halves of pinned memory before a device: one is read into while the other is on its way."""

    def __init__(self, device: torch.device, halves: Sequence[torch.Tensor], sent: Sequence[Event]) -> None:
        self.device, self._turn, self._halves = device, 0, halves
        self._sent = sent  # an event that was never recorded is no wait

    def free(self, count: int) -> torch.Tensor:
        """`count` bytes of the half whose turn it is, once what it held has arrived."""
        self._sent[self._turn].synchronize()
        return self._halves[self._turn][:count]

    def move(self, out: torch.Tensor) -> None:
        """The half's bytes to `out`; the other half is next."""
        self._copy(out, self._halves[self._turn][: out.numel()])
        self._sent[self._turn].record()
        self._turn = 1 - self._turn

    def _copy(self, out: torch.Tensor, half: torch.Tensor) -> None:
        out.copy_(half, non_blocking=True)


def close(files: dict[Path, int]) -> None:
    for descriptor in files.values():
        os.close(descriptor)
    files.clear()
