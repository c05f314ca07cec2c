"""The stack as processes: how fast they come up, what they load, what they refuse, what they leave behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from hedgerow.cli.supervisor import Stack, StackConfig
from hedgerow.errors import InvalidRequest, Unavailable
from tests.polling import eventually
from tests.stack import ROOT, START_SECONDS, Models, another_gateway


def test_the_stack_is_up_within_25_seconds(stack: Stack) -> None:
    assert START_SECONDS[0] <= 25


def test_a_gateway_is_ready_within_three_seconds(stack: Stack, models: Models) -> None:
    """With its peers there; the best of a few, because others may use this machine."""

    def seconds() -> float:
        began = time.monotonic()
        with another_gateway(stack, models):
            return time.monotonic() - began

    assert min(seconds() for _ in range(4)) <= 3


@pytest.mark.parametrize(("service", "has_torch"), [("gateway", 0), ("kvstore", 0), ("drafter", 1), ("verifier", 1)])
def test_only_the_engines_load_torch(stack: Stack, service: str, has_torch: int) -> None:
    maps = Path(f"/proc/{stack.pid(service)}/maps").read_text()
    assert ("libtorch" in maps) == bool(has_torch)


def test_the_drafter_is_a_process_of_its_own(stack: Stack) -> None:
    assert len({stack.pid(name) for name in (*stack.services, "redis")}) == 5


@pytest.mark.parametrize("service", ["kvstore", "drafter", "verifier", "gateway"])
def test_health_is_serving_on_both_ports(stack: Stack, service: str) -> None:
    for address in (stack.address(service), stack.admin_address(service)):
        assert health(address) == health_pb2.HealthCheckResponse.SERVING


def test_a_taken_port_is_said_before_anything_starts(models: Models, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        stack = Stack(StackConfig(ROOT, models.target, tmp_path, listen=listen))
        with pytest.raises(Unavailable, match=f"{listen} is unavailable: another process listens there"):
            stack.start()
    assert not psutil.Process().children(recursive=True) or not any(
        str(tmp_path) in " ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)
    )


def test_two_stacks_do_not_share_a_data_folder(stack: Stack, models: Models) -> None:
    with pytest.raises(Unavailable, match="another stack uses this folder"):
        Stack(StackConfig(ROOT, models.target, stack.config.data)).start()


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest) as refused:
        Stack(StackConfig(ROOT, tmp_path / "nothing", tmp_path)).start()
    assert refused.value.field == "model"


def test_a_broken_checkpoint_ends_the_start_with_its_file(tmp_path: Path, models: Models) -> None:
    broken = tmp_path / "model"
    broken.mkdir()
    for name in ("config.json", "tiktoken.model", "tokenizer_config.json"):
        (broken / name).write_bytes((models.target / name).read_bytes())
    stack = Stack(StackConfig(ROOT, broken, tmp_path / "data"))
    with pytest.raises(Unavailable) as failed:
        stack.start()
    assert "verifier is unavailable: ended with 1" in failed.value.message
    assert "safetensors" in failed.value.message
    assert not stack.services or not any(psutil.pid_exists(pid) for pid in pids_of(stack))


def test_up_serves_until_it_is_stopped_and_leaves_nothing(models: Models, tmp_path: Path) -> None:
    with up(models, tmp_path) as process:
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) == 4  # no drafter
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=30)
        assert process.returncode == 0
        assert output.rstrip().endswith("stopped")
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux'")
def test_up_that_is_killed_leaves_no_orphan(models: Models, tmp_path: Path) -> None:
    with up(models, tmp_path) as process:
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.wait()
        eventually(lambda: not any(is_alive(child) for child in children), 30, what="the end of all children")


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def pids_of(stack: Stack) -> list[int]:
    pids = []
    for name in stack.services:
        try:
            pids.append(stack.pid(name))
        except Unavailable:
            continue
    return pids


def health(address: str) -> int:
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return int(stub.Check(health_pb2.HealthCheckRequest(), timeout=5, wait_for_ready=True).status)


def up(models: Models, data: Path) -> subprocess.Popen[str]:
    """A `hedgerow up` without a drafter, once it says that it is up."""
    command = [
        sys.executable, "-m", "hedgerow.cli", "up", "--model", str(models.target), "--no-drafter",
        "--listen", "127.0.0.1:0", "--data", str(data),
    ]  # fmt: skip
    env = {**os.environ, "HEDGEROW_ADDRESS": "nowhere:1"}  # a user's own; services stop at variables they do not know
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("hedgerow is up"):
            return process
    raise AssertionError("it ended before it was up")
