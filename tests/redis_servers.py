"""Every Redis server that this machine has, and a kvstore process on each: real binaries, real sockets."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from hedgerow.cli.child import Backoff
from hedgerow.cli.embedded_redis import EmbeddedRedis
from services.kvstore.scripts import Script
from tests.polling import eventually

ROOT = Path(__file__).resolve().parents[1]
DEBIAN = shutil.which("redis-server")
SERVERS: dict[str, Path | None] = {"embedded": None, **({"redis": Path(DEBIAN)} if DEBIAN else {})}
QUICK = Backoff(first=0.05, most=0.2)
START = 60.0  # seconds that a process may take to begin, beside others


class Service:
    """A service as a child process; `settings` are HEDGEROW_* variables without the prefix."""

    def __init__(self, module: str, **settings: object) -> None:
        ours = {f"HEDGEROW_{name.upper()}": str(value) for name, value in settings.items()}
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("HEDGEROW_")}
        self.lines: list[str] = []
        self.log: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", module],
            cwd=ROOT,
            env=inherited | ours,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._readers = [
            threading.Thread(target=self._read, args=(self.process.stdout, self.lines), daemon=True),
            threading.Thread(target=self._read, args=(self.process.stderr, self.log), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    @property
    def port(self) -> int:
        """The public port, from the ready line."""
        return int(self._ready()[2])

    @property
    def admin_port(self) -> int:
        """The admin port, from the ready line."""
        return int(self._ready()[3].removeprefix("admin="))

    @property
    def text(self) -> str:
        """Everything on stderr so far."""
        return "\n".join(self.log)

    def bound(self) -> tuple[int, int]:
        """The ports, from the log: also while the service is not ready."""
        eventually(lambda: "event=listening" in self.text or self.process.poll() is not None, START, "listening")
        line = next(line for line in self.log if "event=listening" in line)
        fields = dict(pair.split("=", 1) for pair in line.split() if "=" in pair)
        return int(fields["port"]), int(fields["admin"])

    def terminate(self) -> int:
        """SIGTERM, and the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self, timeout: float = 60) -> int:
        """The exit status; the pipes are read to their end."""
        try:
            status = self.process.wait(timeout)
        finally:
            self.process.kill()
        for reader in self._readers:
            reader.join(5)
        return status

    def stop(self) -> None:
        """Leave nothing behind."""
        if self.process.poll() is None:
            self.process.kill()
        self.wait()

    def _ready(self) -> list[str]:
        eventually(lambda: self.lines or self.process.poll() is not None, START, "the ready line")
        assert self.lines, f"it ended: {self.text}"
        return self.lines[0].split()

    @staticmethod
    def _read(stream: Any, into: list[str]) -> None:
        with stream:
            for line in stream:
                into.append(line.rstrip("\n"))


@pytest.fixture(scope="module", params=list(SERVERS))
def redis_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    """A server of every kind that is here, shared by a module's tests."""
    server = EmbeddedRedis(tmp_path_factory.mktemp("redis"), binary=SERVERS[request.param], backoff=QUICK)
    with server:
        yield server


@pytest.fixture(scope="module")
def kvstore(redis_server: EmbeddedRedis) -> Iterator[Service]:
    """A kvstore on that server."""
    service = Service("services.kvstore", redis_url=redis_server.url, redis_timeout=10, grace=3)
    try:
        assert service.port
        yield service
    finally:
        service.stop()


@pytest.fixture
def inspector(redis_server: EmbeddedRedis) -> Iterator[redis.Redis]:
    """A client of ours on the same server, to look at what the kvstore wrote."""
    with redis.Redis.from_url(redis_server.url) as client:
        yield client


Heard = list[tuple[str, str]]
"""Who said what to a server, in the order in which it did it; what a script says inside is not heard."""


@contextmanager
def overheard(client: redis.Redis) -> Iterator[Heard]:
    """Filled at the end with what everybody said to the server meanwhile. Its counters tell only of all together."""
    heard: Heard = []
    mark = f"the end of {id(heard)}"
    with client.monitor() as monitor:  # type: ignore[no-untyped-call]
        yield heard
        client.echo(mark)
        while mark not in (each := monitor.next_command())["command"]:
            if each["client_type"] != "lua":
                heard.append((f"{each['client_address']}:{each['client_port']}", each["command"]))


def scripts_on(session_ids: Sequence[str], heard: Heard) -> list[int]:
    """Where in `heard` something was appended to one of these sessions. Other scripts read their records, too."""
    tags = [f"{{{session_id}}}:record" for session_id in session_ids]
    append = f"EVALSHA {Script('append').sha.decode()} "
    return [i for i, (_, said) in enumerate(heard) if said.startswith(append) and any(tag in said for tag in tags)]
