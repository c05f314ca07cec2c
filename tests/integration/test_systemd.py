"""The systemd units: sound, closed, with settings that exist; and started as they say, they serve."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from hedgerow.cli.embedded_redis import EmbeddedRedis
from hedgerow.cli.ports import free_ports
from hedgerow.client import AsyncClient
from hedgerow.rpc.config import from_env
from services.drafter.config import DrafterServiceConfig
from services.gateway.config import GatewayConfig
from services.kvstore.config import KvStoreConfig
from services.verifier.config import VerifierServiceConfig
from tests.redis_servers import ROOT
from tests.stack import Models

UNITS = ROOT / "deploy" / "systemd"
CONFIGS: Mapping[str, type[object]] = {
    "kvstore": KvStoreConfig,
    "drafter": DrafterServiceConfig,
    "verifier": VerifierServiceConfig,
    "gateway@1": GatewayConfig,
    "gateway@2": GatewayConfig,
}
MOST_EXPOSED = 2.5  # of 10, by `systemd-analyze security`


class Unit:
    """One unit file, for an instance."""

    def __init__(self, name: str) -> None:
        self.name, at, self.instance = name.partition("@")
        self.path = UNITS / f"hedgerow-{self.name}{at}.service"
        lines = [line for line in self.path.read_text().splitlines() if "=" in line and not line.startswith("#")]
        self.pairs = [(key, value) for key, _, value in (line.partition("=") for line in lines)]

    def all(self, key: str) -> list[str]:
        """Every value of a key."""
        return [value.replace("%i", self.instance) for found, value in self.pairs if found == key]

    def one(self, key: str) -> str:
        """The value of a key that is there once."""
        (value,) = self.all(key)
        return value

    def environment(self, *, with_comments: bool = False) -> dict[str, str]:
        """What systemd would set; `with_comments`: what is offered too."""
        found: dict[str, str] = {}
        for file in self.all("EnvironmentFile"):
            for line in (UNITS / "env" / Path(file).name).read_text().splitlines():
                if with_comments and re.match(r"#HEDGEROW_\w+=", line):
                    line = line[1:]
                if line and not line.startswith("#"):
                    key, equals, value = line.partition("=")
                    assert equals, f"{file}: {line}"
                    found[key] = value
        return found


@pytest.mark.parametrize("name", CONFIGS)
def test_every_variable_is_one_of_the_service_with_a_value_that_it_takes(name: str) -> None:
    for with_comments in (False, True):
        from_env(CONFIGS[name], Unit(name).environment(with_comments=with_comments))


@pytest.mark.parametrize("name", CONFIGS)
def test_there_is_time_to_start_and_to_drain(name: str) -> None:
    unit = Unit(name)
    assert float(unit.one("TimeoutStopSec")) >= float(unit.environment()["HEDGEROW_GRACE"]) + 10
    waits = float(re.search(r"--wait (\d+)", unit.one("ExecStartPost"))[1])  # type: ignore[index]
    assert float(unit.one("TimeoutStartSec")) > waits
    assert unit.one("ExecStartPost").startswith("-"), "a service that waits for a peer must not be ended for it"


def test_secrets_have_files_of_their_own() -> None:
    secret = {
        line.partition("=")[0] for path in UNITS.glob("env/*.secret.env") for line in path.read_text().splitlines()
    }
    assert secret == {"HEDGEROW_TENANT_SECRET", "HEDGEROW_REDIS_URL"}
    for path in UNITS.glob("env/*.env"):
        assert path.name.endswith(".secret.env") or not any(name in path.read_text() for name in secret), path


@pytest.mark.parametrize("name", CONFIGS)
def test_systemd_finds_nothing_wrong_and_little_exposed(name: str, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    for path in (*UNITS.glob("*.service"), *UNITS.glob("*.target")):
        text = (
            path.read_text()
            .replace("/opt/hedgerow/.venv/bin/python", sys.executable)
            .replace("/opt/hedgerow", str(ROOT))
        )
        copy = tmp_path / (path.name.replace("@", f"@{name[-1]}") if "@" in name else path.name)
        copy.write_text(text)
    unit = f"./hedgerow-{name}.service"
    command = ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", unit]
    paths = {"SYSTEMD_UNIT_PATH": f"{tmp_path}:", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, cwd=tmp_path, env=paths, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    command = ["systemd-analyze", "security", "--offline=true", f"--threshold={MOST_EXPOSED * 10:.0f}", unit]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-300:] + done.stderr


@pytest.mark.parametrize("name", CONFIGS)
def test_a_unit_has_the_sockets_that_it_needs_and_no_others(name: str) -> None:
    """Ranks of a verifier list the host's interfaces, which is netlink's: tensor parallelism fails without it."""
    needed = {"AF_INET", "AF_INET6", "AF_UNIX"} | ({"AF_NETLINK"} if name == "verifier" else set())
    assert set(Unit(name).one("RestrictAddressFamilies").split()) == needed


@pytest.mark.parametrize("name", ["verifier", "drafter"])
def test_a_unit_that_may_have_a_gpu_sees_it_and_may_compile_for_it(name: str) -> None:
    """CUDA opens /dev/nvidia*, and Triton and CUDA's own compiler make code at run time, from files below /tmp."""
    unit = Unit(name)
    assert unit.one("PrivateDevices") == "no"
    closed = {"MemoryDenyWriteExecute", "NoExecPaths", "DevicePolicy", "DeviceAllow", "TemporaryFileSystem"}
    closed.add("ProtectClock")  # implies DeviceAllow=char-rtc, and so no other device
    assert not closed & {key for key, _ in unit.pairs}
    assert (unit.one("CapabilityBoundingSet"), unit.one("SystemCallFilter")) == ("", "@system-service"), "no clock set"


@pytest.fixture
def gateways(models: Models, tmp_path: Path) -> Iterator[str]:
    """The addresses of both, all units started as systemd would, on ports that are free here."""
    with ExitStack() as stack:
        redis = stack.enter_context(EmbeddedRedis(tmp_path / "redis"))
        ports: dict[str, str] = {}
        fresh = free_ports(40)

        def here(text: str) -> str:
            text = re.sub(r"127\.0\.0\.1:74\d\d", lambda m: ports.setdefault(m[0], f"127.0.0.1:{next(fresh)}"), text)
            text = text.replace("/opt/hedgerow/models/sapling-dflash", str(models.drafter))
            text = text.replace("/opt/hedgerow/models/sapling", str(models.target)).replace("<secret>", "of a test")
            text = text.replace("/opt/hedgerow/.venv/bin/python", sys.executable)
            return re.sub(r"redis://hedgerow:<password>@127.0.0.1:6379/0", redis.url, text)

        addresses = []
        for name in CONFIGS:
            unit = Unit(name)
            env = {"PATH": "/usr/bin:/bin", **dict(pair.split("=", 1) for pair in unit.one("Environment").split())}
            env |= {key: here(value) for key, value in unit.environment().items()}
            log = stack.enter_context((tmp_path / f"{name}.log").open("w"))
            process = subprocess.Popen(
                here(unit.one("ExecStart")).split(), cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT
            )
            stack.callback(process.wait, 20)
            stack.callback(process.terminate)
            if unit.name == "gateway":
                addresses.append(env["HEDGEROW_LISTEN"])
            words = here(unit.one("ExecStartPost"))[1:].split()
            post = [env.get(word[2:-1], "") if word.startswith("${") else word for word in words]
            waited = subprocess.run(post, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
            assert waited.returncode == 0, (waited.stderr, (tmp_path / f"{name}.log").read_text()[-2000:])
        yield ",".join(addresses)


async def test_the_units_in_their_order_serve_a_completion(gateways: str) -> None:
    async with AsyncClient(gateways) as client:
        for _ in gateways.split(","):
            result = await client.complete("def fibonacci(n):", max_tokens=8, temperature=0)
            assert len(result.tokens) == 8
