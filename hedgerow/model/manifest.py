"""The manifest of a converted folder: one file a rank, in a named order, with a checksum for each part of it.

A converted folder holds config.json and the tokenizer's files of its source, byte for byte, `hedgerow.json`, and
`rank-RR-of-NN.safetensors`, which any reader of the format opens: tensors have their published names and the rank's
part of their shapes. The order "rows-1" lays what an engine multiplies together side by side
(`hedgerow/weights/order.py`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hedgerow.model.fields import ConfigError, Fields
from hedgerow.model.headers import CheckpointError, of_folder, regular_size
from hedgerow.model.tensors import Share

MANIFEST = "hedgerow.json"
VERSION = 1
CHUNK = 1 << 22  # bytes that are hashed at a time
ORDERS = ("rows-1",)  # what this version reads; a kernel's own order gets a name of its own


class Part(NamedTuple):
    """Bytes `start` .. `end` - 1 of a rank's file."""

    start: int
    end: int
    sha256: str


class SourceFile(NamedTuple):
    """A file that a folder was converted from."""

    name: str
    bytes: int
    mtime_ns: int


class Manifest(NamedTuple):
    """What `hedgerow convert` says of a folder."""

    order: str
    ranks: int
    checkpoint_hash: str  # the source's, so that both have one fingerprint
    config_sha256: str
    source: tuple[SourceFile, ...]
    files: tuple[tuple[Part, ...], ...]  # by rank

    def write(self, folder: Path) -> None:
        """In one step: a folder with a manifest is a whole one."""
        text = {
            "format": "hedgerow-ranks", "version": VERSION, "order": self.order, "ranks": self.ranks,
            "checkpoint_hash": self.checkpoint_hash, "config_sha256": self.config_sha256,
            "source": [list(file) for file in self.source],
            "files": [[list(part) for part in parts] for parts in self.files],
        }  # fmt: skip
        write_whole(folder / MANIFEST, json.dumps(text, indent=1) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """None where the folder is not a converted one. Raises ConfigError or CheckpointError."""
        if not os.path.lexists(folder / MANIFEST):
            return None
        file = of_folder(folder, MANIFEST)
        f = Fields.read(file)
        f.must_be("format", "hedgerow-ranks", None)
        f.must_be("version", VERSION, None)
        if f.get("order", str) not in ORDERS:
            raise f.fail("order", f"one of {', '.join(ORDERS)}; convert again with this version")
        manifest = cls(
            f.get("order", str), f.size("ranks"), f.get("checkpoint_hash", str), f.get("config_sha256", str),
            sources(f), parts(f),
        )  # fmt: skip
        if len(manifest.files) != manifest.ranks:
            raise f.fail("files", f"one for each of {manifest.ranks} ranks")
        if file_sha256(of_folder(folder, "config.json")) != manifest.config_sha256:
            raise ConfigError(folder / "config.json", "file", "changed", f"as {MANIFEST} has it; convert again")
        return manifest

    def rank_file(self, folder: Path, share: Share) -> Path:
        """The rank's file. Raises CheckpointError for other ranks than the folder's, and for another length."""
        if share.ranks != self.ranks:
            raise CheckpointError(folder / MANIFEST, "", f"files of {share.ranks} ranks", f"of {self.ranks}")
        file = of_folder(folder, rank_name(share))
        ends, size = self.files[share.rank][-1].end if self.files[share.rank] else 0, regular_size(file)
        if size != ends:
            raise CheckpointError(file, "", f"{ends} bytes", f"{size} bytes")
        return file

    def compare(self, folder: Path, share: Share, heard: Callable[[int], None] = lambda size: None) -> None:
        """The rank's file with its checksums; `heard` is told of bytes as they are read. Raises CheckpointError with
        the part that differs.
        """
        file, expected = self.rank_file(folder, share), self.files[share.rank]
        bad = first_bad(file, expected, heard)
        if bad is not None:
            part = expected[bad]
            raise CheckpointError(file, "", f"sha256 {part.sha256} of bytes {part.start} to {part.end}", "another")


def first_bad(file: Path, expected: Sequence[Part], heard: Callable[[int], None]) -> int | None:
    """The first part of a file with another checksum than expected."""
    with file.open("rb") as source:
        for number, part in enumerate(expected):
            digest, left = hashlib.sha256(), part.end - part.start
            while left and (chunk := source.read(min(CHUNK, left))):
                digest.update(chunk)
                heard(len(chunk))
                left -= len(chunk)
            if left or digest.hexdigest() != part.sha256:
                return number
    return None


def rank_name(share: Share) -> str:
    return f"rank-{share.rank:02d}-of-{share.ranks:02d}.safetensors"


def parts(f: Fields) -> tuple[tuple[Part, ...], ...]:
    """The checksums, file by file. Raises ConfigError."""
    files: Any = f.values.get("files")
    try:
        found = tuple(tuple(Part(int(a), int(b), str(c)) for a, b, c in file) for file in files)
    except (TypeError, ValueError, OverflowError):
        raise f.fail("files", "lists of [start, end, sha256]") from None
    for file in found:
        if [part.start for part in file] != [0, *(part.end for part in file[:-1])] and file:
            raise f.fail("files", "parts that follow each other from byte 0 on")
    return found


def sources(f: Fields) -> tuple[SourceFile, ...]:
    """The files under `source`. Raises ConfigError."""
    try:
        return tuple(SourceFile(str(name), int(size), int(time)) for name, size, time in f.values["source"])
    except (KeyError, TypeError, ValueError, OverflowError):
        raise f.fail("source", "a list of [name, bytes, mtime_ns]") from None


def file_sha256(path: Path) -> str:
    """Of a file as it is. Raises CheckpointError where it cannot be read."""
    regular_size(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def named(path: Path) -> Iterator[None]:
    """What the system says of writing, a full disk above all, does not name the file: now it does."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def write_whole(path: Path, text: str) -> None:
    """Aside, to the disk, and renamed: a reader sees the old file or the new one."""
    aside = path.with_name(path.name + ".new")
    with named(aside), aside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
