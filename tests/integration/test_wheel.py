"""The wheel: SDK and command line, in a clean environment without torch."""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ASIDE = ("README.md", "LICENSE", "NOTICE")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    # from a copy, so that setuptools leaves no build/ or egg-info in the checkout
    source = tmp_path_factory.mktemp("source")
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "hedgerow", "pyproject.toml", *ASIDE]
    for name in subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines():
        if (ROOT / name).is_file():  # one that is deleted and not committed yet is listed too
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(out), str(source)]
    subprocess.run(command, check=True, capture_output=True, timeout=100)
    return next(out.glob("*.whl"))


def test_the_wheel_holds_only_the_sdk(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    packages = {"/".join(name.split("/")[:-1]) for name in names if name.endswith(".py")}
    assert packages == {"hedgerow", "hedgerow/v1", "hedgerow/client", "hedgerow/cli", "hedgerow/cli/evaluation"}
    assert "hedgerow/py.typed" in names
    assert wheel.stat().st_size < 300_000


def test_the_wheel_drives_a_stack_without_torch(wheel: Path, tmp_path: Path, stack: object) -> None:
    """Installed alone, with its own dependencies; torch is not even installed there."""
    venv.create(tmp_path / "clean", with_pip=True)
    python = tmp_path / "clean" / "bin" / "python"
    command = [str(python), "-m", "pip", "install", "-q", "-c", str(ROOT / "deploy" / "constraints.txt"), str(wheel)]
    subprocess.run(command, check=True, capture_output=True, timeout=110)
    listed = subprocess.run([str(python), "-m", "pip", "list"], check=True, capture_output=True, text=True).stdout
    assert "torch" not in listed
    address = stack.address("gateway")  # type: ignore[attr-defined]
    hedgerow = tmp_path / "clean" / "bin" / "hedgerow"
    shown = subprocess.run(
        [str(hedgerow), "generate", "--address", address, "--max-tokens", "8", "def f(x):"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert shown.stdout.strip()
    up = subprocess.run([str(hedgerow), "up"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert up.returncode != 0
    assert "clone" in up.stderr + up.stdout
