"""Watching for cancel marks: one subscription of this process to Redis, and the gateways that wait behind it.

Marks that are written while the subscription is down are read from the store when it is up again.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from redis.asyncio.connection import AbstractConnection
from redis.exceptions import RedisError

from hedgerow import errors
from hedgerow.rpc.logs import get_log
from services.kvstore.keys import CANCELS
from services.kvstore.nodes import pack
from services.kvstore.records import MARK_BYTES
from services.kvstore.runner import RETRY_AFTER, Runner

log = get_log(__name__)

PING = 5.0
"""Seconds of silence after which the subscription is asked whether it is still there."""
FIRST_DELAY, LAST_DELAY = 0.05, 2.0
"""Seconds before the subscription is made again: the first and the longest wait."""
MOST_WAITING = 65_536
"""Marks that wait for one slow gateway; its renewals tell those above."""


class _Watcher:
    """One WatchCancels call, and what it has not told yet."""

    def __init__(self) -> None:
        self.ids: dict[str, None] = {}
        self.look = True  # at what is stored, before what was heard
        self.woken = asyncio.Event()


class CancelWatch:
    """`marked` reads which of an owner's sessions are to be cancelled."""

    def __init__(self, runner: Runner, marked: Callable[[bytes], Awaitable[list[str]]]) -> None:
        self.runner, self.marked = runner, marked
        self._watchers: dict[bytes, list[_Watcher]] = {}
        self._up = asyncio.Event()
        self._closed: errors.HedgerowError | None = None

    async def follow(self, owner: bytes) -> AsyncGenerator[list[str], None]:
        """Ids of an owner's sessions that carry a mark: those from before at once, even if there are none, then each
        as it is written, for ever. Raises Unavailable where Redis is away or this process drains.
        """
        watcher = _Watcher()
        self._watchers.setdefault(owner, []).append(watcher)
        try:
            await self._subscribed()
            first = True
            while self._closed is None:
                watcher.woken.clear()
                ids, watcher.ids = watcher.ids, {}
                if watcher.look:
                    watcher.look = False
                    ids |= dict.fromkeys(await self.marked(owner))
                if ids or first:
                    yield list(ids)
                first = False
                await watcher.woken.wait()
            raise self._closed
        finally:
            self._watchers[owner].remove(watcher)
            if not self._watchers[owner]:
                del self._watchers[owner]

    def close(self, error: errors.HedgerowError) -> None:
        """End every call with `error`, and those to come."""
        self._closed = error
        self._up.set()
        self._wake(look=False)

    async def run(self) -> None:
        """Listen, for ever."""
        delay = FIRST_DELAY
        while True:
            try:
                await self._listen()
            except (RedisError, OSError, TimeoutError) as error:
                if self._up.is_set():
                    log.warning("cancel marks are not heard", why=str(error) or type(error).__name__)
                    delay = FIRST_DELAY
            self._up.clear()
            await asyncio.sleep(delay * random.uniform(0.5, 1.0))
            delay = min(2 * delay, LAST_DELAY)

    async def _subscribed(self) -> None:
        try:
            async with asyncio.timeout(self.runner.timeout):
                await self._up.wait()
        except TimeoutError:
            raise errors.Unavailable("redis", "cancel marks cannot be heard", RETRY_AFTER) from None

    async def _listen(self) -> None:
        connection = await self.runner.open()
        try:
            await connection.send_packed_command(pack((b"SUBSCRIBE", CANCELS)), check_health=False)
            while True:
                self._hear(await self._next(connection))
        finally:
            await connection.disconnect(nowait=True)

    async def _next(self, connection: AbstractConnection) -> Any:
        """The next message. Raises TimeoutError where Redis does not even answer a PING."""
        try:
            async with asyncio.timeout(PING):
                return await connection.read_response(disable_decoding=True, disconnect_on_error=False)
        except TimeoutError:
            await connection.send_packed_command(pack((b"PING",)), check_health=False)
            async with asyncio.timeout(self.runner.timeout):
                return await connection.read_response(disable_decoding=True, disconnect_on_error=False)

    def _hear(self, message: Any) -> None:
        kind, *rest = message
        if kind == b"subscribe":
            self._up.set()
            self._wake(look=True)
        elif kind == b"message":
            owner, session_id = rest[1][:MARK_BYTES], rest[1][MARK_BYTES:].decode(errors="replace")
            for watcher in self._watchers.get(owner, ()):
                if len(watcher.ids) < MOST_WAITING:
                    watcher.ids[session_id] = None
                watcher.woken.set()

    def _wake(self, *, look: bool) -> None:
        for watchers in self._watchers.values():
            for watcher in watchers:
                watcher.look |= look
                watcher.woken.set()
