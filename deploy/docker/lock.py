"""Writes deploy/docker/{slim,cpu,gpu}.lock: every package that an image installs, pinned by version and hash.

    .venv/bin/python deploy/docker/lock.py          # all of them; asks the package index, downloads next to nothing
    .venv/bin/python deploy/docker/lock.py slim     # one

Requirements come from pyproject.toml, versions from deploy/constraints.txt. The images have Debian 12's Python 3.11.
The slim image is for amd64 and arm64, the engines' are for amd64. torch for CPUs is not on the index: its wheel is
pinned by the hash that PyTorch's own CPU index gives it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CONSTRAINTS = ROOT / "deploy" / "constraints.txt"
AMD64, ARM64 = "x86_64", "aarch64"
GLIBC = ("2_28", "2_27", "2_26", "2_24", "2_17", "2014")  # manylinux tags that Debian 12 takes

# What torch's CPU wheel asks for beside what its GPU wheel does: nothing. It is left to its own index.
TORCH_CPU = "torch==2.13.0+cpu"
TORCH_CPU_HASH = "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b"  # cp311, manylinux_2_28_x86_64
TORCH_CPU_NEEDS = ("filelock", "fsspec", "jinja2", "networkx", "setuptools>=77.0.3", "sympy", "typing-extensions>=4.10")
TORCH_GPU = "torch==2.10.0"  # the index's own build: CUDA 12.8


# Markers are weighed for the Python that runs this; redis-py asks for it below 3.11.3, and Debian 12 has 3.11.2.
DEBIAN_PYTHON_NEEDS = ("async-timeout>=4.0.3",)


class Image(NamedTuple):
    """What an image installs."""

    extras: Sequence[str]
    machines: Sequence[str] = (AMD64,)
    more: Sequence[str] = ()
    by_hand: str = ""


IMAGES = {
    "slim": Image(["server", "tracing"], (AMD64, ARM64)),
    "cpu": Image(
        ["server", "tracing", "engine"],
        more=TORCH_CPU_NEEDS,
        by_hand=f"{TORCH_CPU} \\\n    --hash=sha256:{TORCH_CPU_HASH}\n",
    ),
    "gpu": Image(["server", "tracing", "engine"], more=(TORCH_GPU, "triton==3.6.0", "nvidia-nccl-cu12")),
}


def requirements(image: Image) -> list[str]:
    """Of the wheel and the image's extras; torch is as the image says."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = list(project["dependencies"])
    for extra in image.extras:
        wanted += [each for each in project["optional-dependencies"][extra] if not each.startswith("torch")]
    return [*wanted, *DEBIAN_PYTHON_NEEDS, *image.more]


def resolve(wanted: Iterable[str], machine: str) -> list[tuple[str, str, str]]:
    """(name, version, SHA-256) of every wheel for this machine, as pip would install them."""
    tags = [f"manylinux{'' if glibc == '2014' else '_'}{glibc}_{machine}" for glibc in GLIBC]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        command += ["--target", folder, "--only-binary", ":all:", "--python-version", "3.11"]
        command += [word for tag in tags for word in ("--platform", tag)]
        command += ["--constraint", str(CONSTRAINTS), "--report", str(report), *wanted]
        subprocess.run(command, check=True)
        found = json.loads(report.read_text())["install"]
    return [
        (
            each["metadata"]["name"].lower().replace("_", "-"),
            each["metadata"]["version"],
            each["download_info"]["archive_info"]["hashes"]["sha256"],
        )
        for each in found
    ]


def lock(image: Image) -> str:
    """The file's text."""
    hashes: dict[tuple[str, str], set[str]] = defaultdict(set)
    for machine in image.machines:
        for name, version, digest in resolve(requirements(image), machine):
            hashes[name, version].add(digest)
    lines = [f"# Written by deploy/docker/lock.py for Python 3.11 on Linux, {' and '.join(image.machines)}.\n"]
    for (name, version), digests in sorted(hashes.items()):
        lines.append(
            f"{name}=={version}" + "".join(f" \\\n    --hash=sha256:{each}" for each in sorted(digests)) + "\n"
        )
    return "".join(lines) + image.by_hand


def main() -> None:
    for name in sys.argv[1:] or IMAGES:
        (HERE / f"{name}.lock").write_text(lock(IMAGES[name]))
        print(f"lock: {name}.lock", flush=True)


if __name__ == "__main__":
    main()
