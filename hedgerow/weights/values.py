"""Whether every number of a folder is one: NaN or an infinity in a weight makes every answer NaN sooner or later."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from hedgerow.model.folder import Stored
from hedgerow.model.headers import CheckpointError, Entry
from hedgerow.model.reading import CHUNK, DTYPES, Files, Meter, Watcher

FLOATS = ("BF16", "F16", "F32", "F64", "F8_E4M3", "F8_E5M2")
MAY_BE_INFINITE = ".e_score_correction_bias"  # minus infinity takes an expert out of use


def check_values(parts: Sequence[Stored], watcher: Watcher | None = None) -> Iterator[CheckpointError]:
    """A fault for each tensor with a number that is none. Words and codes are numbers whatever their bits."""
    floats = [
        (name, entry)
        for part in parts
        for name, entry in sorted(part.entries.items(), key=lambda item: (item[1].file, item[1].start))
        if entry.dtype in FLOATS
    ]
    meter, files = Meter(sum(entry.bytes for _, entry in floats), watcher), Files()
    for name, entry in floats:
        if not all(usable(block, name) for block in blocks(files, entry, meter)):
            yield CheckpointError(entry.file, name, "finite numbers", "NaN or an infinity")


def blocks(files: Files, entry: Entry, meter: Meter) -> Iterator[torch.Tensor]:
    """The tensor's elements in order, in one buffer that is used again."""
    buffer = torch.empty(min(CHUNK, entry.bytes), dtype=torch.uint8)
    for at in range(entry.start, entry.end, CHUNK):
        block = buffer[: min(CHUNK, entry.end - at)]
        files.fill(block, entry.file, at)
        meter.add(len(block))
        yield block.view(DTYPES[entry.dtype])


def usable(values: torch.Tensor, name: str) -> bool:
    if values.dtype.itemsize == 1:
        values = values.float()
    found = ~values.isnan() if name.endswith(MAY_BE_INFINITE) else values.isfinite()
    return bool(found.all())
