"""Redis Cluster: which node holds a slot, as its nodes say."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any
from urllib.parse import SplitResult

from redis.crc import key_slot
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError

from hedgerow.rpc.logs import get_log
from services.kvstore.nodes import Node, Nodes
from services.kvstore.topology import LOOK_AGAIN, REDIS_PORT, addresses

log = get_log(__name__)


class Cluster:
    """See topology.Topology. The map of slots is read at the first call, and again after a node failed or moved one."""

    def __init__(self, parts: SplitResult, *, timeout: float, connections: int) -> None:
        if parts.path.strip("/") not in ("", "0"):
            raise ValueError("a cluster has one database")
        self.timeout, self.seeds = timeout, addresses(parts, REDIS_PORT)
        self._nodes = Nodes(parts._replace(path=""), timeout=timeout, connections=connections)
        self._slots: dict[int, Node] = {}
        self._stale = True
        self._looked, self._looking = 0.0, asyncio.Lock()

    async def place(self, keys: Sequence[bytes]) -> Sequence[Node]:
        """See topology.Topology."""
        slots = [key_slot(key) for key in keys]
        if self._stale or not all(slot in self._slots for slot in slots):
            await self._look()
        try:
            return [self._slots[slot] for slot in slots]
        except KeyError as missing:
            raise RedisConnectionError(f"no node of the cluster has slot {missing}") from None

    async def nodes(self) -> Sequence[Node]:
        """See topology.Topology."""
        if self._stale:
            await self._look()
        return list(dict.fromkeys(self._slots.values()))

    def doubt(self, node: Node) -> bool:
        """See topology.Topology."""
        self._stale = True
        return True

    def moved(self, slot: int, host: str, port: int) -> None:
        """See topology.Topology."""
        if host:
            self._slots[slot] = self._nodes.at(host, port)
        self._stale = True  # where one slot moved, others did

    def at(self, host: str, port: int) -> Node:
        """See topology.Topology."""
        return self._nodes.at(host, port)

    async def close(self) -> None:
        """See topology.Topology."""
        await self._nodes.close()

    async def _look(self) -> None:
        """Read the map from the first node that answers, one caller at a time."""
        clock, since = asyncio.get_running_loop().time, self._looked
        async with self._looking:
            if not self._stale and self._looked > since:
                return  # somebody looked while we waited
            await asyncio.sleep(max(0.0, self._looked + LOOK_AGAIN - clock()))
            known = dict.fromkeys((*self._slots.values(), *(self._nodes.at(*seed) for seed in self.seeds)))
            failures = []
            for node in known:
                try:
                    async with asyncio.timeout(self.timeout / 3):
                        (reply,) = await node.exchange([(b"CLUSTER", b"SLOTS")])
                    if isinstance(reply, ResponseError):
                        raise reply
                except (RedisError, OSError, TimeoutError) as error:
                    failures.append(f"{node.name}: {error or type(error).__name__}")
                    continue
                self._read(node, reply)
                self._stale, self._looked = False, clock()
                return
            self._looked = clock()
            raise RedisConnectionError(f"no node of the cluster answers: {'; '.join(failures)}")

    def _read(self, teller: Node, ranges: Sequence[Sequence[Any]]) -> None:
        """[[first slot, last slot, [host, port, ...] of its primary, ...], ...]; an empty host is the teller's own."""
        before = set(self._slots.values())
        self._slots.clear()
        for first, last, primary, *_ in ranges:
            host = primary[0].decode() if primary[0] else teller.name.rpartition(":")[0].strip("[]")
            self._slots.update(dict.fromkeys(range(first, last + 1), self._nodes.at(host, primary[1])))
        if (after := set(self._slots.values())) != before:
            log.info("cluster", nodes=",".join(sorted(node.name for node in after)), slots=len(self._slots))
