"""Files of a service that change while it runs, by name: what is in force, since when, and whether the newest one is.

A file that is not sound is told of in one line of the log and in a metric, and what was in force stays. `run` looks at
all of them each second, in a thread: thousands of keys take a tenth of a second to read, and no stream should wait so
long. What depends on a file takes what is in force at each use (`Watched.held`).
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from hedgerow.errors import HedgerowError
from hedgerow.rpc import telemetry
from hedgerow.rpc.logs import get_log
from hedgerow.watched import Watched

Held = TypeVar("Held")
EVERY = 1.0  # seconds
log = get_log(__name__)


@dataclass
class State:
    """Of one file. `refused`: why the newest is not in force, "" where it is."""

    generation: int = 1
    taken: float = field(default_factory=time.time)
    refused: str = ""

    def complain(self, why: HedgerowError) -> None:
        """The newest file is not sound."""
        self.refused = why.message

    def take(self, changed: bool) -> None:
        """The newest file is in force."""
        self.refused = ""
        if changed:
            self.generation, self.taken = self.generation + 1, time.time()

    def __str__(self) -> str:
        when = datetime.fromtimestamp(self.taken, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        text = f"generation {self.generation} of {when}"
        return f"{text}; the newest file is not taken: {self.refused}" if self.refused else text


class Reloads:
    """The files of one process."""

    def __init__(self) -> None:
        self.states: dict[str, State] = {}
        self._files: list[Watched[Any]] = []

    def watch(self, what: str, path: Path, read: Callable[[], Held]) -> Watched[Held]:
        """`read` reads `path`. Raises what it raises, now; later on that is told, and what was read before stays."""

        def complain(why: HedgerowError) -> None:
            log.error("a changed file is not taken; what was in force stays", what=what, file=path, why=why.message)

        def take(changed: bool) -> None:
            log.info("taken again", what=what, file=path, generation=self.states[what].generation, changed=changed)

        file = Watched([path], read, complain, take)
        self.follow(what, file)
        return file

    def follow(self, what: str, file: Watched[Any]) -> None:
        """Files that somebody else watches, certificates, belong to them too."""
        state, complain, taken = State(), file.complain, file.taken

        def refused(why: HedgerowError) -> None:
            state.complain(why)
            complain(why)

        def took(changed: bool) -> None:
            state.take(changed)
            taken(changed)

        self.states[what], file.complain, file.taken = state, refused, took
        self._files.append(file)

    def look(self, *, again: bool = False) -> None:
        """At all files, now. `again`: read those that did not change, too."""
        for file in self._files:
            file.current(again=again)

    def export(self) -> None:
        """To the metrics, by file."""
        self._export(
            "hedgerow_reload_generation", "Which content of a file is in force, from 1.", lambda s: s.generation
        )
        self._export("hedgerow_reload_taken_seconds", "Since when it is, in Unix seconds.", lambda s: s.taken)
        text = "1 where the newest file is not sound, and the one before is in force."
        self._export("hedgerow_reload_refused", text, lambda s: bool(s.refused))

    async def run(self, then: Callable[[], None]) -> None:
        """Look each second, and again at SIGHUP, for ever, in a thread; call `then` after each look."""
        asked = asyncio.Event()
        # Without any file, too: by default the signal would end the process.
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, asked.set)
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(EVERY):
                    await asked.wait()
            again = asked.is_set()
            asked.clear()
            await asyncio.to_thread(self.look, again=again)
            then()

    def _export(self, name: str, text: str, read: Callable[[State], float]) -> None:
        def numbers() -> dict[str, float]:
            return {what: float(read(state)) for what, state in self.states.items()}

        telemetry.watch(name, text, numbers, "file", goes_down=True)
