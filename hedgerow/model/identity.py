"""The hash that stands for a checkpoint in a fingerprint: equal only for equal bits.

It takes every byte of the folder. Of a large one it is kept beside the weights with the files' names, sizes and times,
and is read again as long as they are those: a rank must not read 594 GB at each start. A file's change time is set by
the kernel alone, so that no change of its bytes goes unseen. A rank's file of a converted folder is compared with its
checksums likewise: once, and again when it has changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from pathlib import Path

from hedgerow.model.fields import ConfigError, Fields
from hedgerow.model.folder import weight_files
from hedgerow.model.headers import of_folder
from hedgerow.model.manifest import CHUNK, Manifest, write_whole
from hedgerow.model.reading import EVERY, EVERY_LOGGED, Meter, Watcher
from hedgerow.model.tensors import Share

log = logging.getLogger(__name__)

KEPT = "hedgerow-hash.json"
LARGE = 10**9  # bytes from which on it is kept
State = list[list[object]]


def metered(folder: Path, what: str, total: int, watcher: Watcher | None) -> Meter:
    """Tells `watcher` of long reading, or the log if there is none."""
    if watcher is not None:
        return Meter(total, watcher, every=EVERY)
    return Meter(total, lambda progress: log.info("%s %s: %s", what, folder, progress), every=EVERY_LOGGED)


def checkpoint_hash(folder: Path, watcher: Watcher | None = None) -> str:
    """SHA-256 over config.json and the weight files, each with its name and length.

    A converted folder has its source's, which it was made from bit by bit. `watcher`, or the log, hears how far it is.
    """
    manifest = Manifest.read(folder)
    if manifest is not None:
        return manifest.checkpoint_hash
    files = [folder / "config.json", *sorted(set(weight_files(folder).values()))]
    before = state(files)
    known = kept(folder, before)
    if known:
        return known
    digest = hashlib.sha256()
    meter = metered(folder, "hashing", sum(path.stat().st_size for path in files), watcher)
    for path in files:
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while chunk := file.read(CHUNK):
                digest.update(chunk)
                meter.add(len(chunk))
    keep(folder, files, before, digest.hexdigest())
    return digest.hexdigest()


def check_share(folder: Path, share: Share) -> None:
    """Compares the rank's file of a converted folder with its checksums. Raises CheckpointError with the part that
    differs, ConfigError.
    """
    manifest = Manifest.read(folder)
    if manifest is None:
        return
    files, note = [manifest.rank_file(folder, share)], f"hedgerow-checked-{share.rank:02d}.json"
    before, expected = state(files), hashlib.sha256(repr(manifest.files[share.rank]).encode()).hexdigest()
    if kept(folder, before, note) != expected:
        meter = metered(folder, f"comparing rank {share.rank} of", files[0].stat().st_size, None)
        manifest.compare(folder, share, meter.add)
        keep(folder, files, before, expected, note)


def keep(folder: Path, files: list[Path], before: State, value: str, note: str = KEPT) -> None:
    """Notes what large files gave, unless they changed meanwhile."""
    if sum(path.stat().st_size for path in files) >= LARGE and state(files) == before:
        with contextlib.suppress(OSError):  # a folder that cannot be written to is read each time
            write_whole(folder / note, json.dumps({"files": before, "hash": value}, indent=1) + "\n")


def kept(folder: Path, now: State, note: str = KEPT) -> str:
    """The hash that is beside the weights, if it is of these files; else empty."""
    if not (folder / note).exists():
        return ""
    try:
        f = Fields.read(of_folder(folder, note))
        return f.get("hash", str) if f.values.get("files") == now else ""
    except ConfigError:
        return ""


def state(files: list[Path]) -> State:
    """What changes with any change of a file's bytes."""
    stats = [(path.name, path.stat()) for path in files]
    return [[name, s.st_size, s.st_mtime_ns, s.st_ctime_ns] for name, s in stats]
