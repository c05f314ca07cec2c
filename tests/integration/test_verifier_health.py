"""A verifier that hangs: the process beside it says so, which holds neither torch nor a device."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import grpc
import psutil
import pytest

from hedgerow.cli.ports import free_ports
from hedgerow.rpc import probe
from hedgerow.v1 import verifier_pb2, verifier_pb2_grpc
from tests.polling import eventually
from tests.processes import ROOT, address, service
from tests.stack import Models

# Seconds from a hang to NOT_SERVING, on cores that others use too: tests/unit/test_health_process.py holds it to 10
# with a clock of its own, and tests/gpu/test_cuda_health.py on a card.
WITHIN = 30.0


def said(listen: str) -> str:
    """The status, or the code of the error."""
    try:
        return probe.ask(listen, 10)
    except grpc.RpcError as error:
        return str(error.code().name)


def ended(process: psutil.Process) -> bool:
    """Also where nobody waits for it."""
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def test_probes_are_answered_while_the_verifier_hangs_and_it_comes_back(tiny: Models) -> None:
    listen = f"127.0.0.1:{next(free_ports(1))}"
    with service("verifier", model_path=tiny.target, model_name="m", cache_pages=64, health_listen=listen) as child:
        eventually(lambda: said(listen) == "SERVING", 30, "SERVING")
        (beside,) = (
            each for each in psutil.Process(child.pid).children() if "health_process" in " ".join(each.cmdline())
        )
        maps = Path(f"/proc/{beside.pid}/maps").read_text()
        assert "grpc" in maps
        assert not [name for name in ("libtorch", "libcuda", "libcudart", "nvidia") if name in maps]
        os.kill(child.pid, signal.SIGSTOP)
        try:
            began = time.monotonic()
            eventually(lambda: said(listen) == "NOT_SERVING", 60, "NOT_SERVING")
            taken = time.monotonic() - began
            assert said(listen) == "NOT_SERVING"
            command = [sys.executable, "-m", "hedgerow.rpc.probe", listen]
            assert subprocess.run(command, cwd=ROOT, capture_output=True, timeout=60, check=False).returncode == 1
        finally:
            os.kill(child.pid, signal.SIGCONT)
        assert taken < WITHIN, f"NOT_SERVING after {taken:.1f} s"
        eventually(lambda: said(listen) == "SERVING", 30, "SERVING again")
        with grpc.insecure_channel(address(child)) as channel:
            verifier_pb2_grpc.VerifierServiceStub(channel).GetLoad(verifier_pb2.GetLoadRequest(), timeout=30)
        assert [line for line in child.lines() if "the process hangs" in line]
        pid = child.pid
        child.kill()
        eventually(lambda: ended(beside), 10, "its end with the verifier's")
        eventually(lambda: child.ready is not None and child.pid != pid, 60, "a verifier again")
        eventually(lambda: said(listen) == "SERVING", 30, "SERVING after a restart")


@pytest.mark.long
def test_a_verifier_whose_health_port_is_taken_does_not_start(tiny: Models) -> None:
    listen = f"127.0.0.1:{next(free_ports(1))}"
    given = {"model_path": tiny.target, "model_name": "m", "cache_pages": 64, "health_listen": listen}
    with service("verifier", **given):
        eventually(lambda: said(listen) == "SERVING", 30, "SERVING")
        env = {f"HEDGEROW_{name.upper()}": str(value) for name, value in given.items()}
        done = subprocess.run(
            [sys.executable, "-m", "services.verifier"],
            cwd=ROOT, env=os.environ | env, capture_output=True, text=True, timeout=110, check=False,
        )  # fmt: skip
        assert done.returncode == 1
        assert f"INVALID_CONFIG: HEDGEROW_HEALTH_LISTEN: '{listen}' is not allowed" in done.stderr
