"""Several real Redis servers together: a primary with replicas, Sentinels over them, a cluster."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import redis

from hedgerow.cli.child import Backoff
from hedgerow.cli.embedded_redis import EmbeddedRedis
from hedgerow.cli.ports import free_ports
from tests.polling import eventually

HOST, MASTER = "127.0.0.1", "hedgerow"
NEVER = Backoff(first=3600, most=3600)  # what was killed stays dead, so that others must take over
DOWN_AFTER_MS = 500


def client_of(server: EmbeddedRedis) -> redis.Redis:
    """A client of ours."""
    return redis.Redis.from_url(server.url)


def debian() -> Path:
    """Debian's server, which can be a Sentinel and a cluster's node too; the test is skipped where it is not."""
    binary = shutil.which("redis-server")
    if binary is None:
        pytest.skip("redis-server is not installed (Debian: apt-get install redis-server redis-sentinel)")
    return Path(binary)


def follow(replica: EmbeddedRedis, primary: EmbeddedRedis) -> None:
    """Make one server the replica of another, and wait until it has everything."""
    with client_of(replica) as client:
        client.replicaof(HOST, str(primary.port))
        eventually(lambda: client.info("replication").get("master_link_status") == "up", 30, "the replica's link")
    with client_of(primary) as client:  # Redis 7.0 sends nothing more before the replica's next word, up to 1 s later
        client.set("followed", 1)
        eventually(lambda: client.wait(1, 1000) >= 1, 30, "the replica's answer")
        client.delete("followed")


@contextmanager
def paused(server: EmbeddedRedis) -> Iterator[None]:
    """A server that keeps its connections and says nothing."""
    os.kill(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


@contextmanager
def servers(
    folder: Path, count: int, binary: Path | None, settings: Mapping[str, str]
) -> Iterator[list[EmbeddedRedis]]:
    """Servers of one kind; those that are killed stay dead."""
    at_once = {"repl-diskless-sync-delay": "0"}  # otherwise a replica waits five seconds for others to come
    settings, made = at_once | dict(settings), list[EmbeddedRedis]()
    # a cluster's nodes talk on another port each, by default 10,000 above: there it may be an outgoing connection's
    for i, bus in enumerate(free_ports(count)):
        own = {"cluster-port": str(bus)} if "cluster-enabled" in settings else {}
        made.append(EmbeddedRedis(folder / str(i), binary=binary, backoff=NEVER, settings=settings | own))
    with ExitStack() as stack:
        yield [stack.enter_context(server) for server in made]


def bus_port(node: EmbeddedRedis) -> int:
    """Where the other nodes of its cluster call it."""
    with client_of(node) as client:
        return int(client.config_get("cluster-port")["cluster-port"])


class Sentinels:
    """A primary, a replica, and a Sentinel whose word is enough."""

    def __init__(self, folder: Path, data: Sequence[EmbeddedRedis], binary: Path) -> None:
        self.data = data
        self.port = next(free_ports(1))
        configuration = folder / "sentinel.conf"
        configuration.write_text(
            f"port {self.port}\ndir {folder}\nsentinel monitor {MASTER} {HOST} {data[0].port} 1\n"
            f"sentinel down-after-milliseconds {MASTER} {DOWN_AFTER_MS}\nsentinel failover-timeout {MASTER} 4000\n"
        )
        with (folder / "sentinel.log").open("ab") as log:
            command = [str(binary), str(configuration), "--sentinel"]
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        self.client = redis.Redis(HOST, self.port, decode_responses=True)

    @property
    def url(self) -> str:
        """Its address, after one where nobody is."""
        return f"redis+sentinel://{HOST}:1,{HOST}:{self.port}/{MASTER}"

    @property
    def master(self) -> EmbeddedRedis:
        """The server that the Sentinel names."""
        _, port = self.client.sentinel_get_master_addr_by_name(MASTER)
        return next(server for server in self.data if server.port == int(port))

    def knows_everybody(self) -> bool:
        """Whether it could fail over."""
        try:
            replicas = self.client.sentinel_slaves(MASTER)
        except redis.RedisError:
            return False
        return [each["flags"] for each in replicas] == ["slave"] and replicas[0]["master-link-status"] == "ok"

    def stop(self) -> None:
        """Leave nothing behind."""
        self.client.close()
        self.process.kill()
        self.process.wait()


@contextmanager
def sentinels(folder: Path) -> Iterator[Sentinels]:
    """A group that can fail over."""
    binary = debian()
    with servers(folder, 2, binary, {}) as data:
        follow(data[1], data[0])
        group = Sentinels(folder, data, binary)
        try:
            eventually(group.knows_everybody, 30, "a Sentinel that knows primary and replica")
            yield group
        finally:
            group.stop()


@contextmanager
def cluster(folder: Path, primaries: int) -> Iterator[list[EmbeddedRedis]]:
    """A Redis Cluster whose first `primaries` nodes share the slots; the rest is for the test to use."""
    settings = {"cluster-enabled": "yes", "cluster-node-timeout": "1000", "cluster-config-file": "nodes.conf"}
    settings["cluster-allow-replica-migration"] = "no"  # a node that gave its slots away stays a primary
    with servers(folder, primaries + 1, debian(), settings) as nodes, ExitStack() as stack:
        clients = [stack.enter_context(client_of(node)) for node in nodes]
        for i, client in enumerate(clients[:primaries]):
            first, last = 16384 * i // primaries, 16384 * (i + 1) // primaries - 1
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", first, last)
            client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", i + 1)
        for node in nodes[1:]:
            clients[0].execute_command("CLUSTER", "MEET", HOST, node.port, bus_port(node))
        for client in clients:
            eventually(lambda client=client: agrees(client, len(nodes)), 30, "a cluster that agrees")  # type: ignore[misc]
        yield nodes


def agrees(client: redis.Redis, nodes: int) -> bool:
    """Whether this node sees the whole cluster."""
    info = client.execute_command("CLUSTER INFO")
    return info["cluster_state"] == "ok" and int(info["cluster_known_nodes"]) == nodes
