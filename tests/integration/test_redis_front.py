"""TLS in front of a store without it: who comes through, what comes through, and how it ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import redis

from tests.certificates import Authority, Files
from tests.polling import eventually
from tests.tls_redis import PASSWORD, USER, TlsRedis, fronted_redis


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture
def server(tmp_path: Path, authority: Authority) -> Iterator[TlsRedis]:
    with fronted_redis(tmp_path, authority) as running:
        yield running


def port(server: TlsRedis) -> int:
    found = urlsplit(server.url).port
    assert found is not None
    return found


def client(server: TlsRedis, files: Files | None, ca: Path) -> redis.Redis:
    shown = {} if files is None else {"ssl_certfile": str(files.cert), "ssl_keyfile": str(files.key)}
    return redis.Redis.from_url(server.url, ssl_ca_certs=str(ca), socket_timeout=5, **shown)


def test_bytes_come_through_as_they_are(server: TlsRedis, authority: Authority) -> None:
    """Larger than what is read at once, both ways, from several connections in turn."""
    with server.admin() as admin:
        admin.acl_setuser(USER, enabled=True, passwords=[f"+{PASSWORD}"], commands=["+@all"], keys=["*"])
    mine = authority.issue("kvstore")
    values = {f"k{n}": os.urandom(900_000 + n) for n in range(3)}
    clients = [client(server, mine, authority.cert) for _ in values]
    try:
        for each, (key, value) in zip(clients, values.items(), strict=True):
            each.set(key, value)
        assert [each.get(key) for each, key in zip(clients, values, strict=True)] == list(values.values())
        with clients[0].pipeline(transaction=False) as pipeline:
            for key in values:
                pipeline.get(key)
            assert pipeline.execute() == list(values.values())
    finally:
        for each in clients:
            each.close()


def test_only_certificates_of_the_authority_come_through(
    server: TlsRedis, authority: Authority, tmp_path: Path
) -> None:
    stranger = Authority(tmp_path / "other", "other").issue("stranger")
    for files in (None, stranger):
        with client(server, files, authority.cert) as refused, pytest.raises(redis.exceptions.ConnectionError):
            refused.ping()
    with socket.create_connection(("127.0.0.1", port(server)), 5) as plain:
        plain.sendall(b"PING\r\n")
        assert b"PONG" not in plain.recv(100)


def test_probes_and_a_store_that_is_away_are_no_trouble(server: TlsRedis, authority: Authority) -> None:
    assert server.front is not None
    for _ in range(3):
        socket.create_connection(("127.0.0.1", port(server)), 5).close()
    mine = authority.issue("kvstore")
    server.server.kill()  # and it is started again
    with client(server, mine, authority.cert) as again:
        eventually(lambda: known(again), 10)
    server.front.send_signal(signal.SIGTERM)
    assert server.front.wait(10) == 0
    assert server.front.stderr is not None
    assert server.front.stderr.read() == ""


def known(user: redis.Redis) -> bool:
    """It answers, with a refusal: the users of a server that was started again are those of its start."""
    try:
        user.ping()
        return False
    except (redis.exceptions.AuthenticationError, redis.exceptions.NoPermissionError):
        return True
    except redis.exceptions.ConnectionError:
        return False


def test_files_that_are_wrong_end_the_start(tmp_path: Path, authority: Authority) -> None:
    files = authority.issue("one")
    command = [sys.executable, "-m", "hedgerow.rpc.front", "127.0.0.1:0", tmp_path / "s", files.cert, files.key, "gone"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert "ca" in done.stderr
    assert "gone" in done.stderr
