"""SIGTERM to the end within the grace, whatever hangs; a second one ends at once; also as a container's process 1."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from hedgerow.cli.embedded_redis import EmbeddedRedis
from hedgerow.client import AsyncClient, Retry
from hedgerow.errors import HedgerowError
from hedgerow.rpc.channel import open_channel
from tests.echo_service import SERVICE
from tests.polling import eventually, soon
from tests.redis_groups import paused
from tests.redis_servers import ROOT, Service
from tests.stack import Models

GRACE = 3.0
BUSY = 10.0  # seconds that a busy machine may take to end a process that has ended
SERVICES = ("gateway", "verifier", "drafter", "kvstore")


@pytest.fixture
def deaf() -> Iterator[str]:
    """An address that takes connections and never says a word: a peer that hangs."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listening:
        yield f"127.0.0.1:{listening.getsockname()[1]}"


def settings(name: str, tiny: Models, deaf: str) -> dict[str, object]:
    """A service whose peers all hang."""
    of: Mapping[str, dict[str, object]] = {
        "gateway": {"verifier": deaf, "kvstore": f"{deaf},{deaf}", "model_path": tiny.target},
        "verifier": {"model_path": tiny.target, "model_name": "tiny", "threads": 1, "drafter": deaf},
        "drafter": {"model_path": tiny.drafter, "target_path": tiny.target, "threads": 1},
        "kvstore": {"redis_url": f"redis://{deaf}/0", "redis_timeout": 30},
    }
    return {**of[name], "grace": GRACE}


def ends(process: subprocess.Popen[str], within: float) -> int:
    """The status of a process that ends in time."""
    began = time.monotonic()
    status = process.wait(within + BUSY)
    assert time.monotonic() - began <= within + BUSY
    return status


@pytest.mark.parametrize("name", SERVICES)
def test_a_start_whose_peers_hang_ends_within_the_grace(name: str, tiny: Models, deaf: str) -> None:
    service = Service(f"services.{name}", **settings(name, tiny, deaf))
    try:
        service.bound()
        service.process.send_signal(signal.SIGTERM)
        assert ends(service.process, GRACE) == 0
    finally:
        service.stop()


@pytest.mark.parametrize("name", SERVICES)
def test_a_process_that_still_imports_ends_at_once(name: str, tiny: Models, deaf: str) -> None:
    service = Service(f"services.{name}", **settings(name, tiny, deaf))
    try:
        service.process.send_signal(signal.SIGTERM)
        assert ends(service.process, GRACE) in (0, -signal.SIGTERM)
    finally:
        service.stop()


@contextmanager
def serving(models: Models, folder: Path, grace: float = GRACE) -> Iterator[dict[str, Any]]:
    """A gateway, a verifier and a kvstore by their names, and "redis"."""
    with ExitStack() as stack:
        redis = stack.enter_context(EmbeddedRedis(folder / "redis"))
        made: dict[str, Any] = {"redis": redis}

        def start(name: str, **given: object) -> str:
            made[name] = Service(f"services.{name}", grace=grace, **given)
            stack.callback(made[name].stop)
            return f"127.0.0.1:{made[name].port}"

        kvstore = start("kvstore", redis_url=redis.url)
        drafter = start("drafter", model_path=models.drafter, target_path=models.target, threads=1)
        engine = {"model_path": models.target, "model_name": "it", "threads": 1, "drafter": drafter}
        verifier = start("verifier", **engine)
        start("gateway", verifier=verifier, kvstore=kvstore, model_path=models.target)
        yield made


@contextmanager
def hanging(process: Any) -> Iterator[None]:
    """Stopped: it keeps its connections and answers nothing."""
    if isinstance(process, EmbeddedRedis):
        with paused(process):
            yield
        return
    process.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.process.send_signal(signal.SIGCONT)


async def left(client: AsyncClient, began: asyncio.Event) -> str:
    """A stream that runs for long: how it ended."""
    try:
        async for _ in client.generate([1, 2, 3], max_tokens=3000, ignore_eos=True, budget=0, timeout=60):
            began.set()
    except HedgerowError as error:
        return error.reason
    return "it ended"


@pytest.mark.parametrize(
    ("name", "hang"),
    [
        ("gateway", "verifier"),
        pytest.param("gateway", "kvstore", marks=pytest.mark.long),
        ("kvstore", "redis"),
        ("verifier", "drafter"),
        pytest.param("drafter", "verifier", marks=pytest.mark.long),
    ],
)
async def test_with_a_stream_in_flight_and_a_peer_that_hangs(
    name: str, hang: str, models: Models, tmp_path: Path
) -> None:
    with serving(models, tmp_path) as made:
        async with AsyncClient(f"127.0.0.1:{made['gateway'].port}", retry=Retry.never()) as client:
            began = asyncio.Event()
            reading = asyncio.create_task(left(client, began))
            await asyncio.wait_for(began.wait(), 20)
            with hanging(made[hang]):
                made[name].process.send_signal(signal.SIGTERM)
                status = await asyncio.to_thread(ends, made[name].process, GRACE)
            assert status == 0, made[name].text[-2000:]
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)


@pytest.mark.parametrize(
    "name", ["gateway", "verifier", *(pytest.param(name, marks=pytest.mark.long) for name in ("drafter", "kvstore"))]
)
async def test_the_second_sigterm_ends_a_drain_at_once(name: str, models: Models, tmp_path: Path) -> None:
    with serving(models, tmp_path, grace=30) as made:
        async with AsyncClient(f"127.0.0.1:{made['gateway'].port}", retry=Retry.never()) as client:
            began = asyncio.Event()
            reading = asyncio.create_task(left(client, began))
            await asyncio.wait_for(began.wait(), 20)
            if name == "kvstore":  # its own drain is short; a Redis that hangs makes it long
                os.kill(made["redis"].pid, signal.SIGSTOP)
            if name == "drafter":  # a verifier that hangs keeps its stream open
                made["verifier"].process.send_signal(signal.SIGSTOP)
            process = made[name].process
            process.send_signal(signal.SIGTERM)
            await soon(lambda: "event=draining" in made[name].text or process.poll() is not None)
            process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(ends, process, 0.0) in (-signal.SIGTERM, 0)
            os.kill(made["redis"].pid, signal.SIGCONT)
            made["verifier"].process.send_signal(signal.SIGCONT)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)


@pytest.mark.parametrize("order", [b"stubborn", b"block"])
async def test_a_handler_that_ignores_its_end_and_a_loop_that_hangs_do_not_keep_the_process(
    order: bytes, tmp_path: Path
) -> None:
    (tmp_path / "ready").touch()
    service = Service("tests.echo_service", ready_file=tmp_path / "ready", grace=1)
    try:
        async with open_channel(f"127.0.0.1:{service.port}") as channel:
            call = channel.unary_unary(f"/{SERVICE}/UnaryUnary")(order)
            await soon(lambda: "arrived" in service.text)
            service.process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(ends, service.process, 1.0) == -signal.SIGALRM
            call.cancel()
    finally:
        service.stop()


@pytest.fixture
def alone() -> Callable[..., subprocess.Popen[str]]:
    """Starts a command as process 1 of a PID namespace, as a container's is."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-pf", "true"], capture_output=True).returncode:
        pytest.skip("unshare may not make a PID namespace here")

    def start(module: str, **given: object) -> subprocess.Popen[str]:
        env = {f"HEDGEROW_{key.upper()}": str(value) for key, value in given.items()}
        command = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-m", module]
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("HEDGEROW_")}
        return subprocess.Popen(
            command, cwd=ROOT, env=inherited | env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    return start


def first_child(process: subprocess.Popen[str]) -> int:
    """The process that `unshare` made, by its number here."""
    path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    eventually(lambda: path.read_text().split(), 10, "a child")
    return int(path.read_text().split()[0])


async def takes_calls(port: int) -> bool:
    async with open_channel(f"127.0.0.1:{port}") as channel:
        try:
            await channel.unary_unary(f"/{SERVICE}/UnaryUnary")(b"x", timeout=5)
        except grpc.aio.AioRpcError:
            return False
        return True


async def test_as_process_one_signals_count_at_the_start_and_a_second_one_ends_at_once(
    alone: Callable[..., subprocess.Popen[str]], tiny: Models, deaf: str, tmp_path: Path
) -> None:
    """The kernel ignores what process 1 of a container leaves to its default action."""
    verifier = alone("services.verifier", **settings("verifier", tiny, deaf))
    try:
        inner = first_child(verifier)
        caught = Path(f"/proc/{inner}/status")

        def sigterm_is_caught() -> bool:
            (mask,) = [line.split()[1] for line in caught.read_text().splitlines() if line.startswith("SigCgt")]
            return bool(int(mask, 16) & 1 << (signal.SIGTERM - 1))

        eventually(sigterm_is_caught, 10, "a handler, before torch is loaded")
        os.kill(inner, signal.SIGTERM)
        assert ends(verifier, GRACE) in (0, signal.SIGTERM)
    finally:
        verifier.kill()
        verifier.communicate()
    (tmp_path / "ready").touch()
    echo = alone("tests.echo_service", ready_file=tmp_path / "ready", grace=30)
    try:
        assert echo.stdout is not None
        port = int((await asyncio.to_thread(echo.stdout.readline)).split()[2])
        async with open_channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_unary(f"/{SERVICE}/UnaryUnary")(b"wait 60")
            await channel.unary_unary(f"/{SERVICE}/UnaryUnary")(b"x")
            inner = first_child(echo)
            os.kill(inner, signal.SIGTERM)
            while await takes_calls(port):
                assert echo.poll() is None
            os.kill(inner, signal.SIGTERM)
            assert await asyncio.to_thread(ends, echo, 0.0) == signal.SIGTERM
            call.cancel()
    finally:
        echo.kill()
        echo.communicate()
