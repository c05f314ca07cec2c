"""Calls of scripts and commands: one round trip for any number of them to each node that they touch, bounded in time.

A call is sent again, within its time, where that may help and nothing was lost by the first try: a script that the node
does not know, a connection that broke, a slot that moved, a master that is none any more. Every call may be repeated.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from redis.asyncio.connection import AbstractConnection
from redis.exceptions import AskError, MovedError, NoScriptError, ReadOnlyError, RedisError
from redis.exceptions import ConnectionError as RedisConnectionError

from hedgerow.errors import Unavailable
from services.kvstore.nodes import Node
from services.kvstore.scripts import Call, Plain
from services.kvstore.topology import Topology

RETRY_AFTER = 0.2
"""Seconds after which a caller may try again when Redis is away."""
TRIES = 6
"""How often one call is sent at most."""
BEAT = b"#!lua flags=allow-oom\nreturn redis.call('SET', KEYS[1], '', 'PX', 1000)"
"""A write that leaves nothing behind, and that a Redis without memory takes too."""


class Wait(NamedTuple):
    """How many replicas must have what is durable, and for how many milliseconds they are waited for."""

    replicas: int = 0
    ms: int = 0


class _Sending:
    """Calls under way: what each of them answered, and those that must be sent again."""

    def __init__(self, calls: Sequence[Call | Plain], deadline: float) -> None:
        self.calls, self.deadline = calls, deadline
        self.replies: list[Any] = [None] * len(calls)
        self.again = list(range(len(calls)))
        self.whole: set[int] = set()  # whose script the node did not know
        self.asked: dict[int, Node] = {}  # which are redirected once
        self.broke: set[Node] = set()  # whose connections broke under these calls

    def words(self, i: int) -> Sequence[bytes]:
        """Call i as it is sent."""
        call = self.calls[i]
        if isinstance(call, Plain):
            return call.words
        named = (b"EVAL", call.script.source) if i in self.whole else (b"EVALSHA", call.script.sha)
        return (*named, b"%d" % len(call.keys), *call.keys, *call.arguments)


class Runner:
    """`timeout` bounds every method, in seconds; `wait` is added where a call is durable."""

    def __init__(self, topology: Topology, *, timeout: float, wait: Wait = Wait()) -> None:  # noqa: B008  (it is frozen)
        self.topology, self.timeout, self.wait = topology, timeout, wait
        self.exchanges = self.silences = self.shortfalls = 0  # round trips; those without an answer; WAITs unsatisfied
        self.took: Callable[[float], None] = lambda seconds: None
        """Told how long a round trip took."""

    async def close(self) -> None:
        """Close every connection that is not in use."""
        await self.topology.close()

    async def open(self) -> AbstractConnection:
        """A connection of its own, for whoever listens. Raises RedisError, OSError and TimeoutError."""
        failure: Exception = RedisConnectionError("there is no node")
        async with asyncio.timeout(self.timeout):
            for node in await self.topology.nodes():
                try:
                    return await node.open()
                except (RedisError, OSError) as error:
                    self.topology.doubt(node)
                    failure = error
        raise failure

    async def ask_nodes(self, commands: Sequence[Sequence[bytes]]) -> dict[str, Any]:
        """What each node that takes writes answers, by its name: its replies, or Unavailable. Raises Unavailable."""
        try:
            async with asyncio.timeout(self.timeout):
                nodes = await self.topology.nodes()
        except TimeoutError:
            raise self._silent() from None
        except (RedisError, OSError) as error:
            raise _away(error) from error
        deadline = asyncio.get_running_loop().time() + self.timeout
        replies = await asyncio.gather(*(self._exchange(node, commands, deadline) for node in nodes))
        told = dict[str, Any]()
        for node, reply in zip(nodes, replies, strict=True):
            if isinstance(reply, Exception):
                self.topology.doubt(node)
            told[node.name] = _away(reply) if isinstance(reply, Exception) else reply
        return told

    async def call_all(self, calls: Sequence[Call | Plain], *, durable: bool = False) -> list[Any]:
        """All calls, those of one node in one round trip and in order. Never raises for Redis's sake: a call that
        failed answers with its ResponseError, one that did not reach Redis or was not answered with Unavailable.

        `durable`: as many replicas as configured have what was written; else the answer is Unavailable too.
        """
        durable = durable and self.wait.replicas > 0
        extra = self.wait.ms / 1000 if durable else 0.0
        sending = _Sending(calls, asyncio.get_running_loop().time() + self.timeout + extra)
        for _ in range(TRIES):
            if not sending.again:
                break
            todo, sending.again = sending.again, []
            try:
                groups = await self._grouped(sending, todo)
            except (RedisError, OSError, TimeoutError) as error:
                why = self._silent() if isinstance(error, TimeoutError) else _away(error)
                for i in todo:
                    sending.replies[i] = why
                break
            if len(groups) == 1:
                await self._send(sending, *groups.popitem(), durable=durable)
            else:
                await asyncio.gather(
                    *(self._send(sending, node, todo, durable=durable) for node, todo in groups.items())
                )
        return sending.replies

    async def _grouped(self, sending: _Sending, todo: Sequence[int]) -> dict[Node, list[int]]:
        async with asyncio.timeout_at(sending.deadline):
            places = await self.topology.place([_key(sending.calls[i]) for i in todo])
        groups: dict[Node, list[int]] = {}
        for i, node in zip(todo, places, strict=True):
            groups.setdefault(sending.asked.get(i, node), []).append(i)
        return groups

    async def _send(self, sending: _Sending, node: Node, group: Sequence[int], *, durable: bool) -> None:
        """One round trip to one node."""
        commands: list[Sequence[bytes]] = []
        for i in group:
            if sending.asked.pop(i, None):
                commands.append((b"ASKING",))
            commands.append(sending.words(i))
        if durable:
            commands += self._waiting(sending.calls[group[0]])
        replies = await self._exchange(node, commands, sending.deadline)
        if isinstance(replies, Exception):
            self.topology.doubt(node)
            once_more = isinstance(replies, RedisConnectionError) and node not in sending.broke
            sending.broke.add(node)
            for i in group:
                sending.replies[i] = _away(replies)
            sending.again += group if once_more else ()
            return
        shortfall = self._shortfall(replies) if durable else None
        own = [reply for reply, words in zip(replies, commands, strict=False) if words != (b"ASKING",)]
        for i, reply in zip(group, own, strict=True):
            self._take(sending, node, i, reply, shortfall)

    def _take(self, sending: _Sending, node: Node, i: int, reply: Any, shortfall: Unavailable | None) -> None:
        failed = isinstance(reply, Exception)
        sending.replies[i] = reply if failed or shortfall is None else shortfall
        if isinstance(reply, NoScriptError):
            # EVAL rather than SCRIPT LOAD: it reaches the node that the keys are on, and loads and runs at once.
            sending.whole.add(i)
        elif isinstance(reply, MovedError):
            self.topology.moved(reply.slot_id, reply.host, reply.port)
        elif isinstance(reply, AskError):
            sending.asked[i] = self.topology.at(reply.host, reply.port)
        elif not isinstance(reply, ReadOnlyError) or not self.topology.doubt(node):
            return
        sending.again.append(i)

    async def _exchange(self, node: Node, commands: Sequence[Sequence[bytes]], deadline: float) -> Any:
        """The replies, or what went wrong."""
        self.exchanges += 1
        begun = time.perf_counter()
        try:
            async with asyncio.timeout_at(deadline):
                replies = await node.exchange(commands)
            self.took(time.perf_counter() - begun)
            return replies
        except TimeoutError:
            self.silences += 1
            return self._silent()
        except RedisConnectionError as error:
            await node.close()  # what was idle broke with it
            return error
        except (RedisError, OSError) as error:
            return error

    def _waiting(self, call: Call | Plain) -> list[Sequence[bytes]]:
        """A write, and a WAIT that so covers everything before it on this connection.

        Without the write a repeated append, which changes nothing, would be waited for up to the last change that this
        connection happened to make, which says nothing of the append's own.
        """
        tag = _key(call).partition(b"}")[0] + b"}"
        wait = (b"WAIT", b"%d" % self.wait.replicas, b"%d" % self.wait.ms)
        return [(b"EVAL", BEAT, b"1", tag + b":beat"), wait]

    def _shortfall(self, replies: list[Any]) -> Unavailable | None:
        """Takes the replies to `_waiting` off."""
        count, written = replies.pop(), replies.pop()
        if isinstance(written, Exception) or isinstance(count, Exception):
            return _away(written if isinstance(written, Exception) else count)
        if count >= self.wait.replicas:
            return None
        self.shortfalls += 1
        why = f"{count} of {self.wait.replicas} replicas have it after {self.wait.ms} ms"
        return Unavailable("redis", why, RETRY_AFTER)

    def _silent(self) -> Unavailable:
        return Unavailable("redis", f"no answer within {self.timeout:g} s", RETRY_AFTER)


def _key(call: Call | Plain) -> bytes:
    return call.key if isinstance(call, Plain) else call.keys[0]


def _away(error: Exception) -> Unavailable:
    if isinstance(error, Unavailable):
        return error
    return Unavailable("redis", str(error) or type(error).__name__, RETRY_AFTER)
