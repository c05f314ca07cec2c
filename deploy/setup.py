"""Makes `.venv` ready, and says what it downloads and how large. Standard library only.

    python3 deploy/setup.py run    # what the services and the command line need
    python3 deploy/setup.py dev    # that, and what `make check` and `make test` need

A second call with nothing changed returns at once: a stamp in `.venv` holds the hash of what was asked for.
torch is taken as a CPU build: from a folder that pip is configured to look in (`find-links`), else from PyTorch's CPU
index, else, with a warning about its size, from the configured index. HEDGEROW_TORCH asks the configured index for
another requirement, for example `torch==2.11.*` on a GPU machine, in place of a build that `.venv` has already.
"""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
CONSTRAINTS = ROOT / "deploy" / "constraints.txt"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CHOSEN = os.environ.get("HEDGEROW_TORCH")
TORCH = CHOSEN or "torch==2.13.0"
SIZES = {"run": "tens of MB", "dev": "about 300 MB, 190 of them Triton"}
EXTRAS = {"run": ["server", "tracing", "engine"], "dev": ["server", "tracing", "engine", "dev"]}


def say(text: str) -> None:
    print(f"setup: {text}", flush=True)


def pip(*arguments: str, quiet: bool = False) -> bool:
    """Runs pip; passes on what it downloads, with sizes. Returns whether it succeeded."""
    command = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "install", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.strip().startswith(("Downloading", "Successfully installed")):
            say(line.strip()[:200])
    if process.wait() and not quiet:
        sys.stderr.writelines(lines[-15:])
    return process.returncode == 0


def wanted(level: str) -> str:
    """Hash of everything that decides what `.venv` holds."""
    parts = [level, TORCH, platform.python_version(), platform.machine()]
    parts += [path.read_text() for path in (ROOT / "pyproject.toml", CONSTRAINTS, Path(__file__))]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def has_torch() -> bool:
    code = "import importlib.metadata as m, sys; sys.exit(0 if m.version('torch') else 1)"
    return subprocess.run([str(PYTHON), "-c", code], capture_output=True).returncode == 0


def install_torch() -> None:
    """What was chosen, else the CPU build where there is one."""
    if CHOSEN:
        say(f"{TORCH}, as HEDGEROW_TORCH says: about 3 GB where it is a build with CUDA")
        if not pip(TORCH):
            sys.exit(f"setup: HEDGEROW_TORCH={TORCH} could not be installed from the index that pip is configured for")
        return
    if has_torch():
        return
    say(f"{TORCH}: the CPU build is a download of about 200 MB, or a file on disk where pip knows one")
    if pip("--no-index", "--no-deps", TORCH, quiet=True):
        return
    if sys.platform == "linux" and pip("--index-url", CPU_INDEX, TORCH, quiet=True):
        return
    say("no CPU build of torch could be had: taking the index's own build (on Linux with CUDA, about 3 GB)")
    if not pip(TORCH):
        sys.exit("setup: torch could not be installed; set HEDGEROW_TORCH to a requirement that your index has")


def requirements(level: str) -> list[str]:
    """The dependencies of the wheel and of the chosen extras, read from pyproject.toml."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    chosen = list(project["dependencies"])
    for extra in EXTRAS[level]:
        chosen += project["optional-dependencies"][extra]
    return chosen


def make_venv() -> None:
    """Creates `.venv`; tells what is missing where the system's Python cannot."""
    say(f"making {VENV.name} with Python {platform.python_version()}")
    try:
        venv.create(VENV, with_pip=True, clear=VENV.exists())
    except (subprocess.CalledProcessError, OSError) as error:
        sys.exit(f"setup: Python cannot make a virtual environment ({error}); on Debian: apt-get install python3-venv")


def main() -> None:
    if sys.version_info < (3, 11):  # noqa: UP036 - this file is what an older Python runs first
        sys.exit(f"setup: Python 3.11 or newer is needed, this is {platform.python_version()}; try PYTHON=python3.12")
    level = sys.argv[1] if len(sys.argv) > 1 else "run"
    if level not in EXTRAS:
        sys.exit(f"setup: {level!r} is none of {sorted(EXTRAS)}")
    stamps = [VENV / f".hedgerow-{name}" for name in ("dev", level)]
    if any(s.exists() and s.read_text() == wanted(s.name.removeprefix(".hedgerow-")) for s in stamps):
        return
    started = time.monotonic()
    if not PYTHON.exists():
        make_venv()
    pip("--upgrade", "pip", quiet=True)
    install_torch()
    say(f"installing what `{level}` needs ({SIZES[level]})")
    if not pip("--constraint", str(CONSTRAINTS), *requirements(level)):
        sys.exit("setup: pip failed; its last lines are above")
    # dflash pins another transformers for its extras; the parity tests need its model code alone.
    if level == "dev" and not pip("--no-deps", "dflash==0.1.0"):
        sys.exit("setup: pip failed; its last lines are above")
    # the `hedgerow` command, from the checkout
    if not pip("--no-deps", "--editable", "."):
        sys.exit("setup: pip failed; its last lines are above")
    # without a C compiler the services run on torch, and their logs say so
    subprocess.run([str(PYTHON), "-m", "kernels.cpu.build"], cwd=ROOT, check=False)
    (VENV / f".hedgerow-{level}").write_text(wanted(level))
    say(f"done in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
