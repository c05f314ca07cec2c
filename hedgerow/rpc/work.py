"""A server and the work that it is for, side by side."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


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
