"""Health beside a verifier on a GPU: who answers holds nothing of the driver, says a hang, and comes back with it."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import grpc
import pytest
import torch

pytest.importorskip("triton")

from hedgerow.cli.child import Backoff, Child, Command
from hedgerow.cli.ports import free_ports
from hedgerow.rpc import probe
from hedgerow.v1 import verifier_pb2, verifier_pb2_grpc
from tests.polling import eventually

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
ROOT = Path(__file__).resolve().parents[2]
SMALL = {"MAX_SEQUENCES": "2", "MAX_BUDGET": "4", "PREFILL_ROWS": "64", "CALIBRATION_MS": "0"}
WITHIN, START = 10.0, 150.0  # seconds from a hang to NOT_SERVING; for kernels to be compiled


def said(listen: str) -> str:
    """The status, or the code of the error."""
    try:
        return probe.ask(listen, 5)
    except grpc.RpcError as error:
        return str(error.code().name)


def driver(pid: int) -> tuple[int, set[str]]:
    """Files of the driver that a process holds, and its mapped libraries of CUDA, the driver and torch."""
    held = 0
    for file in Path(f"/proc/{pid}/fd").iterdir():
        try:
            held += os.readlink(file).startswith("/dev/nvidia")
        except FileNotFoundError:  # closed meanwhile
            continue
    maps = Path(f"/proc/{pid}/maps").read_text()
    return held, {name for name in ("libcuda", "libcudart", "libnvidia", "/dev/nvidia", "libtorch") if name in maps}


def beside(pid: int) -> int:
    """The process that answers health for this one."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    (found,) = (int(each) for each in children if b"health_process" in Path(f"/proc/{each}/cmdline").read_bytes())
    return found


def ended(pid: int) -> bool:
    """Also where nobody waits for it: a zombie has no arguments."""
    try:
        return not Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.timeout(400)
def test_a_verifier_that_hangs_on_a_gpu_is_known_within_ten_seconds_and_comes_back() -> None:
    listen = f"127.0.0.1:{next(free_ports(1))}"
    settings = {"MODEL_PATH": "models/sapling", "MODEL_NAME": "sapling", "DEVICE": "cuda", "HEALTH_LISTEN": listen}
    env = os.environ | {f"HEDGEROW_{name}": value for name, value in (settings | SMALL).items()}
    child = Child(Command("verifier", [sys.executable, "-m", "services.verifier"], env, ROOT), _line, Backoff())
    child.start()
    try:
        ready = child.wait_ready(START)
        eventually(lambda: said(listen) == "SERVING", 30, "SERVING")
        pid, other = child.pid, beside(child.pid)
        assert driver(other) == (0, set()), "it holds nothing that can hang with the device"
        files, libraries = driver(pid)
        assert files > 0
        assert {"libcuda", "libtorch"} <= libraries
        print(f"verifier {pid}: {files} files of the driver, {sorted(libraries)}; health {other}: none")
        os.kill(pid, signal.SIGSTOP)
        try:
            began = time.monotonic()
            eventually(lambda: said(listen) == "NOT_SERVING", 60, "NOT_SERVING")
            taken = time.monotonic() - began
            assert said(f"127.0.0.1:{ready.admin}") != "SERVING", "nobody else answers"
        finally:
            os.kill(pid, signal.SIGCONT)
        assert taken < WITHIN, f"NOT_SERVING after {taken:.1f} s"
        eventually(lambda: said(listen) == "SERVING", 30, "SERVING again")
        with grpc.insecure_channel(f"127.0.0.1:{ready.port}") as channel:
            verifier_pb2_grpc.VerifierServiceStub(channel).GetLoad(verifier_pb2.GetLoadRequest(), timeout=30)
        began = time.monotonic()
        child.kill()
        eventually(lambda: ended(other), 10, "its end with the verifier's")
        eventually(lambda: child.ready is not None and child.pid != pid, START, "a verifier again")
        eventually(lambda: said(listen) == "SERVING", 30, "SERVING after a restart")
        print(f"NOT_SERVING {taken:.1f} s after the hang; killed, it served {time.monotonic() - began:.1f} s later")
    except BaseException:
        print(*child.lines()[-30:], sep="\n")
        raise
    finally:
        child.stop(10)


def _line(name: str, line: str) -> None:
    """Nobody reads along."""
