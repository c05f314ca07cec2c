"""The compose file, started for real: one box serves, keeps its sessions over a restart, and ends without a trace."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from hedgerow.cli.ports import free_ports
from hedgerow.client import AsyncClient, Retry
from tests.polling import eventually
from tests.store_commands import documented
from tests.system.cluster import BASE, Cluster
from tests.system.prometheus import Prometheus
from tests.system.tools import ROOT, tool

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]
FILE = ROOT / "deploy" / "docker" / "compose.yaml"
SERVICES = ("redis", "kvstore", "drafter", "verifier", "gateway")
SECRETS = {"HEDGEROW_TENANT_SECRET": "plantedTenantSecret", "HEDGEROW_REDIS_PASSWORD": "plantedRedisPassword"}
# Where no registry of images is reached: the machine's own program, in an image that starts as the published one does.
WATCHED = {
    "jaeger": ("", "[]"),
    "prometheus": (
        "RUN mkdir /prometheus && chown 65534:65534 /prometheus",
        '["--config.file=/etc/prometheus/prometheus.yml", "--storage.tsdb.path=/prometheus"]',
    ),
}
STARTS, START_SECONDS = 5, 3.0
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
        self.watched = dict(zip(WATCHED, free_ports(len(WATCHED)), strict=True))
        ports = {f"HEDGEROW_{name.upper()}_PORT": str(each) for name, each in self.watched.items()}
        self.env |= {"HEDGEROW_PORT": str(port), "HEDGEROW_OTLP_ENDPOINT": "jaeger:4317"} | ports

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


def program(name: str, folder: Path) -> str:
    """The name of an image with a program of this machine. Skips the test where there is none."""
    prepared, words = WATCHED[name]
    folder.mkdir()
    shutil.copy(tool(name), folder / name)
    lines = [f"FROM {BASE}", f"COPY --chmod=755 {name} /opt/{name}", prepared, "USER 65534:65534"]
    (folder / "Dockerfile").write_text("\n".join([*lines, f'ENTRYPOINT ["/opt/{name}"]', f"CMD {words}", ""]))
    image = f"localhost/hedgerow-test-{name}:test"
    Cluster().run("build", "-q", "-f", str(folder / "Dockerfile"), "-t", image, str(folder), timeout=300)
    return image


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
    made.compose("--profile", "tools", "--profile", "observe", "config")
    made.env |= {"HEDGEROW_IMAGE": images.build("slim"), "HEDGEROW_ENGINE_IMAGE": images.build("cpu")}
    try:
        made.compose("up", "--detach", "--no-build", timeout=500)
        yield made
    finally:
        made.compose("--profile", "tools", "--profile", "observe", "down", "--volumes")
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

    word = "Ready to accept connections" if service == "redis" else '"event": "listening"'
    eventually(lambda: word in said(), 60, "its words, in JSON where they are Hedgerow's")
    arguments = box.run("top", container(box, service), "args")
    assert "services." in arguments or "valkey" in arguments
    shown = said() + arguments
    assert not [secret for secret in SECRETS.values() if secret in shown], shown


def test_the_stores_operator_does_what_the_pages_say(box: Box) -> None:
    for words in documented():
        if not words.startswith("--"):
            told = box.compose("exec", "-T", "redis", "hedgerow-store", *words.split())
            assert "ERR" not in told, words


async def test_the_profile_observe_watches_every_service(box: Box, tmp_path: Path) -> None:
    """Grafana is not started here: its image is not to be had, and test_compose_watched.py reads its files."""
    for name in WATCHED:
        box.env[f"HEDGEROW_{name.upper()}_IMAGE"] = program(name, tmp_path / name)
    box.compose("--profile", "observe", "up", "--detach", "--no-build", *WATCHED)
    prometheus = Prometheus(box.watched["prometheus"])

    def scraped() -> set[str]:
        with contextlib.suppress(OSError, AssertionError):  # it is starting
            return {each["metric"]["instance"] for each in prometheus.query('up{job="hedgerow"} == 1')}
        return set()

    def traced() -> set[str]:
        url = f"http://127.0.0.1:{box.watched['jaeger']}/api/services"
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=10) as answer:
            return set(json.load(answer)["data"] or ())
        return set()

    everything = set(SERVICES) - {"redis"}
    eventually(lambda: scraped() == {f"{name}:7413" for name in everything}, 60, "every service is scraped")
    rules = prometheus.ask("/api/v1/rules")["groups"]
    assert sum(len(group["rules"]) for group in rules) > 20
    async with AsyncClient(box.address, retry=PATIENT) as client:
        for turn in range(40):  # a drafter's spans are those of some steps
            await client.generate("import os", max_tokens=200, seed=turn, ignore_eos=True).result()
            if traced() >= {f"hedgerow-{name}" for name in everything - {"drafter"}}:
                break
    eventually(lambda: traced() >= {f"hedgerow-{name}" for name in everything - {"drafter"}}, 30, str(traced()))


def test_a_gateway_starts_in_three_seconds(box: Box) -> None:
    """In its image, with its peers there: from `podman start` to the line that says it serves. The median."""
    taken, name = [], container(box, "gateway")
    for _ in range(STARTS):
        box.run("stop", name)
        began = datetime.now(UTC)
        box.run("start", name)

        def served(began: datetime = began) -> datetime | None:
            lines = box.run("logs", "--timestamps", "--since", began.isoformat(), name).splitlines()
            times = [line.split()[0] for line in lines if " ready gateway " in line]
            return datetime.fromisoformat(times[-1]) if times else None

        eventually(lambda: served() is not None, 60, "the gateway serves")
        at = served()
        assert at is not None
        taken.append((at - began).total_seconds())
    print(f"a gateway serves after {sorted(taken)} s, median {statistics.median(taken):.2f} s")
    assert statistics.median(taken) <= START_SECONDS, taken


def test_every_container_ends_within_its_grace(box: Box) -> None:
    """SIGKILL would be 137."""
    for service in reversed(SERVICES):
        box.run("stop", container(box, service), timeout=120)
        told = json.loads(box.run("inspect", container(box, service)))[0]
        assert told["State"]["ExitCode"] == 0, service
