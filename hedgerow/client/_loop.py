"""An event loop in a thread of its own, which other threads wait for."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from hedgerow.client._gateways import CLOSED
from hedgerow.errors import Cancelled

Answer = TypeVar("Answer")
LAST_TASKS = 2.0
"""Seconds in which what still runs when the loop ends must take its cancellation."""


class Loop:
    """Runs until `close`. The thread is a daemon: a program may end without closing."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="hedgerow-client", daemon=True)
        self._thread.start()
        self._lock, self._closing = threading.Lock(), False

    def run(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        """Wait for `work`. An interrupt of the waiting thread cancels it. Raises Cancelled after `close`."""
        with self._lock:  # behind `close` nothing may be begun: nobody would end it
            if self._closing:
                work.close()
                raise Cancelled(CLOSED)
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError:  # not ours to raise; only the end of the loop cancels `work`
            raise Cancelled(CLOSED) from None
        except BaseException:
            future.cancel()
            raise

    def close(self, last: Callable[[], Awaitable[None]]) -> None:
        """Await `last`, cancel what still runs, and stop the thread. Those that wait in `run` get Cancelled."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        future = asyncio.run_coroutine_threadsafe(self._end(last), self._loop)
        if threading.current_thread() is self._thread:  # the last reference was dropped there
            future.add_done_callback(lambda _: self._loop.stop())
            return
        try:
            future.result()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _end(self, last: Callable[[], Awaitable[None]]) -> None:
        try:
            await last()
        finally:
            running = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in running:
                task.cancel()
            if running:
                await asyncio.wait(running, timeout=LAST_TASKS)
