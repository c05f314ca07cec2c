"""Reading a call's messages for as long as the server wants to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TypeVar

T = TypeVar("T")


async def until(stop: asyncio.Event, messages: AsyncIterator[T]) -> AsyncGenerator[T, None]:
    """The messages of a call, up to its end or to `stop`.

    A read that is under way at `stop` is left to end with its call: gRPC's core still owns the memory that it reads
    into, so it must not be cancelled. Its message, if one still comes, is lost.
    """
    stopped = asyncio.ensure_future(stop.wait())
    try:
        while True:
            reading = asyncio.ensure_future(_read(messages))
            await asyncio.wait({reading, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                reading.add_done_callback(_forget)
                return
            got = reading.result()
            if not got:
                return
            yield got[0]
    finally:
        stopped.cancel()


async def _read(messages: AsyncIterator[T]) -> list[T]:
    async for message in messages:
        return [message]
    return []


def _forget(reading: asyncio.Future[list[T]]) -> None:
    """Takes the outcome of an abandoned read, so that asyncio does not report it as unhandled."""
    if not reading.cancelled():
        reading.exception()
