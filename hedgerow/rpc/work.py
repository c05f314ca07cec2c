"""A server and the work that it is for, side by side, in one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import sys
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import uvloop

from hedgerow.errors import HedgerowError
from hedgerow.rpc import trace_export
from hedgerow.rpc.logs import get_log
from hedgerow.scheduling import LONG, SHORT, ask_for_slice

log = get_log(__name__)


def run_service(main: Coroutine[Any, Any, None]) -> NoReturn:
    """Runs a service's event loop to its end, and ends the process with it: status 0, or 1 where `main` raised.

    uvloop's, for its cost: a step passes each service several times, and a turn of asyncio's own loop is interpreted.
    """
    ask_for_slice(SHORT)
    gc.freeze()  # what was imported stays: beside torch 200,000 objects, 80 ms of each full collection
    loop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)
    status = 1
    try:
        loop.run_until_complete(main)
        status = 0
    except HedgerowError as error:
        print(f"{error.reason}: {error}", file=sys.stderr)
    except BaseException as error:  # noqa: BLE001  the outermost frame of the process
        log.error("the service failed", exception=error)
    finally:
        trace_export.stop()
        end_now(status)


def end_now(status: int) -> NoReturn:
    """Ends the process without the interpreter's tidying up, which has nothing to save once `main` has drained.

    It would join the threads that load or compute, whose results nobody takes any more (a large checkpoint loads for
    minutes), and take torch apart object by object: a second of CPU time, many times that on a busy machine.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
    os._exit(status)


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
