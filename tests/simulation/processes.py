"""A simulated process, and a callback that waits for its turn in it."""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable
from typing import Any

RUNNING, PAUSED, KILLED = "running", "paused", "killed"


class Process:
    """One simulated process. `offset` and `wall_offset` are seconds that its clocks are ahead of virtual time."""

    def __init__(self, name: str, offset: float = 0.0, wall_offset: float = 0.0) -> None:
        self.name, self.offset, self.wall_offset = name, offset, wall_offset
        self.state = RUNNING
        self.held: deque[Handle] = deque()
        self.dropped: list[Handle] = []
        """What would have run next when it was killed: a task that was about to go on hears of nothing else."""
        self.tasks: list[asyncio.Task[Any]] = []
        self.pause_number = 0
        self.work_seconds: Callable[[], float] = lambda: 0.0
        """How long what runs in a thread takes."""
        self.context = contextvars.Context()
        self.context.run(CURRENT.set, self)

    def __repr__(self) -> str:
        return self.name


CURRENT: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)
NOWHERE = contextvars.Context()


class Handle:
    """A callback that waits for its turn, or for its time."""

    __slots__ = ("_args", "_callback", "_context", "_dead", "_when", "process")

    def __init__(
        self,
        process: Process | None,
        context: contextvars.Context,
        callback: Callable[..., Any],
        args: Any,
        when: float,
    ) -> None:
        self.process, self._context, self._callback, self._args = process, context, callback, args
        self._when, self._dead = when, False

    @property
    def target(self) -> Any:
        """Whose method it calls."""
        return getattr(self._callback, "__self__", None)

    def cancel(self) -> None:
        """Never run it."""
        self._dead = True
        self._callback, self._args = _nothing, ()

    def cancelled(self) -> bool:
        """Whether it was cancelled."""
        return self._dead

    def when(self) -> float:
        """Virtual seconds."""
        return self._when

    def __repr__(self) -> str:
        return f"{self.process}: {self._callback!r}"

    def run(self) -> None:
        """Run it in its context."""
        self._context.run(self._callback, *self._args)


def _nothing() -> None:
    return None
