"""The store's Redis in two forms: one server, and a primary with a replica under a real Sentinel."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import redis

from hedgerow.cli.child import Backoff
from hedgerow.cli.embedded_redis import HOST, EmbeddedRedis, find_binary
from hedgerow.cli.ports import free_ports
from hedgerow.errors import Unavailable
from tests.polling import eventually

MASTER = "hedgerow"  # the name under which Sentinel knows the primary
DOWN_AFTER = 1000  # milliseconds without an answer after which Sentinel fails over
# A primary that comes back before Sentinel has noticed would only have been restarted.
STAYS_DOWN = Backoff(first=6.0, most=6.0)


class Redises(Protocol):
    """What a cluster's kvstores are led to."""

    @property
    def url(self) -> str:
        """What a kvstore is given; "" for one server, which it reaches through a wire."""

    async def target(self) -> tuple[str, int]:
        """Where the server is that takes writes."""

    def start(self) -> None:
        """Start everything and wait for it."""

    def stop(self) -> None:
        """Stop everything."""

    def settle(self) -> None:
        """Return once all servers are up and, where there is a replica, it follows."""

    def primary(self) -> EmbeddedRedis:
        """The server that takes writes."""


class Alone:
    """One server."""

    def __init__(self, folder: Path, settings: Mapping[str, str] | None = None) -> None:
        self._server = EmbeddedRedis(folder, settings=settings, backoff=Backoff(first=0.2, most=1.0))
        self.url = ""

    async def target(self) -> tuple[str, int]:
        return HOST, self._server.port

    def start(self) -> None:
        self._server.start()

    def stop(self) -> None:
        self._server.stop()

    def settle(self) -> None:
        self._server.wait_ready(30)

    def primary(self) -> EmbeddedRedis:
        return self._server


class Sentinel:
    """A primary, a replica and one Sentinel whose word is enough."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._servers = [EmbeddedRedis(folder / name, backoff=STAYS_DOWN) for name in ("one", "two")]
        self._process: subprocess.Popen[bytes] | None = None
        (self.port,) = free_ports(1)
        self.url = f"redis+sentinel://{HOST}:{self.port}/{MASTER}"

    async def target(self) -> tuple[str, int]:
        return await asyncio.to_thread(self._master)

    def start(self) -> None:
        for server in self._servers:
            server.start()
        self._command(self._servers[1], "REPLICAOF", HOST, str(self._servers[0].port))
        configuration = self._folder / "sentinel.conf"
        configuration.write_text(
            f"port {self.port}\nbind {HOST}\ndir {self._folder}\n"
            f"sentinel monitor {MASTER} {HOST} {self._servers[0].port} 1\n"
            f"sentinel down-after-milliseconds {MASTER} {DOWN_AFTER}\n"
            f"sentinel failover-timeout {MASTER} 10000\n"
        )
        with (self._folder / "sentinel.log").open("ab") as log:
            self._process = subprocess.Popen(
                [str(find_binary()), str(configuration), "--sentinel"], stdout=log, stderr=subprocess.STDOUT
            )
        self.settle()

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(10)
            self._process.kill()
            self._process.wait()
        for server in self._servers:
            server.stop()

    def settle(self) -> None:
        for server in self._servers:
            server.wait_ready(30)
        replica, primary = self.replica(), self.primary()
        if self._info(replica).get("master_port") != str(primary.port):  # Sentinel would do so 10 s later
            self._command(replica, "REPLICAOF", HOST, str(primary.port))
        eventually(self._followed, 60, "a replica that follows and that Sentinel knows")

    def primary(self) -> EmbeddedRedis:
        port = self._master()[1]
        return next(server for server in self._servers if server.port == port)

    def replica(self) -> EmbeddedRedis:
        """The one that follows."""
        port = self._master()[1]
        return next(server for server in self._servers if server.port != port)

    def stop_following(self) -> None:
        """From now on the replica gets no write; Sentinel does not mind for its failover-timeout."""
        self._command(self.replica(), "REPLICAOF", HOST, "1")

    def lengths(self, server: EmbeddedRedis, session_ids: Sequence[str]) -> dict[str, int]:
        """Tokens of each session as one server has them."""
        with redis.Redis(HOST, server.port, socket_timeout=5) as client:
            return {i: int(client.hget(f"hedgerow:{{{i}}}:record", "length") or 0) for i in session_ids}

    def failed_over(self, before: EmbeddedRedis, seconds: float = 90) -> None:
        """Returns when another server than `before` is the primary and takes writes.

        Sentinel does nothing for 30 s after its timer was late (TILT, on a busy machine), and tries again after twice
        its failover-timeout where a first try found no good replica.
        """

        def done() -> bool:
            if self._master()[1] == before.port:
                return False
            return self._info(self.primary()).get("role") == "master"

        eventually(done, seconds, "a fail-over")

    def _followed(self) -> bool:
        try:
            with redis.Redis(HOST, self.port, decode_responses=True) as sentinel:
                known = sentinel.execute_command("SENTINEL", "REPLICAS", MASTER)
                flags = [
                    replica[replica.index("flags") + 1] if isinstance(replica, list) else replica["flags"]
                    for replica in known
                ]
            primary, replica = self._info(self.primary()), self._info(self.replica())
        except (redis.RedisError, StopIteration, OSError):
            return False
        return (
            flags == ["slave"]
            and primary.get("role") == "master"
            and replica.get("master_link_status") == "up"
            and int(replica["master_port"]) == self.primary().port
        )

    def _master(self) -> tuple[str, int]:
        try:
            with redis.Redis(HOST, self.port, decode_responses=True, socket_timeout=5) as sentinel:
                host, port = sentinel.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", MASTER)
        except redis.RedisError as error:
            raise Unavailable("sentinel", str(error)) from error
        return str(host), int(port)

    def _info(self, server: EmbeddedRedis) -> dict[str, str]:
        with redis.Redis(HOST, server.port, socket_timeout=5, decode_responses=True) as client:
            return {name: str(value) for name, value in client.info("replication").items()}

    def _command(self, server: EmbeddedRedis, *words: str) -> None:
        with redis.Redis(HOST, server.port, socket_timeout=5) as client:
            client.execute_command(*words)
