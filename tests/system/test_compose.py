"""The compose file, started for real: one box serves, keeps its sessions over a restart, and ends without a trace."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hedgerow.cli.ports import free_ports
from hedgerow.client import AsyncClient, Retry
from tests.polling import eventually
from tests.system.cluster import Cluster
from tests.system.tools import ROOT, tool

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]
FILE = ROOT / "deploy" / "docker" / "compose.yaml"
SERVICES = ("redis", "kvstore", "drafter", "verifier", "gateway")
SECRETS = {"HEDGEROW_TENANT_SECRET": "plantedTenantSecret", "HEDGEROW_REDIS_PASSWORD": "plantedRedisPassword"}
PATIENT = Retry(attempts=100, last_delay=1.0)


class Box:
    """The project of one test run."""

    def __init__(self, folder: Path) -> None:
        self.podman, self.name = tool("podman"), f"hedgerow-test-{os.getpid()}"
        port = next(free_ports(1))
        self.address = f"127.0.0.1:{port}"
        config = folder / "containers.conf"  # podman asks for a million files, which not every machine gives
        config.write_text('[containers]\ndefault_ulimits = ["nofile=4096:4096","nproc=4096:4096"]\n')
        self.env = {**os.environ, **SECRETS, "CONTAINERS_CONF": str(config), "COMPOSE_PROJECT_NAME": self.name}
        self.env |= {"HEDGEROW_PORT": str(port)}

    def compose(self, *words: str, timeout: float = 300) -> str:
        """Its standard output. Raises AssertionError with all of it."""
        command = [sys.executable, "-m", "podman_compose", "--file", str(FILE), *words]
        return self._run(command, timeout)

    def run(self, *words: str, timeout: float = 120) -> str:
        """`podman WORDS`."""
        return self._run([self.podman, *words], timeout)

    def _run(self, command: list[str], timeout: float) -> str:
        done = subprocess.run(
            command, env=self.env, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        return done.stdout


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    """It is up."""
    made = Box(tmp_path_factory.mktemp("box"))
    if importlib.util.find_spec("podman_compose") is None:
        pytest.skip("podman-compose is not installed")
    made.run("network", "create", f"{made.name}-probe")
    network = json.loads(made.run("network", "inspect", f"{made.name}-probe"))[0]
    made.run("network", "rm", f"{made.name}-probe")
    if not network["dns_enabled"]:
        pytest.skip("podman's dnsname is not installed: containers would not know each other's names")
    images = Cluster()
    made.env |= {"HEDGEROW_IMAGE": images.build("slim"), "HEDGEROW_ENGINE_IMAGE": images.build("cpu")}
    try:
        made.compose("up", "--detach", "--no-build", timeout=500)
        yield made
    finally:
        made.compose("--profile", "tools", "down", "--volumes")
        assert not made.run("ps", "--all", "--quiet", "--filter", f"name={made.name}")


def container(box: Box, service: str) -> str:
    return f"{box.name}_{service}_1"


async def test_one_box_serves_and_keeps_its_sessions(box: Box) -> None:
    async with AsyncClient(box.address, retry=PATIENT) as client:
        stream = client.generate("def read_config(path):", max_tokens=600, seed=3, ignore_eos=True)
        whole = await stream.result()
        assert len(whole.tokens) == 600
        again, tokens = client.generate("def read_config(path):", max_tokens=600, seed=3, ignore_eos=True), []
        async for chunk in again:
            if not tokens:
                box.run("restart", container(box, "redis"), container(box, "gateway"), timeout=180)
            tokens += chunk.tokens
        assert tuple(tokens) == whole.tokens
        stored = await client.get_session(whole.session_id)
        assert stored.token_count == 600


def test_the_command_line_of_the_image_generates(box: Box) -> None:
    words = ["--profile", "tools", "run", "--rm", "cli", "generate", "import os", "--max-tokens", "8"]
    told = box.compose(*words, "--address", "gateway:7411")
    assert told.strip()


@pytest.mark.parametrize("service", SERVICES)
def test_a_container_is_closed_and_healthy(box: Box, service: str) -> None:
    told = json.loads(box.run("inspect", container(box, service)))[0]
    assert told["HostConfig"]["ReadonlyRootfs"]
    assert told["Config"]["User"] == "10001:10001"
    assert not told["EffectiveCaps"]
    words = ["-c", "import socket; socket.create_connection(('127.0.0.1', 6379), 3)"]
    if service != "redis":
        words = ["-m", "hedgerow.rpc.probe", "127.0.0.1:7412"]
    eventually(lambda: box.run("exec", container(box, service), "python3", *words) is not None, 30)


@pytest.mark.parametrize("service", SERVICES)
def test_no_secret_is_in_logs_or_arguments(box: Box, service: str) -> None:
    def said() -> str:
        command = [box.podman, "logs", container(box, service)]
        return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True).stdout

    eventually(lambda: "event=listening" in said() or "Ready to accept connections" in said(), 60, "its words")
    arguments = box.run("top", container(box, service), "args")
    assert "services." in arguments or "valkey" in arguments
    shown = said() + arguments
    assert not [secret for secret in SECRETS.values() if secret in shown], shown


def test_every_container_ends_within_its_grace(box: Box) -> None:
    """SIGKILL would be 137."""
    for service in reversed(SERVICES):
        box.run("stop", container(box, service), timeout=120)
        told = json.loads(box.run("inspect", container(box, service)))[0]
        assert told["State"]["ExitCode"] == 0, service
