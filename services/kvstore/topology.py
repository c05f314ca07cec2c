"""Which server holds a key: one server, the master that Sentinels name, or the nodes of a Redis Cluster.

    redis://[user:password@]host:port[/db]              one server; rediss:// with TLS, unix:// by a socket
    redis+sentinel://host:port,host:port/service[/db]   the master of `service`, as these Sentinels know it
    redis+cluster://host:port,host:port                 a cluster, of which these are some nodes

User, password and options are those of the data servers; `sentinel_username` and `sentinel_password` among the options
are the Sentinels'. `rediss+sentinel` and `rediss+cluster`: with TLS everywhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Protocol
from urllib.parse import SplitResult, parse_qsl, urlencode, urlsplit

from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff

from hedgerow.rpc.logs import get_log
from services.kvstore.nodes import Node, Nodes

SCHEMES = ("redis", "rediss", "unix")
SENTINEL_PORT, REDIS_PORT = 26379, 6379
LOOK_AGAIN = 0.1
"""Seconds between two looks for another server, while calls fail."""
log = get_log(__name__)


class Topology(Protocol):
    """Where keys are. Everything that looks raises RedisError and OSError."""

    async def place(self, keys: Sequence[bytes]) -> Sequence[Node]:
        """The node of each key."""

    async def nodes(self) -> Sequence[Node]:
        """Every node that takes writes."""

    def doubt(self, node: Node) -> bool:
        """The node failed, or takes no writes: `place` looks again. False: there is nothing else to look for."""

    def moved(self, slot: int, host: str, port: int) -> None:
        """A node said where else a slot is now."""

    def at(self, host: str, port: int) -> Node:
        """The node there, for a call that one redirected once."""

    async def close(self) -> None:
        """Close every connection that is not in use."""


class Single:
    """One server."""

    def __init__(self, url: str, *, timeout: float, connections: int) -> None:
        self.node = Node(url, timeout=timeout, connections=connections)

    async def place(self, keys: Sequence[bytes]) -> Sequence[Node]:
        """See Topology."""
        return [self.node] * len(keys)

    async def nodes(self) -> Sequence[Node]:
        """See Topology."""
        return [self.node]

    def doubt(self, node: Node) -> bool:
        """See Topology."""
        return False

    def moved(self, slot: int, host: str, port: int) -> None:
        """See Topology. A cluster of one node may be used as a single server; of several it may not."""

    def at(self, host: str, port: int) -> Node:
        """See Topology."""
        return self.node

    async def close(self) -> None:
        """See Topology."""
        await self.node.close()


class Sentinels:
    """The master of a service. It is asked for at the first call, again when it fails, and by `nodes`, which health
    polls: a master that was cut off would go on taking writes that nobody keeps.
    """

    def __init__(self, parts: SplitResult, *, timeout: float, connections: int) -> None:
        self.service, _, database = parts.path.strip("/").partition("/")
        if not self.service:
            raise ValueError("no service is named")
        options = dict(parse_qsl(parts.query))
        # one that hangs leaves time to ask the others
        own: dict[str, Any] = dict.fromkeys(("socket_timeout", "socket_connect_timeout"), timeout / 3)
        own |= {"retry": Retry(NoBackoff(), 0), "ssl": parts.scheme == "rediss"}
        own |= {name: options.pop(f"sentinel_{name}", None) for name in ("username", "password")}
        own |= {name: value for name, value in options.items() if name.startswith("ssl_")}
        self._sentinel = Sentinel(addresses(parts, SENTINEL_PORT), sentinel_kwargs=own)  # type: ignore[no-untyped-call]
        data = parts._replace(path=f"/{database}", query=urlencode(options))
        self._nodes = Nodes(data, timeout=timeout, connections=connections)
        self._master: Node | None = None
        self._looked, self._looking = 0.0, asyncio.Lock()

    async def place(self, keys: Sequence[bytes]) -> Sequence[Node]:
        """See Topology."""
        return [self._master or await self._look(known=True)] * len(keys)

    async def nodes(self) -> Sequence[Node]:
        """See Topology."""
        return [await self._look()]

    def doubt(self, node: Node) -> bool:
        """See Topology."""
        if node is self._master:
            self._master = None
        return True

    def moved(self, slot: int, host: str, port: int) -> None:
        """See Topology."""

    def at(self, host: str, port: int) -> Node:
        """See Topology."""
        return self._nodes.at(host, port)

    async def close(self) -> None:
        """See Topology."""
        await self._nodes.close()
        await self._sentinel.aclose()

    async def _look(self, *, known: bool = False) -> Node:
        """Ask the Sentinels, one caller at a time; `known`: or take what another caller heard meanwhile."""
        clock = asyncio.get_running_loop().time
        async with self._looking:
            if known and self._master is not None:
                return self._master
            if self._master is None:
                await asyncio.sleep(max(0.0, self._looked + LOOK_AGAIN - clock()))
            self._looked = clock()
            host, port = await self._sentinel.discover_master(self.service)
            node = self._nodes.at(host, int(port))
            if node is not self._master:
                log.info("sentinels name a master", service=self.service, node=node.name)
                self._master = node
            return node


def addresses(parts: SplitResult, port: int) -> list[tuple[str, int]]:
    """The `host:port,host:port` of a URL. Raises ValueError."""
    found = [urlsplit(f"//{each}") for each in parts.netloc.rpartition("@")[2].split(",") if each]
    hosts = [(each.hostname or "", each.port or port) for each in found]
    if not hosts or not all(host for host, _ in hosts):
        raise ValueError("no host is named")
    return hosts


def with_options(url: str, options: Mapping[str, str]) -> str:
    """The URL with further options of its connections; what it says itself counts more."""
    if not options:
        return url
    parts = urlsplit(url)
    return parts._replace(query=urlencode(dict(options) | dict(parse_qsl(parts.query)))).geturl()


def topology_of(url: str, *, timeout: float, connections: int) -> Topology:
    """What a URL names. Raises ValueError, whose text may show a part of the URL."""
    from services.kvstore.cluster import Cluster  # which is built on this module

    parts = urlsplit(url)
    scheme, _, kind = parts.scheme.partition("+")
    if kind and scheme in ("redis", "rediss"):
        parts = parts._replace(scheme=scheme)
        if kind == "sentinel":
            return Sentinels(parts, timeout=timeout, connections=connections)
        if kind == "cluster":
            return Cluster(parts, timeout=timeout, connections=connections)
    return Single(url, timeout=timeout, connections=connections)
