"""A service that has drained is gone at once: nothing that the interpreter would tidy up keeps the process."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hedgerow.cli.child import Child
from tests.polling import eventually
from tests.processes import ROOT, service
from tests.redis_servers import Service
from tests.stack import Models

PROMPT = 8.0  # seconds, on a busy machine; what it guards against took 25 there

WORK_LEFT = """
import asyncio, sys, threading, time
from hedgerow.errors import Unavailable
from hedgerow.rpc.logs import set_up_logging
from hedgerow.rpc.work import computing_thread, run_service

async def main():
    worker = computing_thread("work")
    worker.submit(time.sleep, 60)
    asyncio.get_running_loop().run_in_executor(None, time.sleep, 60)
    threading.Thread(target=time.sleep, args=(60,)).start()
    print("drained")
    {then}

set_up_logging("it")
run_service(main())
"""


def ends(then: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WORK_LEFT.format(then=then)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)


def test_threads_that_still_work_do_not_keep_the_process() -> None:
    """The interpreter joined them: a SIGTERM while weights were loading was answered when they were loaded."""
    ended = ends("pass")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "drained\n", "")


@pytest.mark.parametrize(
    ("then", "said"),
    [
        ("raise Unavailable('the port', 'it is taken')", "UNAVAILABLE: the port is unavailable"),
        ("1 / 0", "division by"),
    ],
)
def test_a_failure_is_said_and_ends_the_process_at_once_too(then: str, said: str) -> None:
    ended = ends(then)
    assert (ended.returncode, ended.stdout) == (1, "drained\n")
    assert said in ended.stderr


def ends_promptly(child: Child) -> None:
    """0, soon after SIGTERM."""
    began = time.monotonic()
    assert child.stop(20) == 0
    assert time.monotonic() - began < PROMPT, child.lines()[-1]


@pytest.mark.parametrize("name", ["drafter", "verifier"])
def test_an_idle_engine_ends_soon_after_sigterm(name: str, tiny: Models) -> None:
    """It said "stopped" and then took torch apart for up to 25 s on a busy machine."""
    of = {"drafter": {"model_path": tiny.drafter, "target_path": tiny.target}}
    with service(name, **of.get(name, {"model_path": tiny.target, "model_name": "tiny"}), threads=1) as child:
        ends_promptly(child)


@pytest.mark.parametrize("name", ["kvstore", "gateway"])
def test_a_service_without_its_peers_ends_soon_after_sigterm(name: str, tiny: Models) -> None:
    nowhere, model = "127.0.0.1:1", Path(tiny.target)
    of = {"kvstore": {"redis_url": f"redis://{nowhere}/0"}}
    child = Service(f"services.{name}", **of.get(name, {"verifier": nowhere, "kvstore": nowhere, "model_path": model}))
    try:
        child.bound()
        began = time.monotonic()
        assert child.terminate() == 0
        assert time.monotonic() - began < PROMPT
    finally:
        child.stop()


def test_a_verifier_that_is_still_loading_ends_soon_after_sigterm(tiny: Models) -> None:
    child = Service("services.verifier", model_path=tiny.target, model_name="tiny", threads=1)
    try:
        child.bound()
        began = time.monotonic()
        child.process.send_signal(signal.SIGTERM)
        eventually(lambda: child.process.poll() is not None, 20, "its end")
        assert child.wait() == 0
        assert time.monotonic() - began < PROMPT
    finally:
        child.stop()
