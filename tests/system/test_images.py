"""The images: what they are made of, and that what is locked is what is asked for. test_cluster.py runs them."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from deploy.configuration import SERVICES
from hedgerow.rpc.config import from_env
from tests.system.cluster import Cluster
from tests.system.tools import ROOT, tool

pytestmark = pytest.mark.system
DOCKER = ROOT / "deploy" / "docker"
EXTRAS = {
    "slim": ("server", "tracing"),
    "cpu": ("server", "tracing", "engine"),
    "gpu": ("server", "tracing", "engine"),
}
SLIM_BYTES = 250_000_000


def locked(name: str) -> dict[str, str]:
    """Version by name."""
    text = (DOCKER / f"{name}.lock").read_text()
    pins = re.findall(r"^([a-z0-9.-]+)==(\S+) \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", text, re.M)
    assert len(pins) == text.count("=="), "every line is pinned and has a hash"
    return {each[0]: each[1] for each in pins}


@pytest.mark.parametrize("name", EXTRAS)
def test_a_lock_holds_what_the_project_asks_for(name: str) -> None:
    """A dependency that is added to pyproject.toml needs `deploy/docker/lock.py`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(each for extra in EXTRAS[name] for each in project["optional-dependencies"][extra]),
    ]
    pins = locked(name)
    for each in map(Requirement, wanted):
        held = pins.get(each.name.lower().replace("_", "-"))
        assert held is not None, f"{each} is not in {name}.lock"
        assert each.specifier.contains(Version(held), prereleases=True), f"{each}: {held} is locked"


def test_the_gpu_image_has_what_its_kernels_need() -> None:
    pins = locked("gpu")
    assert pins["torch"].startswith("2.10.")
    assert pins["triton"].startswith("3.6.")
    assert {"nvidia-nccl-cu12", "nvidia-cuda-nvrtc-cu12"} <= pins.keys()


def test_the_gpu_image_is_the_cpu_image_on_another_torch() -> None:
    """What can be known without its build of ten minutes (test_gpu_image.py): the CPU image is run by other tests."""
    text = (DOCKER / "Dockerfile").read_text()
    stages = {
        name: body.replace(f"build-{name}", "build-engine")
        for name, body in re.findall(r"^FROM service AS (cpu|gpu)\n(.*?)(?=^FROM |\Z)", text, re.M | re.S)
    }
    cpu, gpu = (
        [line for line in stages[name].replace("\\\n", "").splitlines() if line and not line.startswith("#")]
        for name in ("cpu", "gpu")
    )
    compiler, cache = gpu[:2]
    kernels = gpu.index("RUN python3 -m kernels.gpu.cuda")
    assert gpu[kernels - 1].startswith("COPY ")
    assert [*gpu[2:kernels], *gpu[kernels + 1 :]] == cpu
    assert compiler.startswith("RUN apt-get update")
    assert {"gcc", "libc6-dev", "python3-dev"} <= set(compiler.split())
    assert cache.startswith("ENV TRITON_CACHE_DIR=/tmp/triton")
    ours, theirs = locked("cpu"), locked("gpu")
    apart = {name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)}
    assert {name for name in apart if not name.startswith(("nvidia-", "cuda-"))} == {"torch", "triton", "setuptools"}
    for source in re.findall(r"^COPY (?!--from)(?:--\S+ )*(.+) \S+$", text, re.M):
        for each in source.split():
            assert list(ROOT.glob(each)), f"the Dockerfile copies {each}"


def test_the_slim_lock_has_no_engine() -> None:
    assert not {"torch", "numpy", "triton", "safetensors"} & locked("slim").keys()


def test_the_base_is_pinned_and_nothing_runs_as_root() -> None:
    text = (DOCKER / "Dockerfile").read_text()
    assert re.search(r"^ARG BASE=docker\.io/library/debian:bookworm-slim@sha256:[0-9a-f]{64}$", text, re.M)
    finals = [stage for stage in re.split(r"^FROM ", text, flags=re.M) if re.match(r"\S+ AS (slim|cpu|gpu)\n", stage)]
    assert len(finals) == 3
    for stage in finals:
        assert re.search(r"^USER 10001:10001$", stage, re.M), stage.splitlines()[0]
    assert "--require-hashes" in text
    assert ":latest" not in text


def with_defaults(value: str) -> str:
    """What compose makes of it where no variable is set."""
    return re.sub(r"\$\{\w+(?::-([^}]*))?[^}]*\}", lambda found: found[1] or "", value)


def test_compose_gives_each_service_what_it_accepts() -> None:
    compose = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    of_images = dict(re.findall(r"(HEDGEROW_\w+)=(\S+)", (DOCKER / "Dockerfile").read_text()))
    assert set(of_images) == {"HEDGEROW_LISTEN", "HEDGEROW_ADMIN_LISTEN", "HEDGEROW_METRICS_ADDRESS"}
    seen = set()
    for name, service in compose["services"].items():
        if service.get("command", [""])[0] == f"services.{name}":
            given = {key: with_defaults(value) for key, value in service["environment"].items()}
            from_env(SERVICES[name], of_images | given)
            seen.add(name)
    assert seen == set(SERVICES)


def test_compose_names_no_moving_tag() -> None:
    text = (DOCKER / "compose.yaml").read_text()
    for image in re.findall(r"image: (\S+)", text):
        (default,) = re.findall(r"^\$\{HEDGEROW_\w*IMAGE:-([^}]+)\}$", image)
        assert re.search(r":v?\d+\.\d+\.\d+$", default), image


@pytest.mark.timeout(900)
def test_the_slim_image_is_small() -> None:
    podman = tool("podman")
    image = Cluster().build("slim")
    told = json.loads(
        subprocess.run([podman, "image", "inspect", image], capture_output=True, text=True, check=True).stdout
    )[0]
    print(f"{image}: {told['Size'] / 1e6:.0f} MB")
    assert told["Size"] <= SLIM_BYTES
    assert told["Config"]["User"] == "10001:10001"
