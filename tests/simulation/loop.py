"""An event loop over virtual time for several simulated processes. One seed, one execution.

Every callback belongs to the process in whose context it was scheduled. A killed process's callbacks never run; a
paused one's wait, as after SIGSTOP, and run in their order when it goes on. Time passes only while nothing is ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import heapq
import sys
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from tests.simulation.processes import CURRENT, KILLED, NOWHERE, PAUSED, RUNNING, Handle, Process

MOST_CALLBACKS = 400_000
"""Of one schedule; a few thousand are usual."""


class Restless(Exception):
    """Something goes round in circles."""


class SimTask(asyncio.Task[Any]):
    """A task whose hash, and so its place in a set, does not depend on its address."""

    count = 0

    def __init__(self, coroutine: Any, **options: Any) -> None:
        SimTask.count += 1
        self._number = SimTask.count
        super().__init__(coroutine, **options)

    def __hash__(self) -> int:
        return self._number

    def __eq__(self, other: object) -> bool:
        return self is other


class SimLoop(asyncio.AbstractEventLoop):
    """See the module. `failures` are exceptions that nothing caught."""

    def __init__(self) -> None:
        self._now = 0.0
        self._ready: deque[Handle] = deque()
        self._timers: list[tuple[float, int, Handle]] = []
        self._number = 0
        self._closed = False
        self._owners: dict[int, Process | None] = {}  # of asynchronous generators
        self.callbacks = 0
        self.failures: list[str] = []
        self.stopping = False

    # What asyncio asks of a loop.

    def time(self) -> float:
        return self._now

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return self._closed

    def call_soon(self, callback: Any, *args: Any, context: contextvars.Context | None = None) -> Any:  # type: ignore[override]
        context = contextvars.copy_context() if context is None else context
        handle = Handle(context.get(CURRENT), context, callback, args, self._now)
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_at(self, when: float, callback: Any, *args: Any, context: contextvars.Context | None = None) -> Any:  # type: ignore[override]
        context = contextvars.copy_context() if context is None else context
        handle = Handle(context.get(CURRENT), context, callback, args, when)
        self._number += 1
        heapq.heappush(self._timers, (when, self._number, handle))
        return handle

    def call_later(self, delay: float, callback: Any, *args: Any, context: contextvars.Context | None = None) -> Any:  # type: ignore[override]
        return self.call_at(self._now + max(0.0, delay), callback, *args, context=context)

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self, coro: Any, *, name: str | None = None, context: contextvars.Context | None = None
    ) -> asyncio.Task[Any]:
        task = SimTask(coro, loop=self, name=name, context=context)
        process = (context or contextvars.copy_context()).get(CURRENT)
        if process is not None:
            process.tasks.append(task)
        return task

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """The work is done at once, when its time is over."""
        future, process = self.create_future(), CURRENT.get()

        def work() -> None:
            if future.cancelled():
                return
            try:
                result = func(*args)
            except Exception as error:  # noqa: BLE001  the caller's, as from a thread
                future.set_exception(error)
            else:
                future.set_result(result)

        self.call_later(process.work_seconds() if process else 0.0, work)
        return future

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.failures.append(f"{CURRENT.get()}: {context.get('message')}: {error!r}")

    def add_signal_handler(self, sig: int, callback: Any, *args: Any) -> None:  # type: ignore[override]
        return None

    def remove_signal_handler(self, sig: int) -> bool:
        return True

    # What the simulation asks.

    def soon(self, process: Process | None, callback: Callable[..., Any], *args: Any) -> None:
        """Run a callback in a process, or outside of all."""
        context = process.context if process else NOWHERE
        self._ready.append(Handle(process, context, callback, args, self._now))

    def now(self, process: Process, callback: Callable[..., Any], *args: Any) -> None:
        """As `soon`, but before everything else, unless the process is stopped or dead."""
        if process.state is RUNNING:
            process.context.run(callback, *args)
        elif process.state is PAUSED:
            process.held.append(Handle(process, process.context, callback, args, self._now))

    def at(self, when: float, callback: Callable[..., Any], *args: Any) -> Handle:
        """Run a callback outside of all processes."""
        handle = Handle(None, NOWHERE, callback, args, when)
        self._number += 1
        heapq.heappush(self._timers, (when, self._number, handle))
        return handle

    def spawn(self, process: Process | None, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """A task of a process."""
        context = process.context.copy() if process else NOWHERE.copy()
        return self.create_task(coroutine, context=context)

    def pause(self, process: Process) -> None:
        """SIGSTOP."""
        if process.state == RUNNING:
            process.state = PAUSED
            process.pause_number += 1

    def resume(self, process: Process) -> None:
        """SIGCONT."""
        if process.state == PAUSED:
            process.state = RUNNING
            self._ready.extend(process.held)
            process.held.clear()

    def kill(self, process: Process) -> None:
        """SIGKILL. Its tasks stay in memory, so that none of their `finally` blocks runs."""
        process.state = KILLED
        process.dropped += process.held
        process.held.clear()

    def run(self, done: Callable[[], bool], until: float) -> bool:
        """Run until `done`, at most to the virtual time `until`; whether it is done."""
        ready, timers = self._ready, self._timers
        while True:
            while ready:
                handle = ready.popleft()
                process = handle.process
                if process is not None and process.state is not RUNNING:
                    (process.held if process.state is PAUSED else process.dropped).append(handle)
                    continue
                self.callbacks += 1
                if self.callbacks > MOST_CALLBACKS:
                    raise Restless(f"{self.callbacks} callbacks by {self._now:.3f} virtual seconds: {handle!r}")
                handle.run()
            if done():
                return True
            while timers and timers[0][2]._dead:
                heapq.heappop(timers)
            if not timers or timers[0][0] > until:
                self._now = max(self._now, until)
                return False
            self._now = max(self._now, timers[0][0])
            while timers and timers[0][0] <= self._now:
                ready.append(heapq.heappop(timers)[2])

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """This is the running loop, whoever asks."""
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(self._first_iteration, self._finalize)
        asyncio._set_running_loop(self)
        try:
            yield
        finally:
            asyncio._set_running_loop(None)
            sys.set_asyncgen_hooks(*hooks)

    def end(self, processes: list[Process]) -> None:
        """Cancel everything that is left, the dead processes' tasks too, so that nothing of it runs later."""
        self.stopping = True
        self.failures = []
        for process in processes:
            process.held.clear()
            process.state = RUNNING
            self._ready += [each for each in process.dropped if isinstance(each.target, asyncio.Task)]
            process.dropped.clear()
        for _ in range(5):
            left = [task for process in processes for task in process.tasks if not task.done()]
            if not left:
                break
            for task in left:
                task.cancel()
            self.run(lambda: False, self._now)
        for process in processes:
            for task in process.tasks:
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                if task.done() and not task.cancelled():
                    task.exception()
        self._ready.clear()
        self._timers.clear()
        self._closed = True

    def _first_iteration(self, generator: Any) -> None:
        self._owners[id(generator)] = CURRENT.get()

    def _finalize(self, generator: Any) -> None:
        """A generator that was left in the middle is closed, as asyncio does it; a killed process's is not."""
        process = self._owners.pop(id(generator), None)
        if not self._closed and (process is None or process.state is not KILLED):
            self.spawn(process, generator.aclose())
