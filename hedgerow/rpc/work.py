"""A server and the work that it is for, side by side, in one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import uvloop

from hedgerow.scheduling import LONG, SHORT, ask_for_slice


def run_service(main: Coroutine[Any, Any, None]) -> None:
    """Runs a service's event loop to its end.

    uvloop's, for its cost: a step passes each service several times, and a turn of asyncio's own loop is interpreted.
    """
    ask_for_slice(SHORT)
    uvloop.run(main)


def computing_thread(name: str) -> ThreadPoolExecutor:
    """One thread for forward passes: it gives way to every event loop of the machine."""
    return ThreadPoolExecutor(1, thread_name_prefix=name, initializer=ask_for_slice, initargs=(LONG,))


async def serve_while(serving: Coroutine[Any, Any, None], work: Coroutine[Any, Any, None]) -> None:
    """Runs both until `serving` has drained; `work` goes on during the drain and is cancelled after it.

    Work that fails ends the serving as SIGTERM would, and its exception is raised. Work that returns is merely done.
    """
    server, worker = asyncio.ensure_future(serving), asyncio.ensure_future(work)
    try:
        await asyncio.wait({server, worker}, return_when=asyncio.FIRST_COMPLETED)
        if worker.done() and worker.exception() is None:
            await server
    finally:
        server.cancel()
        worker.cancel()
        outcomes = await asyncio.gather(server, worker, return_exceptions=True)
    for outcome in (outcomes[1], outcomes[0]):
        if isinstance(outcome, Exception):  # a CancelledError is none: it is our own
            raise outcome
