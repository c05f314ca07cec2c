"""Work that several processes share: a part belongs to whoever takes it first."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def taken(lock: Path) -> Iterator[bool]:
    """Whether this process has the part that `lock` stands for. It is given back when the process ends, however."""
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


@contextmanager
def others(arguments: Sequence[str], count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """`count` more processes of this Python; awaited at the end of the block, ended where it fails."""
    processes = [subprocess.Popen([sys.executable, *arguments]) for _ in range(count)]
    try:
        yield processes
        for process in processes:
            process.wait()
    finally:
        for process in processes:
            process.terminate()
            process.wait()


def read(path: Path) -> dict[str, Any] | None:
    """A part's result; None where there is none."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) and {"identity", "machine", "prompts"} <= value.keys() else None


def write(path: Path, value: object) -> None:
    """Whole or not at all: a run may be stopped at any moment."""
    fresh = path.with_suffix(".tmp")
    fresh.write_text(json.dumps(value, indent=1) + "\n")
    fresh.replace(path)
