"""docs/systemd.md from an empty Debian machine to a served completion, word for word, on a systemd that is process 1.

The machine is a privileged container of podman's. What is done for it beforehand: systemd itself, and this checkout in
place of the repository's address. Slow: it installs packages. test_systemd.py of tests/integration has the quick part.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hedgerow.client import AsyncClient
from tests.polling import eventually, soon
from tests.store_commands import documented
from tests.system.cluster import BASE, Cluster
from tests.system.streams import Clients
from tests.system.tools import ROOT, tool

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(1200)]
GUIDE = ROOT / "docs" / "systemd.md"
GATEWAYS = "127.0.0.1:7411,127.0.0.1:7421"  # the guide's
UNITS = ("hedgerow-kvstore", "hedgerow-drafter", "hedgerow-verifier", "hedgerow-gateway@1", "hedgerow-gateway@2")
CLONE = "git clone <this repository> /opt/hedgerow"


def guide() -> tuple[str, str]:
    """The packages' line, and the lines after it."""
    found = re.search(r"## From an empty machine\n\n```\n(.*?)```", GUIDE.read_text(), re.S)
    assert found is not None
    packages, _, rest = found[1].partition("\n")
    assert packages.startswith("apt-get update")
    assert CLONE in rest
    return packages.partition("#")[0], rest.replace(CLONE, "git clone -q /checkout /opt/hedgerow")


class Machine:
    """The container."""

    def __init__(self, folder: Path) -> None:
        self.podman, self.name = tool("podman"), f"hedgerow-systemd-{os.getpid()}"
        config = folder / "containers.conf"  # podman asks for a million files, which not every machine gives
        config.write_text('[containers]\ndefault_ulimits = ["nofile=4096:4096","nproc=4096:4096"]\n')
        self.env = {**os.environ, "CONTAINERS_CONF": str(config)}

    def run(self, *words: str, timeout: float = 60) -> str:
        """`podman WORDS`: its standard output. Raises AssertionError with all of it."""
        done = subprocess.run(
            [self.podman, *words], env=self.env, capture_output=True, text=True, errors="replace", timeout=timeout,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"podman {words}: {done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    def shell(self, text: str, timeout: float = 120) -> str:
        """In the machine, as root."""
        return self.run("exec", self.name, "bash", "-euo", "pipefail", "-c", text, timeout=timeout)

    def booted(self) -> bool:
        done = subprocess.run(
            [self.podman, "exec", self.name, "systemctl", "is-system-running", "--wait"],
            env=self.env, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        return done.stdout.strip() == "running"


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """Booted, with the guide's packages."""
    folder = tmp_path_factory.mktemp("systemd")
    made, packages, image = Machine(folder), guide()[0], "localhost/hedgerow-systemd:test"
    lab = Cluster()
    quiet, system = "export DEBIAN_FRONTEND=noninteractive", "systemd systemd-sysv dbus"
    (folder / "Dockerfile").write_text(
        f"FROM {BASE}\nRUN {quiet} && apt-get update -qq && apt-get install -y -qq {system} >/dev/null\n"
        f"RUN {quiet} && {packages} >/dev/null\n"
    )
    lab.run("base-image", timeout=300)
    lab.run("build", "-q", "-f", str(folder / "Dockerfile"), "-t", image, str(folder), timeout=900)
    wheels = os.environ.get("PIP_FIND_LINKS", "")
    pip = folder / "pip.conf"
    pip.write_text(
        "[global]\ncert = /etc/ssl/certs/ca-certificates.crt\n" + (f"find-links = {wheels}\n" if wheels else "")
    )
    mounts = [f"{ROOT}:/checkout:ro", "/etc/ssl/certs:/etc/ssl/certs:ro", f"{pip}:/etc/pip.conf:ro"]
    mounts += [f"{wheels}:{wheels}:ro"] if wheels else []
    words = [word for mount in mounts for word in ("--volume", mount)]
    try:
        made.run(
            "run", "--detach", "--name", made.name, "--systemd=always", "--privileged", "--network=host", *words, image,
            "/lib/systemd/systemd",
        )  # fmt: skip
        eventually(made.booted, 60, "systemd")
        yield made
    finally:
        made.run("rm", "--force", "--time", "20", "--ignore", made.name, timeout=180)


async def test_the_guide_serves_and_restarts_keep_streams(machine: Machine) -> None:
    machine.shell("git config --global --add safe.directory '*'")
    told = machine.shell(guide()[1], timeout=900)
    assert told.count(" serving ") == len(UNITS), told
    assert len(told.splitlines()[-1]) > 2, "a completion"
    async with AsyncClient(GATEWAYS) as client:
        clients = Clients(GATEWAYS, 160)
        first = await asyncio.gather(*(clients.answer(client, number) for number in range(16)))
        clients.first.update(enumerate(first))
        running = [asyncio.create_task(clients.repeat(client, number)) for number in range(16)]
        for unit in UNITS:
            done = clients.done
            await asyncio.to_thread(machine.shell, f"systemctl restart {unit}")
            await soon(lambda done=done: clients.done >= done + 16, 90, f"answers after {unit}")  # type: ignore[misc]
        clients.stopping.set()
        await asyncio.gather(*running)
    print(f"{clients.done} answers, longest pause {clients.longest:.2f} s")
    assert (clients.errors, clients.wrong, len(clients.fingerprints)) == ([], 0, 1)


def test_the_stores_operator_does_what_the_pages_say(machine: Machine) -> None:
    for words in documented():
        if not words.startswith("--"):
            assert "ERR" not in machine.shell(f"hedgerow-store {words}"), words
    assert machine.shell("stat -c %a /etc/redis/hedgerow.operator").strip() == "600"


def test_a_second_sigterm_ends_a_unit_at_once_and_it_is_started_again(machine: Machine) -> None:
    before = machine.shell("systemctl show -P MainPID hedgerow-gateway@1").strip()
    machine.shell("systemctl kill hedgerow-gateway@1; systemctl kill hedgerow-gateway@1 || true")
    eventually(
        lambda: machine.shell("systemctl show -P MainPID hedgerow-gateway@1").strip() not in ("0", before), 20, "again"
    )


def test_the_target_stops_all_within_their_graces(machine: Machine) -> None:
    began = time.monotonic()
    machine.shell("systemctl stop hedgerow.target")
    assert time.monotonic() - began < 40

    def states() -> list[str]:
        return machine.shell(f"systemctl show -P ActiveState {' '.join(UNITS)}").split()

    # The target's job may be over before those of its units.
    eventually(lambda: states() == ["inactive"] * len(UNITS), 40, "the end of every unit")
    assert machine.shell("systemctl --failed --plain --no-legend").strip() == ""


async def test_a_machine_that_boots_again_serves(machine: Machine) -> None:
    machine.run("restart", "--time", "60", machine.name, timeout=120)
    eventually(machine.booted, 120, "systemd")
    machine.shell("/opt/hedgerow/.venv/bin/hedgerow status 127.0.0.1:7412 127.0.0.1:7432 127.0.0.1:7452")
    async with AsyncClient(GATEWAYS) as client:
        assert len((await client.complete("import os", max_tokens=8, ignore_eos=True)).tokens) == 8


def test_no_secret_is_in_the_journal_or_in_arguments(machine: Machine) -> None:
    secrets = re.findall(r"[0-9a-f]{64}", machine.shell("cat /etc/hedgerow/*.secret.env /etc/redis/hedgerow.operator"))
    assert len(secrets) == 3
    shown = machine.shell("journalctl --no-pager -u 'hedgerow-*'; cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
    assert "hedgerow" in shown
    assert not [secret for secret in secrets if secret in shown]
