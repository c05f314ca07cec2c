"""One Redis server each: connections, and the commands that are sent over them at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any
from urllib.parse import SplitResult, urlsplit

import redis.asyncio
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ResponseError


class Node:
    """A server and at most `connections` connections to it. `timeout` is that of connecting, in seconds."""

    def __init__(self, url: str, *, timeout: float, connections: int) -> None:
        self.name = urlsplit(url).netloc.rpartition("@")[2] or "redis"
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
        """A connection of its own, for whoever listens. Raises RedisError and OSError."""
        connection: AbstractConnection = self._factory.make_connection()  # type: ignore[no-untyped-call]
        await connection.connect()  # type: ignore[no-untyped-call]
        return connection

    async def exchange(self, commands: Sequence[Sequence[bytes]]) -> list[Any]:
        """Send commands at once and read all replies; a command that failed answers with its ResponseError.

        Raises RedisError and OSError; whether the commands took effect is then unknown.
        """
        packed = b"".join(pack(command) for command in commands)
        async with self._free:
            connection = self._idle.pop() if self._idle else self._factory.make_connection()  # type: ignore[no-untyped-call]
            try:
                await connection.send_packed_command(packed, check_health=False)
                replies = [await _reply(connection) for _ in commands]
            except BaseException:
                # Replies that nobody read would answer the next caller.
                await connection.disconnect(nowait=True)
                raise
            self._idle.append(connection)
            return replies


class Nodes:
    """The servers of one URL, which all have its credentials, database and options; made when they are first named."""

    def __init__(self, parts: SplitResult, *, timeout: float, connections: int) -> None:
        self.parts, self.timeout, self.connections = parts, timeout, connections
        self._nodes: dict[tuple[str, int], Node] = {}

    def at(self, host: str, port: int) -> Node:
        """The server there."""
        if (host, port) not in self._nodes:
            who = self.parts.netloc.rpartition("@")[:2]
            netloc = "".join(who) + (f"[{host}]" if ":" in host else host) + f":{port}"
            self._nodes[host, port] = Node(
                self.parts._replace(netloc=netloc).geturl(), timeout=self.timeout, connections=self.connections
            )
        return self._nodes[host, port]

    async def close(self) -> None:
        """Close every connection that is not in use."""
        for node in self._nodes.values():
            await node.close()


def pack(command: Sequence[bytes]) -> bytes:
    """A command as it is sent."""
    parts = [b"*%d\r\n" % len(command)]
    parts += [b"$%d\r\n%b\r\n" % (len(word), word) for word in command]
    return b"".join(parts)


async def _reply(connection: AbstractConnection) -> Any:
    """One reply, or the error with which Redis answered."""
    try:
        return await connection.read_response(disable_decoding=True)
    except ResponseError as error:
        return error
