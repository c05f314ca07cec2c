"""Connections to the simulated Redis, in place of redis-py's below `services.kvstore.scripts.Runner`."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError

from tests.simulation.memory_redis import MemoryRedis
from tests.simulation.processes import CURRENT, Process
from tests.simulation.wire import Link, Network

ADDRESS = "redis"
SPLIT = 0.1
"""The share of pipelines whose replies come one by one, so that some may be lost; the others' come in one piece."""


class RedisServer:
    """The process that serves `memory`, and who listens to its channels."""

    def __init__(self, network: Network, memory: MemoryRedis) -> None:
        self.network, self.memory = network, memory
        self.subscribers: dict[Connection, list[bytes]] = {}
        self.commands = 0
        memory.published = self._publish

    def start(self, process: Process) -> None:
        """Listen. What was subscribed before is not any more."""
        self.subscribers.clear()
        self.network.servers[ADDRESS] = process

    def receive(self, connection: Connection, link: Link, commands: list[list[bytes]]) -> None:
        """Runs commands that arrived together over `link`; other clients' come before or after all of them. Their
        replies go where they came from: to nobody, where the client has opened another link since."""
        replies: list[Any] = []
        for words in commands:
            self.commands += 1
            if words[0].upper() in (b"SUBSCRIBE", b"SSUBSCRIBE"):
                for i, channel in enumerate(words[1:], 1):
                    self.subscribers.setdefault(connection, []).append(channel)
                    replies.append([words[0].lower(), channel, i])
            else:
                replies.append(self.memory.execute(words))
        if self.network.chance.random() < SPLIT:
            for reply in replies:
                connection.reply(link, reply)
        elif replies:
            connection.reply(link, *replies)

    def _publish(self, channel: bytes, message: bytes) -> int:
        told = 0
        for connection, channels in self.subscribers.items():
            if channel in channels and connection.link is not None and connection.link.server_alive:
                connection.reply(connection.link, [b"message", channel, message])
                told += 1
        return told


class Connection:
    """The part of redis.asyncio's connection that the runner uses."""

    def __init__(self, network: Network, server: RedisServer) -> None:
        process = CURRENT.get()
        assert process is not None
        self._network, self._server, self._process = network, server, process
        self.link: Link | None = None
        self._replies: deque[Any] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._broken = False
        self._last_to = self._last_from = 0.0

    async def connect(self, *_: Any, **__: Any) -> None:
        """Open it, where that has not been done."""
        if self.link is not None and not self._broken:
            return
        await asyncio.sleep(self._network.delay())
        self.link, self._broken = self._network.connect(self._process, ADDRESS), False
        self._replies.clear()
        if self.link is None:
            raise RedisConnectionError("Error 111 connecting to redis. Connection refused.")
        self.link.calls[id(self)] = self

    async def send_packed_command(self, packed: Any, check_health: bool = True) -> None:
        """Send what was packed, one or more commands."""
        await self.connect()
        data = packed if isinstance(packed, bytes) else b"".join(packed)
        assert self.link is not None
        self._last_to = self.link.send(True, self._last_to, self._server.receive, self, self.link, _parse(data))

    async def send_command(self, *words: Any, **_: Any) -> None:
        """Send one command."""
        parts = [word if isinstance(word, bytes) else str(word).encode() for word in words]
        await self.send_packed_command(
            b"".join([b"*%d\r\n" % len(parts), *(b"$%d\r\n%b\r\n" % (len(p), p) for p in parts)])
        )

    async def read_response(self, disable_decoding: bool = False, **_: Any) -> Any:
        """The next reply; an error is raised."""
        while not self._replies:
            if self._broken or self.link is None:
                raise RedisConnectionError("Connection closed by server.")
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        reply = self._replies.popleft()
        if isinstance(reply, Exception):
            raise reply
        return reply

    async def disconnect(self, nowait: bool = False, **_: Any) -> None:
        """Leave it."""
        if self.link is not None:
            self.link.calls.pop(id(self), None)
            self._server.subscribers.pop(self, None)
        self.link, self._broken = None, True
        self._wake()

    def reply(self, link: Link, *values: Any) -> None:
        """At the server: send replies in one piece over `link`."""
        if self.link is link:
            self._last_from = link.send(False, self._last_from, self._arrived, link, values)

    def broken(self, why: str) -> None:
        """The connection is gone."""
        self._broken = True
        self._wake()

    def abandoned(self) -> None:
        """The server's end heard that the client is gone."""
        self._server.subscribers.pop(self, None)

    def _arrived(self, link: Link, values: Sequence[Any]) -> None:
        if self.link is link:  # not of one that was left
            self._replies += values
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Pool:
    """redis.asyncio.ConnectionPool: what makes connections."""

    def __init__(self, network: Network, server: RedisServer) -> None:
        self._network, self._server = network, server

    def make_connection(self) -> Connection:
        """A connection of the process that asks."""
        return Connection(self._network, self._server)

    async def disconnect(self, *_: Any, **__: Any) -> None:
        """It keeps none."""

    async def aclose(self) -> None:
        """It keeps none."""


def _parse(data: bytes) -> list[list[bytes]]:
    commands, at = [], 0
    while at < len(data):
        end = data.index(b"\r\n", at)
        count, at = int(data[at + 1 : end]), end + 2
        words = []
        for _ in range(count):
            end = data.index(b"\r\n", at)
            length, at = int(data[at + 1 : end]), end + 2
            words.append(data[at : at + length])
            at += length + 2
        commands.append(words)
    return commands
