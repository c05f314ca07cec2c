"""A SIGTERM in the first moments of each process that is a container, and a second one: as process 1 of a namespace."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.polling import eventually
from tests.redis_servers import ROOT
from tests.stack import Models

EARLY = 0.1  # seconds of CPU time
PROMPT = 15.0  # seconds in which it has ended then, on a busy machine; without the signal it never does
SERVICES = ("gateway", "verifier", "drafter", "kvstore")
OTHERS = {
    "deploy.docker.together": ["{settings}"],
    "hedgerow.rpc.front": ["127.0.0.1:0", "{settings}/none", "a", "b", "c"],
    "hedgerow.cli": ["convert", "{settings}", "{settings}/out", "--ranks", "2"],
}


@contextmanager
def process_one(*command: str, **env: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """It, as process 1 of a PID namespace of its own, and its number here."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-pf", "true"], capture_output=True).returncode:
        pytest.skip("unshare may not make a PID namespace here")
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("HEDGEROW_")}
    process = subprocess.Popen(
        ["unshare", "--pid", "--fork", "--kill-child", *command], cwd=ROOT, env=inherited | env,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        eventually(lambda: children.read_text().split(), 30, "a child")
        yield process, int(children.read_text().split()[0])
    finally:
        process.kill()
        process.communicate()


def begun(pid: int) -> None:
    """The interpreter runs our module: `unshare` has made way, and the signal has somebody who takes it."""
    path = Path(f"/proc/{pid}/status")

    def caught() -> bool:
        (mask,) = [line.split()[1] for line in path.read_text().splitlines() if line.startswith("SigCgt")]
        return bool(int(mask, 16) & 1 << (signal.SIGTERM - 1))

    eventually(caught, 30, "a handler")


def settings(tiny: Models, folder: Path, name: str) -> dict[str, str]:
    nowhere = "127.0.0.1:1"
    of: dict[str, dict[str, object]] = {
        "gateway": {"verifier": nowhere, "kvstore": nowhere, "model_path": tiny.target},
        "verifier": {"model_path": tiny.target, "model_name": "tiny", "threads": 1},
        "drafter": {"model_path": tiny.drafter, "target_path": tiny.target, "threads": 1},
        "kvstore": {"redis_url": f"redis://{nowhere}/0"},
    }
    return {f"HEDGEROW_{key.upper()}": str(value) for key, value in of[name].items()}


def folder_of(tiny: Models, folder: Path) -> Path:
    """Settings of a verifier and its drafter, as they are mounted."""
    for name in ("verifier", "drafter"):
        (folder / name).mkdir()
        for key, value in settings(tiny, folder, name).items():
            (folder / name / key).write_text(value)
    return folder


def ends(process: subprocess.Popen[str], began: float) -> None:
    process.wait(60)
    assert time.monotonic() - began < PROMPT, process.stdout and process.stdout.read()[-2000:]


@pytest.mark.parametrize("module", [*(f"services.{name}" for name in SERVICES), *OTHERS])
def test_a_sigterm_in_the_first_moments_is_not_lost(module: str, tiny: Models, tmp_path: Path) -> None:
    """The kernel ignores it for process 1 until somebody takes it: that must come before the imports, which take a
    second. Sent until it has ended, it would hide a loss; so it is sent once."""
    folder = folder_of(tiny, tmp_path)
    arguments = [word.format(settings=folder) for word in OTHERS.get(module, [])]
    name = module.removeprefix("services.")
    env = settings(tiny, folder, name) if name in SERVICES else {}
    started = time.monotonic()
    with process_one(sys.executable, "-m", module, *arguments, **env) as (process, pid):
        begun(pid)
        print(f"{module}: a handler after {time.monotonic() - started:.2f} s")
        os.kill(pid, signal.SIGTERM)
        ends(process, time.monotonic())


@pytest.mark.parametrize("module", [*(f"services.{name}" for name in SERVICES), "deploy.docker.together"])
def test_the_handler_is_there_before_the_imports(module: str, tiny: Models, tmp_path: Path) -> None:
    """Of the CPU time to the handler nearly all is the interpreter's own, which a bare one takes too."""
    folder = folder_of(tiny, tmp_path)

    def handled(*command: str) -> float:
        with process_one(sys.executable, *command) as (_, pid):
            begun(pid)
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    bare = "import signal, time; signal.signal(signal.SIGTERM, lambda *_: None); time.sleep(20)"
    spent = min(handled("-m", module, str(folder)) for _ in range(3))
    assert spent < min(handled("-c", bare) for _ in range(3)) + EARLY


@pytest.mark.parametrize("first", ["loading", "ready"])
def test_a_container_of_two_ends_in_order_at_the_first_signal_and_at_once_at_the_second(
    first: str, tiny: Models, tmp_path: Path
) -> None:
    """Verifier and drafter in one container. The drafter hangs: it has ten seconds at the first signal."""
    folder = folder_of(tiny, tmp_path)
    with process_one(sys.executable, "-m", "deploy.docker.together", str(folder)) as (process, pid):

        def children() -> dict[str, int]:
            found = {}
            for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
                words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
                if len(words) > 1:  # one that has ended has none
                    found[words[-2].decode()] = int(child)
            return found

        eventually(lambda: children().keys() == {"services.verifier", "services.drafter"}, 30, "both processes")
        if first == "ready":
            assert process.stdout is not None
            lines = (line for line in process.stdout if line.startswith("ready verifier"))
            next(lines)
        os.kill(children()["services.drafter"], signal.SIGSTOP)
        os.kill(pid, signal.SIGTERM)
        eventually(lambda: "services.verifier" not in children(), 10, "the verifier's end")
        assert process.poll() is None, "the drafter is waited for"
        os.kill(pid, signal.SIGTERM)
        ends(process, time.monotonic())
