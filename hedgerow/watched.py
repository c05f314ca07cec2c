"""Files that may change while a process runs: looked at when their content is needed, read again when they changed."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from hedgerow.errors import HedgerowError

Held = TypeVar("Held")
FilePath = str | os.PathLike[str]


class Watched(Generic[Held]):
    """What `read` makes of `paths`, as it last was when they were well. May be used by several threads.

    `complain` is told, once a change, why changed files are not taken; `taken` that they are, and whether what they
    hold is something else. Raises what `read` raises.
    """

    def __init__(
        self,
        paths: Sequence[FilePath | None],
        read: Callable[[], Held],
        complain: Callable[[HedgerowError], None] = lambda why: None,
        taken: Callable[[bool], None] = lambda changed: None,
    ) -> None:
        self.version = 1
        self._paths, self._read, self.complain, self.taken = paths, read, complain, taken
        self._lock = threading.Lock()
        self._stamp = self._look()
        self._held = read()

    def current(self, *, again: bool = False) -> tuple[int, Held]:
        """A number that goes up with every change, and what to use now. `again`: read also where nothing changed."""
        with self._lock:
            stamp = self._look()
            if again or stamp != self._stamp:
                self._stamp = stamp  # the same files are not tried, and told of, twice
                try:
                    held = self._read()
                except HedgerowError as why:
                    self.complain(why)
                else:
                    changed = held != self._held
                    self.version, self._held = self.version + changed, held
                    self.taken(changed)
            return self.version, self._held

    @property
    def held(self) -> Held:
        """What was in force when somebody last looked. Reads no file, and never waits."""
        return self._held

    def _look(self) -> Sequence[object]:
        return [_stamp(path) for path in self._paths]


def _stamp(path: FilePath | None) -> object:
    """What changes with the file, also where a link to its folder is turned, as Kubernetes does."""
    if path is None:
        return None
    try:
        found = os.stat(path)
    except OSError as error:
        return error.errno
    return found.st_ino, found.st_mtime_ns, found.st_size
