"""Writes safetensors files piece by piece: the header first, then each tensor's bytes as they come."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from hedgerow.model.headers import SIZES
from hedgerow.model.manifest import named


class Shape(NamedTuple):
    """A tensor that is to be written."""

    name: str
    dtype: str  # the format's name for it
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * SIZES[self.dtype]


def header(shapes: Iterable[Shape]) -> bytes:
    """Length and JSON, padded to a multiple of eight; tensors lie in the order that is given."""
    told: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for shape in shapes:
        start, end = end, end + shape.bytes
        told[shape.name] = {"dtype": shape.dtype, "shape": list(shape.shape), "data_offsets": [start, end]}
    text = json.dumps(told, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_file(path: Path, shapes: Sequence[Shape], pieces: Iterator[torch.Tensor]) -> None:
    """One file of these tensors; `pieces` are their elements in order, in parts of any length."""
    with named(path), path.open("wb") as file:
        file.write(header(shapes))
        for piece in pieces:
            file.write(as_bytes(piece))
        size = file.tell()
        file.flush()
        os.fsync(file.fileno())
    expected = len(header(shapes)) + sum(shape.bytes for shape in shapes)
    assert size == expected, f"{path}: {size} bytes were written, {expected} were to be"


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The elements, without a copy."""
    return memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
