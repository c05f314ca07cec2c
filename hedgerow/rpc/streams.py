"""Reading a call's messages for as long as the server wants to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Generic, TypeVar

from hedgerow.errors import DeadlineExceeded

FIRST_MESSAGE = 10.0
"""Seconds that a stream may be open before it says whose it is."""
T = TypeVar("T")


def silent(seconds: float) -> DeadlineExceeded:
    """What ends a stream that never said a word."""
    return DeadlineExceeded(f"no first message within {seconds:g} s", metadata={"limit": seconds})


async def until(
    stop: asyncio.Event, messages: AsyncIterator[T], first_within: float | None = None
) -> AsyncGenerator[T, None]:
    """The messages of a call, up to its end or to `stop`; what reading raises is raised here.

    DeadlineExceeded where the first one does not come in `first_within` seconds; None: it may take for ever.
    One message is read ahead. A read that is under way at `stop` is left to end with its call: gRPC's core still owns
    the memory that it reads into, so it must not be cancelled. Its message, if one still comes, is lost.
    """
    inbox = _Inbox[T]()
    # One task for all reads: a task and a wait for each message would cost more than the message does.
    reading = asyncio.ensure_future(inbox.fill(messages))
    stopping = asyncio.ensure_future(inbox.end_at(stop))
    try:
        try:
            async with asyncio.timeout(first_within):
                got = await inbox.queue.get()
        except TimeoutError:
            raise silent(first_within or 0.0) from None
        while got and not stop.is_set():
            inbox.room.release()
            yield got[0]
            got = await inbox.queue.get()
        if reading.done():
            reading.result()
    finally:
        stopping.cancel()
        inbox.leave()
        reading.add_done_callback(_forget)


class _Inbox(Generic[T]):
    """Messages as one-element lists, and an empty list for the end."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[list[T]] = asyncio.Queue()
        self.room = asyncio.Semaphore(1)
        self._left = False

    async def fill(self, messages: AsyncIterator[T]) -> None:
        try:
            async for message in messages:
                if not self._left:
                    await self.room.acquire()
                if not self._left:
                    self.queue.put_nowait([message])
        finally:
            self.queue.put_nowait([])

    async def end_at(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self.queue.put_nowait([])

    def leave(self) -> None:
        """Nobody takes messages any more: those to come are read and dropped."""
        self._left = True
        self.room.release()


def _forget(reading: asyncio.Future[None]) -> None:
    """Takes the outcome of an abandoned read, so that asyncio does not report it as unhandled."""
    if not reading.cancelled():
        reading.exception()
