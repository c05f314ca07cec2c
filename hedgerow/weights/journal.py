"""How far a conversion is: what is on the disk for good, so that a killed one goes on from there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from hedgerow.errors import InvalidRequest
from hedgerow.model.fields import Fields
from hedgerow.model.folder import weight_files
from hedgerow.model.manifest import MANIFEST, Manifest, SourceFile, sources, write_whole

JOURNAL = "hedgerow-convert.json"
LOCK = "hedgerow-convert.lock"


class Plan(NamedTuple):
    """What decides every byte of the result."""

    order: str
    ranks: int
    source: tuple[SourceFile, ...]


class Journal(NamedTuple):
    """`done`: for each part that is on the disk the checksums of all ranks."""

    plan: Plan
    checkpoint_hash: str  # "" until it is known
    done: tuple[tuple[str, ...], ...]

    def write(self, folder: Path) -> None:
        text = {
            "order": self.plan.order, "ranks": self.plan.ranks, "source": [list(f) for f in self.plan.source],
            "checkpoint_hash": self.checkpoint_hash, "done": [list(sums) for sums in self.done],
        }  # fmt: skip
        write_whole(folder / JOURNAL, json.dumps(text) + "\n")


def plan_of(source: Path, order: str, ranks: int) -> Plan:
    """Names, sizes and times of the source's files stand for their bytes while it is being converted."""
    paths = [source / "config.json", *sorted(set(weight_files(source).values()))]
    states = [(path.name, path.stat()) for path in paths]
    return Plan(order, ranks, tuple(SourceFile(name, s.st_size, s.st_mtime_ns) for name, s in states))


def begun(folder: Path, plan: Plan) -> Journal | Manifest:
    """What is there of this conversion: its journal, an empty one in a new folder, or the manifest of a finished one.

    Raises InvalidRequest for a folder that holds anything else.
    """
    finished = Manifest.read(folder)
    if finished is not None:
        if Plan(finished.order, finished.ranks, finished.source) != plan:
            limit = f"a new folder: this one was converted from other files, or for other ranks than {plan.ranks}"
            raise InvalidRequest("TARGET", str(folder), limit)
        return finished
    if not (folder / JOURNAL).exists():
        if any(path.name != LOCK for path in folder.iterdir()):
            raise InvalidRequest("TARGET", str(folder), f"a new or empty folder, or one with {MANIFEST} or {JOURNAL}")
        return Journal(plan, "", ())
    f = Fields.read(folder / JOURNAL)
    if Plan(f.get("order", str), f.size("ranks"), sources(f)) != plan:
        limit = "a new folder: the conversion that was begun in this one is of other files, or for other ranks"
        raise InvalidRequest("TARGET", str(folder), limit)
    done: Any = f.values.get("done")
    if not isinstance(done, list) or not all(isinstance(sums, list) and len(sums) == plan.ranks for sums in done):
        raise f.fail("done", f"lists of {plan.ranks} checksums")
    return Journal(plan, f.get("checkpoint_hash", str), tuple(tuple(map(str, sums)) for sums in done))
