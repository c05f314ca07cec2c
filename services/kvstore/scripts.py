"""Scripts on Redis: one round trip for any number of calls, EVALSHA with a NOSCRIPT fallback, bounded in time."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import redis.asyncio
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, RedisError, ResponseError

from hedgerow.errors import Unavailable

FOLDER = Path(__file__).parent / "scripts"
RETRY_AFTER = 0.2
"""Seconds after which a caller may try again when Redis is away."""


class Script:
    """A script of a session (`shared`: session.lua stands before it) or one that stands alone."""

    def __init__(self, name: str, *, shared: bool = True) -> None:
        first, _, rest = (FOLDER / f"{name}.lua").read_text().partition("\n")
        assert first.startswith("#!lua"), (
            "without it Redis checks neither memory nor keys before the script's first write"
        )
        prelude = (FOLDER / "session.lua").read_text() if shared else ""
        self.name = name
        self.source = f"{first}\n{prelude}{rest}".encode()
        # SHA-1 is how Redis names scripts.
        self.sha = hashlib.sha1(self.source, usedforsecurity=False).hexdigest().encode()


class Call(NamedTuple):
    """One call of a script."""

    script: Script
    keys: Sequence[bytes]
    arguments: Sequence[bytes]


class Plain(NamedTuple):
    """A command that needs no script, and a key that tells where it belongs."""

    words: Sequence[bytes]
    key: bytes


class Runner:
    """Calls scripts and commands on one Redis, over at most `connections` connections.

    Every method raises Unavailable where Redis cannot be reached or did not answer within `timeout` seconds; whether
    the calls took effect is then unknown.
    """

    def __init__(self, url: str, *, timeout: float, connections: int) -> None:
        self.timeout = timeout
        # It parses the URL and makes connections; handing them out itself costs as much as a whole exchange.
        self._factory = redis.asyncio.ConnectionPool.from_url(
            url,
            socket_connect_timeout=timeout,
            socket_timeout=None,  # one deadline around the whole exchange instead of one a read
            protocol=2,
            retry=Retry(NoBackoff(), 0),
        )
        self._idle: list[AbstractConnection] = []
        self._free = asyncio.Semaphore(connections)

    async def close(self) -> None:
        """Close every connection that is not in use."""
        idle, self._idle = self._idle, []
        for connection in idle:
            await connection.disconnect(nowait=True)

    async def open(self) -> AbstractConnection:
        """A connection of its own, for whoever listens. Raises RedisError, OSError and TimeoutError."""
        connection: AbstractConnection = self._factory.make_connection()  # type: ignore[no-untyped-call]
        async with asyncio.timeout(self.timeout):
            await connection.connect()  # type: ignore[no-untyped-call]
        return connection

    async def call_all(self, calls: Sequence[Call | Plain]) -> list[Any]:
        """All calls in one round trip, in order; a call that failed answers with its ResponseError.

        A second round trip follows only where Redis does not know a script: after its start, a fail-over, SCRIPT FLUSH.
        """
        if not calls:
            return []
        replies = await self.exchange([_words(call) for call in calls])
        missing = [(i, call) for i, call in enumerate(calls) if isinstance(replies[i], NoScriptError)]
        if missing:
            # EVAL rather than SCRIPT LOAD: it reaches the node that the keys are on, and loads and runs at once.
            again = await self.exchange([_words(call, whole=True) for _, call in missing])
            for (i, _), reply in zip(missing, again, strict=True):
                replies[i] = reply
        return replies

    async def exchange(self, commands: Sequence[Sequence[bytes]]) -> list[Any]:
        """Send commands at once and read all replies. A broken connection is replaced once."""
        packed = b"".join(pack(command) for command in commands)
        try:
            async with asyncio.timeout(self.timeout):
                try:
                    return await self._exchange(packed, len(commands))
                except RedisConnectionError:  # what was idle broke with it; every command that we send may be repeated
                    await self.close()
                    return await self._exchange(packed, len(commands))
        except TimeoutError:
            raise Unavailable("redis", f"no answer within {self.timeout:g} s", RETRY_AFTER) from None
        except (RedisError, OSError) as error:
            raise Unavailable("redis", str(error) or type(error).__name__, RETRY_AFTER) from error

    async def _exchange(self, packed: bytes, count: int) -> list[Any]:
        async with self._free:
            connection = self._idle.pop() if self._idle else self._factory.make_connection()  # type: ignore[no-untyped-call]
            try:
                await connection.send_packed_command(packed, check_health=False)
                replies = [await _reply(connection) for _ in range(count)]
            except BaseException:
                # Replies that nobody read would answer the next caller.
                await connection.disconnect(nowait=True)
                raise
            self._idle.append(connection)
            return replies


def _words(call: Call | Plain, *, whole: bool = False) -> Sequence[bytes]:
    if isinstance(call, Plain):
        return call.words
    named = (b"EVAL", call.script.source) if whole else (b"EVALSHA", call.script.sha)
    return (*named, b"%d" % len(call.keys), *call.keys, *call.arguments)


async def _reply(connection: AbstractConnection) -> Any:
    """One reply, or the error with which Redis answered."""
    try:
        return await connection.read_response(disable_decoding=True)
    except ResponseError as error:
        return error


def pack(command: Sequence[bytes]) -> bytes:
    """A command as it is sent."""
    parts = [b"*%d\r\n" % len(command)]
    parts += [b"$%d\r\n%b\r\n" % (len(word), word) for word in command]
    return b"".join(parts)
