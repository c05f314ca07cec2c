"""A Redis that takes the kvstore over TLS only: a certificate of its own, client certificates, an ACL user."""

from __future__ import annotations

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
    """The server, and what a kvstore needs for it. `files` are the server's own."""

    server: EmbeddedRedis
    url: str
    files: Files

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
        words = ACL.replace("<password>", f">{PASSWORD}").split()
        assert words[:2] == ["user", USER]
        with redis.Redis.from_url(server.url) as admin:
            admin.acl_setuser(USER, reset=True, enabled=True)
            admin.execute_command("ACL", "SETUSER", USER, *words[2:])
        yield TlsRedis(server, f"rediss://{USER}:{PASSWORD}@127.0.0.1:{port}/0", files)
