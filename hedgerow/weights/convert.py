"""`hedgerow convert`: a published folder as one file a rank, in the engines' order, checksummed and read back.

The source is read once, in pieces of bounded size; every rank's file grows in step. After each part (a layer) all files
are on the disk and the journal says so: whoever is killed goes on from there. What is written is read back from the
disk and compared before the manifest, the last file, makes the folder a converted one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from hedgerow.errors import InvalidRequest, Unavailable
from hedgerow.model.config import K2Config
from hedgerow.model.headers import CheckpointError
from hedgerow.model.loader import Checkpoint, checkpoint_hash
from hedgerow.model.manifest import MANIFEST, Manifest, Part, file_sha256, first_bad, named, rank_name
from hedgerow.model.reading import CHUNK, Files, Meter, Watcher
from hedgerow.model.tensors import COLUMNS, Share
from hedgerow.weights.journal import JOURNAL, LOCK, Journal, begun, plan_of
from hedgerow.weights.order import ORDER, Piece, parts
from hedgerow.weights.vocabulary import copy, small_files, vocabulary_faults
from hedgerow.weights.writing import Shape, header

Say = Callable[[str], None]


class Conversion(NamedTuple):
    """What is to be written: the same header and the same parts for every rank."""

    source: Path
    target: Path
    ranks: int
    header: bytes
    parts: Sequence[Sequence[Piece]]
    bounds: tuple[int, ...]  # where each part begins in a rank's file, and where the last ends; part 0 is the header

    def files(self) -> list[Path]:
        return [self.target / rank_name(Share(rank, self.ranks)) for rank in range(self.ranks)]


def convert(source: Path, target: Path, ranks: int, say: Say, watcher: Watcher | None = None) -> Manifest:
    """Makes `target`, or finishes it. Raises InvalidRequest, ConfigError or CheckpointError before anything is written
    for what cannot be converted, and CheckpointError where what was written does not read back."""
    if (source / MANIFEST).exists():
        raise InvalidRequest("SOURCE", str(source), "a published folder, not a converted one")
    Share(0, ranks).check()
    config, checkpoint = K2Config.from_folder(source), Checkpoint(source, Share(0, ranks))
    checkpoint.check(config)
    for fault in vocabulary_faults(source, config.vocab_size):
        raise fault
    small_files(source)
    work = conversion(source, target, ranks, config, checkpoint)
    target.mkdir(parents=True, exist_ok=True)
    with locked(target):
        journal = begun(target, plan_of(source, ORDER, ranks))
        if isinstance(journal, Manifest):
            say(f"{target} is converted already")
            (target / JOURNAL).unlink(missing_ok=True)  # of who was killed right after the manifest
            return journal
        check_room(work, journal)
        if not journal.checkpoint_hash:
            say("hashing the source, for the fingerprint of whoever serves it")
            journal = journal._replace(checkpoint_hash=checkpoint_hash(source, watcher))
            journal.write(target)
        if journal.done:
            say(f"going on after {len(journal.done)} of {len(work.bounds) - 1} parts")
        journal = write_parts(work, journal, watcher)
        say("reading back what was written")
        verify_parts(work, journal, watcher)
        return finish(work, journal)


def conversion(source: Path, target: Path, ranks: int, c: K2Config, checkpoint: Checkpoint) -> Conversion:
    """The layout of every rank's file."""
    pieces = list(parts(c, checkpoint.stored))
    shapes = [[rank_shape(piece, checkpoint.prefix, ranks) for piece in part] for part in pieces]
    head = header(shape for part in shapes for shape in part)
    bounds = [0, len(head)]
    for part in shapes:
        bounds.append(bounds[-1] + sum(shape.bytes for shape in part))
    return Conversion(source, target, ranks, head, pieces, tuple(bounds))


def rank_shape(piece: Piece, prefix: str, ranks: int) -> Shape:
    return Shape(prefix + piece.wanted.name, piece.entry.dtype, piece.wanted.part(ranks))


def check_room(work: Conversion, journal: Journal) -> None:
    """Raises InvalidRequest where the disk has no room for what is still to be written."""
    needed = work.ranks * (work.bounds[-1] - work.bounds[len(journal.done)])
    partly = sum(file.stat().st_size - work.bounds[len(journal.done)] for file in work.files() if file.exists())
    free = shutil.disk_usage(work.target).free + max(partly, 0)
    if needed > free:
        raise InvalidRequest("TARGET", f"{free / 1e9:.1f} GB free", f"a disk with {needed / 1e9:.1f} GB to write to")


def write_parts(work: Conversion, journal: Journal, watcher: Watcher | None) -> Journal:
    """Writes what the journal does not have; returns the complete one."""
    meter = Meter(work.ranks * (work.bounds[-1] - work.bounds[len(journal.done)]), watcher)
    files = Files()
    with contextlib.ExitStack() as exits:
        outs = [exits.enter_context(Out(file, work.bounds[len(journal.done)], meter)) for file in work.files()]
        for number in range(len(journal.done), len(work.bounds) - 1):
            if number == 0:
                for out in outs:
                    out.write(work.header)
            else:
                for piece in work.parts[number - 1]:
                    copy_piece(piece, files, outs)
            journal = journal._replace(done=(*journal.done, tuple(out.kept(work.bounds[number + 1]) for out in outs)))
            journal.write(work.target)
    return journal


class Out:
    """A rank's file, written on from byte `start`, where a killed conversion left more than its journal says."""

    def __init__(self, path: Path, start: int, meter: Meter) -> None:
        self._path, self._start, self._meter, self._sum = path, start, meter, hashlib.sha256()

    def __enter__(self) -> Out:
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._file = os.fdopen(descriptor, "r+b", buffering=1 << 20)
        if self._file.seek(0, os.SEEK_END) < self._start:
            limit = f"at least {self._start} bytes, as {JOURNAL} has it"
            raise CheckpointError(self._path, "", limit, self._file.tell())
        self._file.truncate(self._start)
        self._file.seek(self._start)
        return self

    def __exit__(self, *about: object) -> None:
        with named(self._path):
            self._file.close()

    def write(self, bytes_: memoryview | bytes) -> None:
        with named(self._path):
            self._file.write(bytes_)
        self._sum.update(bytes_)
        self._meter.add(len(bytes_))

    def kept(self, end: int) -> str:
        """The part's checksum, once all of it is on the disk."""
        with named(self._path):
            self._file.flush()
            os.fsync(self._file.fileno())
        assert self._file.tell() == end, f"{self._path}: {self._file.tell()} bytes, {end} expected"
        done, self._sum = self._sum.hexdigest(), hashlib.sha256()
        return done


def copy_piece(piece: Piece, files: Files, outs: Sequence[Out]) -> None:
    """A tensor, divided between the ranks as it lies; no more than a chunk of it is in memory."""
    entry, axis = piece.entry, piece.wanted.axis
    if axis == COLUMNS and len(outs) > 1:
        wide = entry.bytes // entry.shape[0]
        for lines in chunks(files, piece, entry.start, entry.end, max(1, CHUNK // wide) * wide):
            table = lines.view(-1, len(outs), wide // len(outs)).transpose(0, 1).contiguous()
            for out, mine in zip(outs, table, strict=True):
                out.write(memoryview(mine.numpy().data).cast("B"))
        return
    # rows lie rank by rank; what is not divided goes to all
    groups = [[out] for out in outs] if axis is not None else [outs]
    size = entry.bytes // len(groups)
    for number, group in enumerate(groups):
        start = entry.start + number * size
        for chunk in chunks(files, piece, start, start + size, CHUNK):
            for out in group:
                out.write(memoryview(chunk.numpy().data))


def chunks(files: Files, piece: Piece, start: int, end: int, size: int) -> Iterator[torch.Tensor]:
    """Bytes `start` .. `end` - 1 of the source's file, in one buffer that is used again."""
    buffer = torch.empty(min(size, end - start), dtype=torch.uint8)
    for at in range(start, end, max(size, 1)):
        chunk = buffer[: min(size, end - at)]
        files.fill(chunk, piece.entry.file, at)
        yield chunk


def verify_parts(work: Conversion, journal: Journal, watcher: Watcher | None) -> None:
    """Compares the disk's bytes with the checksums. What differs, and all behind it, the next run writes anew."""
    meter = Meter(work.ranks * work.bounds[-1], watcher)
    for rank, file in enumerate(work.files()):
        expected = rank_parts(work, journal, rank)
        forget(file)
        bad = first_bad(file, expected, meter.add)
        if bad is not None:
            journal._replace(done=journal.done[:bad]).write(work.target)
            raise CheckpointError(file, "", f"sha256 {expected[bad].sha256} in part {bad}", "another; run it again")


def forget(file: Path) -> None:
    """What is compared next comes from the disk, not from its cache."""
    with file.open("rb") as source:
        os.posix_fadvise(source.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def rank_parts(work: Conversion, journal: Journal, rank: int) -> tuple[Part, ...]:
    bounds = work.bounds
    return tuple(Part(bounds[i], bounds[i + 1], sums[rank]) for i, sums in enumerate(journal.done))


def finish(work: Conversion, journal: Journal) -> Manifest:
    """The small files, then the manifest, then the journal is not needed any more."""
    if plan_of(work.source, ORDER, work.ranks) != journal.plan:
        raise CheckpointError(work.source, "", "the files that were there at the start", "changed; convert them anew")
    for path in (work.source / "config.json", *small_files(work.source)):
        copy(path, work.target)
    manifest = Manifest(
        journal.plan.order, work.ranks, journal.checkpoint_hash, file_sha256(work.target / "config.json"),
        journal.plan.source, tuple(rank_parts(work, journal, rank) for rank in range(work.ranks)),
    )  # fmt: skip
    manifest.write(work.target)
    (work.target / JOURNAL).unlink()
    return manifest


def verify(folder: Path, watcher: Watcher | None = None) -> None:
    """Compares a converted folder with its manifest. Raises CheckpointError with the first file that differs."""
    manifest = Manifest.read(folder)
    if manifest is None:
        raise InvalidRequest("FOLDER", str(folder), f"a converted folder: {MANIFEST} is missing there")
    meter = Meter(sum(file[-1].end for file in manifest.files), watcher)
    for rank in range(manifest.ranks):
        share = Share(rank, manifest.ranks)
        forget(manifest.rank_file(folder, share))
        manifest.compare(folder, share, meter.add)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One conversion a folder. A file of its own: NFS locks none that is open for reading. Raises Unavailable."""
    path = folder / LOCK
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(file.fileno()), path.stat()):
                raise FileNotFoundError  # who held it has removed it meanwhile: the lock is of no file
        except (BlockingIOError, FileNotFoundError):
            raise Unavailable(str(folder), "another conversion is writing it") from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP):  # then there are no locks, and nothing to wait for
                raise
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
