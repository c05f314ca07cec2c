"""The bundled store's operator: every command of the runbooks, on real servers with the chart's users, and no more."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from hedgerow.cli.embedded_redis import find_binary
from tests.polling import eventually
from tests.redis_servers import SERVERS
from tests.store_commands import SCRIPT, Store, documented, store

NEEDED = {
    *("PING", "BGREWRITEAOF", "SLOWLOG GET 16", "MEMORY STATS", "INFO persistence", "INFO replication"),
    *("CONFIG SET maxmemory 3gb", "REPLICAOF NO ONE", "ACL LOAD", "ACL LIST", "--latency"),
}


@pytest.fixture(params=list(SERVERS))
def binary(request: pytest.FixtureRequest) -> Path:
    return SERVERS[request.param] or find_binary()


@pytest.fixture
def running(tmp_path: Path, binary: Path) -> Iterator[Store]:
    with store(tmp_path / "store", binary) as made:
        yield made


def kvstore(running: Store, password: str) -> redis.Redis:
    """A client with the kvstore's rights."""
    once = Retry(NoBackoff(), 0)
    return redis.Redis(port=running.port, username="hedgerow", password=password, retry=once)


def test_the_pages_have_the_commands_that_an_operator_needs() -> None:
    assert set(documented()) >= NEEDED, documented()


def test_every_command_of_the_pages_works_on_the_chart_s_users(running: Store) -> None:
    for words in documented():
        if not words.startswith("--"):
            assert "ERR" not in running.ask(words), words
    eventually(lambda: "aof_rewrite_in_progress:0" in running.ask("INFO persistence"), 20, "the rewrite")
    assert "aof_last_bgrewrite_status:ok" in running.ask("INFO persistence")
    assert running.ask("CONFIG GET maxmemory").split()[-1] == str(3 << 30)


def test_latency_is_measured(running: Store) -> None:
    """It measures until it is told to stop; into a pipe, for a second."""
    done = subprocess.run(
        ["sh", str(SCRIPT), "--latency"], env=running.env, capture_output=True, text=True, timeout=20, check=False
    )
    assert len(done.stdout.split()) >= 4, done.stdout + done.stderr


def test_the_operator_reads_no_key_and_makes_no_user(running: Store) -> None:
    key = "hedgerow:{x}:prompt"
    with kvstore(running, running.kvstore[0]) as client:
        client.set(key, "what a user wrote")
    for words in (
        f"GET {key}",
        "KEYS *",
        "SCAN 0",
        f"DEL {key}",
        "FLUSHALL",
        "ACL SETUSER x on",
        "SHUTDOWN",
        "MONITOR",
    ):
        assert "NOPERM" in running.ask(words, status=1), words
    assert "NOPERM" in running.ask(f"EVAL return(1) 1 {key}", status=1)


def test_its_password_is_in_no_argument(running: Store) -> None:
    process = subprocess.Popen(
        ["sh", str(SCRIPT)], env=running.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    command = Path(f"/proc/{process.pid}/cmdline")
    eventually(lambda: "redis-cli" in command.read_text(), 10, "redis-cli")
    assert running.operator not in command.read_text()
    assert process.communicate("PING\n", timeout=20)[0] == "PONG\n"


def test_a_wrong_password_is_said_so(running: Store) -> None:
    (running.folder / "operator").write_text("another")
    done = subprocess.run(["sh", str(SCRIPT), "PING"], env=running.env, capture_output=True, text=True, timeout=20)
    assert "WRONGPASS" in done.stdout + done.stderr


def test_a_password_changes_while_both_are_good(running: Store) -> None:
    old, new = running.kvstore[0], "second-password-of-kvstores"
    with kvstore(running, old) as before, kvstore(running, new) as after:
        assert before.ping()
        with pytest.raises(redis.exceptions.AuthenticationError):
            after.ping()
        running.kvstore = [new, old]
        running.write()
        running.ask("ACL LOAD")
        assert after.ping()
        assert before.ping(), "the kvstores that still run"
        with kvstore(running, old) as third:
            assert third.ping(), "one that has to connect anew"
        running.kvstore = [new]
        running.write()
        running.ask("ACL LOAD")
        assert after.ping()
        with kvstore(running, old) as late, pytest.raises(redis.exceptions.AuthenticationError):
            late.ping()


def test_a_store_moves_to_another_server_by_replication(running: Store, tmp_path: Path, binary: Path) -> None:
    """The lines of docs/operations.md: the old one's password goes over standard input."""
    with kvstore(running, running.kvstore[0]) as client:
        client.set("hedgerow:{x}:log", "tokens")
    with store(tmp_path / "other", binary) as other:
        lines = f"CONFIG SET masteruser operator\nCONFIG SET masterauth {running.operator}\n"
        other.ask(given=f"{lines}REPLICAOF 127.0.0.1 {running.port}\n")
        eventually(lambda: "master_link_status:up" in other.ask("INFO replication"), 30, "the link")
        eventually(lambda: "master_sync_in_progress:0" in other.ask("INFO replication"), 30, "the copy")
        other.ask("REPLICAOF NO ONE")
        with kvstore(other, other.kvstore[0]) as client:
            assert client.get("hedgerow:{x}:log") == b"tokens"
