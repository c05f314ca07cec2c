"""The process that answers health in another one's place: beats, their absence, its keeper, its end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from hedgerow.certificates import Tls
from hedgerow.cli.ports import free_ports, parse_address
from hedgerow.rpc import health_keeper, probe
from hedgerow.rpc.config import ConfigError
from hedgerow.rpc.health import LIVE, Health
from hedgerow.rpc.health_keeper import Keeper, spec_of
from hedgerow.rpc.health_process import BEAT, MOST_LINE, SILENT, Beat, Lines, Pulse, Spec
from hedgerow.rpc.server import ServerConfig
from tests.certificates import Authority
from tests.polling import eventually, soon

ROOT = Path(__file__).resolve().parents[2]


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def made() -> tuple[Health, Pulse, Clock]:
    """Health of a process that serves as far as itself is concerned, and its pulse."""
    clock, health = Clock(), Health(["a.Service"])
    health.report("starting", None)
    return health, Pulse(health, clock=clock), clock


def test_a_process_that_stops_beating_is_out_of_service_within_ten_seconds_and_comes_back() -> None:
    health, pulse, clock = made()
    pulse.beat(Beat(clock.now, ""))
    assert health.serving
    assert pulse.alive
    clock.now += SILENT - 0.01
    pulse.look()
    assert health.serving
    clock.now += 0.02
    pulse.look()
    assert clock.now < 110
    assert not health.serving
    assert not pulse.alive
    pulse.beat(Beat(clock.now, ""))
    assert health.serving
    assert pulse.alive


def test_it_says_what_the_process_says() -> None:
    health, pulse, clock = made()
    pulse.beat(Beat(clock.now, "engine: a step has taken 8 s"))
    assert health.troubles == {"process": "engine: a step has taken 8 s"}
    assert pulse.alive, "what is in trouble is not to be ended for it"
    pulse.beat(Beat(clock.now, "engine: a step has taken 9 s", alive=False))
    assert not pulse.alive
    pulse.beat(Beat(clock.now, ""))
    assert health.serving
    assert pulse.alive


def test_beats_that_were_written_long_before_they_are_read_are_no_sign_of_life() -> None:
    """Both were stopped, and this one goes on: a second's worth of beats is waiting."""
    health, pulse, clock = made()
    clock.now += 60
    for late in (50.0, 49.5, 48.0):
        pulse.beat(Beat(clock.now - late, ""))
        assert not health.serving
        assert not pulse.alive
    pulse.beat(Beat(clock.now + 1000, ""))  # no clock of ours is ahead
    clock.now += SILENT + 1
    pulse.look()
    assert not health.serving


def test_a_beat_is_one_short_line_whatever_the_reason() -> None:
    long = Beat(123456.789012345, "\U0001f600" * 5000, alive=False)
    assert len(long.pack()) <= MOST_LINE
    lines, data = Lines(), Beat(1.5, "a\nb").pack() + long.pack()
    found = [beat for at in range(len(data)) for beat in lines.read(data[at : at + 1])]
    assert found == [Beat(1.5, "a\nb"), long._replace(why=long.why[:320])]
    with pytest.raises(ValueError, match="a line of more than 4096 bytes"):
        lines.read(b"x" * (MOST_LINE + 1))


async def test_the_health_service_asks_whether_something_hangs() -> None:
    health = Health(["a.Service"])
    health.start()
    assert health._status(LIVE) == health_pb2.HealthCheckResponse.SERVING
    health.alive = lambda: False
    assert health._status(LIVE) == health_pb2.HealthCheckResponse.NOT_SERVING
    assert health._status("") == health_pb2.HealthCheckResponse.SERVING
    await health.stop()


def config(**more: object) -> ServerConfig:
    return ServerConfig(**more)  # type: ignore[arg-type]


@asynccontextmanager
async def kept(health: Health, listen: str, **more: object) -> AsyncIterator[Keeper]:
    """A keeper whose process answers."""
    keeper = Keeper(spec_of("test", listen, config(**more), health), health)
    running = asyncio.create_task(keeper.run())
    try:
        await soon(lambda: health.serving or running.done(), 60, "a process that answers")
        yield keeper
        assert not running.done()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def address() -> str:
    return f"127.0.0.1:{next(free_ports(1))}"


async def status(listen: str, tls: Tls | None = None) -> str:
    try:
        return await asyncio.to_thread(probe.ask, listen, 10, tls)
    except grpc.RpcError as error:
        return str(error.code().name)


async def becomes(listen: str, wanted: str, seconds: float = 30) -> None:
    """Asks until it says that."""
    async with asyncio.timeout(seconds):
        while await status(listen) != wanted:  # noqa: ASYNC110  the event is in another process
            await asyncio.sleep(0.02)


async def test_it_answers_by_the_names_of_the_process_and_follows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    listen, health = address(), Health(["a.Service"])
    health.report("starting", None)
    async with kept(health, listen) as keeper, grpc.aio.insecure_channel(listen) as channel:
        assert keeper.process is not None
        await becomes(listen, "SERVING")
        check = health_pb2_grpc.HealthStub(channel).Check
        for name in ("", "a.Service", LIVE):
            answer = await check(health_pb2.HealthCheckRequest(service=name), timeout=10)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING, name
        with pytest.raises(grpc.aio.AioRpcError, match="NOT_FOUND"):
            await check(health_pb2.HealthCheckRequest(service="b.Service"), timeout=10)
        health.report("engine", "loading the model")
        await becomes(listen, "NOT_SERVING")
        assert await asyncio.to_thread(probe.main, [listen, "--live"]) == 0
        monkeypatch.setattr(health, "alive", lambda: False)
        async with asyncio.timeout(30):
            while await asyncio.to_thread(probe.main, [listen, "--live"]) == 0:  # noqa: ASYNC110  as above
                await asyncio.sleep(0.02)
        health.report("engine", None)
        await becomes(listen, "SERVING")
        health.drain()
        await becomes(listen, "NOT_SERVING")
        pid = keeper.process.pid
    assert not psutil.pid_exists(pid)


async def test_one_that_ends_is_started_anew_and_one_that_hangs_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_keeper, "FIRST_DELAY", 0.01)
    tries, real = [0], health_keeper.start

    def start(spec: Spec) -> subprocess.Popen[bytes]:
        tries[0] += 1
        if tries[0] == 2:
            raise OSError("no process is to be had")
        process = real(spec)
        process.send_signal(signal.SIGTERM)  # before it can say that it ignores that
        return process

    monkeypatch.setattr(health_keeper, "start", start)
    listen, health = address(), Health([])
    health.report("starting", None)
    async with kept(health, listen) as keeper:
        first = keeper.process
        assert first is not None
        await becomes(listen, "SERVING")
        first.send_signal(signal.SIGTERM)  # as everything of a unit or a terminal may get it: it stays
        first.send_signal(signal.SIGINT)
        await becomes(listen, "SERVING")
        assert first.poll() is None
        first.kill()
        await soon(lambda: keeper.process is not first, 60, "another process")
        await becomes(listen, "SERVING")
        assert health.serving, "that nobody answers for a moment does not end a service"
        monkeypatch.setattr(health_keeper, "SILENT", 0.2)
        monkeypatch.setattr(health_keeper, "BEAT", 0.001)
        second = keeper.process
        assert second is not None
        second.send_signal(signal.SIGSTOP)
        await soon(lambda: keeper.process is not second, 60, "another process than the stopped one")
        monkeypatch.setattr(health_keeper, "SILENT", SILENT)
        monkeypatch.setattr(health_keeper, "BEAT", BEAT)
        assert second.poll() == -signal.SIGKILL
        await becomes(listen, "SERVING")
        assert tries[0] >= 4, "the first, one that could not be started, and one each time"


async def test_a_port_that_is_taken_is_refused_by_name() -> None:
    listen, health = address(), Health([])
    health.report("starting", None)
    keeper = Keeper(spec_of("test", listen, config(), health), health)
    assert health.troubles == {"health process": "it is starting"}, "who is ready can be asked"
    taken = r"HEDGEROW_HEALTH_LISTEN: '127.0.0.1:\d+' is not allowed: cannot listen"
    with socket.create_server(parse_address(listen)), pytest.raises(ConfigError, match=taken):
        await keeper.run()


async def test_it_speaks_tls_where_the_admin_port_does(tmp_path: Path) -> None:
    files, listen, health = Authority(tmp_path).issue("service"), address(), Health([])
    health.report("starting", None)
    tls = Tls(files.ca, files.cert, files.key)
    async with kept(health, listen, **files.settings()):
        async with asyncio.timeout(30):
            while await status(listen, tls) != "SERVING":  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert await status(listen, Tls(files.ca)) == "UNAVAILABLE"
        assert await status(listen) == "UNAVAILABLE"
    plain = spec_of("test", listen, config(**files.settings(), tls_admin=False), health)
    assert plain.tls is None


PARENT = """
import json, sys, time
from hedgerow.rpc.health_keeper import start
from hedgerow.rpc.health_process import Beat, Spec
import os
process = start(Spec(sys.argv[1], [], None, os.getpid(), ["test", "info", "text"]))
print(process.pid, process.stdout.readline().decode(), flush=True)
while True:
    os.write(process.stdin.fileno(), Beat(time.monotonic(), "").pack())
    time.sleep(0.5)
"""


@pytest.mark.parametrize("stopped", [False, True])
def test_it_ends_with_the_process_that_started_it(stopped: bool) -> None:
    listen = address()
    parent = subprocess.Popen([sys.executable, "-c", PARENT, listen], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    try:
        pid, kind, port = parent.stdout.readline().split()
        assert (kind, f"127.0.0.1:{port}") == ("ready", listen)
        eventually(lambda: probe.ask(listen) == "SERVING", 30, "SERVING")
        if stopped:
            os.kill(int(pid), signal.SIGSTOP)
        parent.kill()
        parent.wait(10)
        eventually(lambda: not running(int(pid)), 10, "its end")
    finally:
        parent.kill()
        parent.stdout.close()
        parent.wait(10)


def running(pid: int) -> bool:
    """A zombie that nobody has waited for has ended."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_one_whose_parent_has_gone_before_it_looked_does_not_stay() -> None:
    spec = Spec(address(), [], None, 0, ["test", "info", "text"])  # nobody here is the child of 0
    command = [sys.executable, "-m", "hedgerow.rpc.health_process", json.dumps(spec)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        try:
            assert child.stdout.read() == b"", "neither ready nor failed"
            assert child.wait(60) == 1
        finally:
            child.kill()
