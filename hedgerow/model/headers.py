"""What a safetensors file holds, by its header alone: no library reads it, nothing in it is run.

Format (huggingface/safetensors): 8 bytes of header length, a JSON object of name -> dtype, shape and data_offsets, data
without holes. Every complaint names the file, and the tensor where there is one.
"""

from __future__ import annotations

import math
import os
import stat
import struct
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from hedgerow import strict_json
from hedgerow.errors import InvalidRequest, printable

MOST_HEADER = 100_000_000  # bytes, as in the format's own library; K2.6 in one file has 33 MB
SIZES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2, "I32": 4,
    "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip
POINTER = b"version "  # how a Git LFS pointer begins, and no length of a header
# How files begin that would run code when they are loaded.
PICKLES = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


class CheckpointError(InvalidRequest):
    """`tensor` of `file` is not what is needed; `tensor` is empty where the file itself is at fault."""

    def __init__(self, file: Path, tensor: str, expected: str, actual: object) -> None:
        super().__init__(printable(f"{file}: {tensor}" if tensor else str(file)), actual, expected)
        self.file, self.tensor, self.expected, self.actual = file, tensor, expected, actual


class Entry(NamedTuple):
    """Where a tensor lies: bytes `start` .. `end` - 1 of `file`, row-major."""

    file: Path
    dtype: str  # the format's name for it
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def bytes(self) -> int:
        return self.end - self.start


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of a file. Raises CheckpointError unless header and file agree in every byte."""
    size = regular_size(path)
    try:
        with path.open("rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if start.startswith(PICKLES):
                raise CheckpointError(
                    path, "", "a safetensors file", "a pickle or an archive of one; it was not opened"
                )
            if start == POINTER:
                raise CheckpointError(path, "", "the file itself", "a Git LFS pointer to it: git lfs pull")
            if not 0 < length <= min(MOST_HEADER, size - 8):
                limit = f"a safetensors header of at most {min(MOST_HEADER, max(size - 8, 0))} bytes"
                raise CheckpointError(path, "", limit, f"one of {length} bytes, in a file of {size}")
            pairs = strict_json.loads(file.read(length).decode(), Pairs)  # of bytes, UTF-16 would be taken too
    except OSError as error:
        raise CheckpointError(path, "", "a file that can be read", error.strerror) from None
    except ValueError as error:
        raise CheckpointError(path, "", "a safetensors header", str(error)) from None
    return entries(path, pairs, 8 + length, size)


class Pairs(list[tuple[str, Any]]):
    """A JSON object as it stands in the file: a dictionary would hide a name that comes twice."""


def entries(path: Path, header: object, data: int, size: int) -> dict[str, Entry]:
    """The header's entries, each checked by itself and all together: they lie side by side and fill the file."""
    if not isinstance(header, Pairs):
        raise CheckpointError(path, "", "a safetensors header", type(header).__name__)
    found: dict[str, Entry] = {}
    for name, value in header:
        if name == "__metadata__":
            continue
        if name in found:
            raise CheckpointError(path, name, "once in this file", "twice")
        found[name] = one_entry(path, name, value, data)
    end = data
    for name, entry in sorted(found.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != end:
            raise CheckpointError(path, name, f"data_offsets from {end - data}", entry.start - data)
        end = entry.end
    if end != size:
        raise CheckpointError(path, "", f"{end} bytes", f"{size} bytes")
    return found


def one_entry(path: Path, name: str, value: object, data: int) -> Entry:
    """An entry that agrees with itself. Raises CheckpointError."""
    given = dict(value) if isinstance(value, Pairs) else {}
    if isinstance(value, Pairs) and len(given) < len(value):
        raise CheckpointError(path, name, "each field once", "one of them twice")
    dtype, shape, offsets = given.get("dtype"), given.get("shape"), given.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in SIZES:
        raise CheckpointError(path, name, f"a dtype, one of {', '.join(SIZES)}", dtype)
    if not is_sizes(shape):
        raise CheckpointError(path, name, "a shape of integers", shape)
    if not is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(path, name, "data_offsets, two ascending integers", offsets)
    needed = math.prod(shape) * SIZES[dtype]
    if offsets[1] - offsets[0] != needed:
        raise CheckpointError(path, name, f"{needed} bytes for {dtype} {shape}", offsets[1] - offsets[0])
    return Entry(path, dtype, tuple(shape), data + offsets[0], data + offsets[1])


def is_sizes(value: Any) -> TypeGuard[list[int]]:
    """Whether it is a list of integers from 0 on."""
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def regular_size(path: Path) -> int:
    """Bytes of a file. Raises CheckpointError for what is none: a pipe would block, a device has no end."""
    try:
        found = path.stat()
    except FileNotFoundError:
        raise CheckpointError(path, "", "the file", "missing") from None
    except OSError as error:
        raise CheckpointError(path, "", "a file that can be read", error.strerror) from None
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(path, "", "a file that can be read", "a folder" if path.is_dir() else "no regular file")
    return found.st_size


def encodable(name: str) -> bool:
    """Whether a file may be called that: JSON can spell half of a surrogate pair, which no file's name has."""
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return False
    return True


def of_folder(folder: Path, name: str, tensor: str = "", said_in: Path | None = None) -> Path:
    """The file `name` of `folder`. Raises CheckpointError for a name or a link that leads out of it.

    A download cache keeps files beside its snapshots, `snapshots/REVISION/x` -> `blobs/HASH`: such a link is followed.
    """
    said_in = said_in or folder
    if os.path.basename(name) != name or name in ("", ".", "..") or "\0" in name or not encodable(name):
        raise CheckpointError(said_in, tensor, "a file of this folder", name)
    path = folder / name
    if not os.path.islink(path):
        return path
    root, real = Path(os.path.realpath(folder)), Path(os.path.realpath(path))
    blobs = root.parent.parent / "blobs" if root.parent.name == "snapshots" else root
    if real.parent not in (root, blobs):
        raise CheckpointError(path, tensor, "a file of this folder, or of its download cache", f"a link to {real}")
    return path
