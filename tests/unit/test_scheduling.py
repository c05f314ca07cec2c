"""Time slices: what the kernel then says of the thread, and what is left alone."""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
import sys
import threading
from pathlib import Path
from unittest import mock

import pytest

from hedgerow.rpc.work import computing_thread
from hedgerow.scheduling import LONG, SHORT, ask_for_slice, usable_cores

GETATTR = 315  # x86_64
FORMAT = struct.Struct("=IIQiIQQQII")


def slice_of(thread: int) -> int:
    """Nanoseconds, as the kernel tells."""
    told = ctypes.create_string_buffer(FORMAT.size)
    assert ctypes.CDLL(None).syscall(GETATTR, thread, told, FORMAT.size, 0) == 0
    return int(FORMAT.unpack(told.raw)[5])


def in_a_thread(what: object) -> int:
    """The slice of a fresh thread that asked for `what`; this process's main thread stays as it is."""
    seen: list[int] = []

    def run() -> None:
        if not ask_for_slice(int(str(what))):
            seen.append(-1)
        else:
            seen.append(slice_of(0))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return seen[0]


needs_kernel = pytest.mark.skipif(
    sys.platform != "linux" or os.uname().machine != "x86_64" or in_a_thread(LONG) != LONG,
    reason="this kernel has no slices of one's own (Linux 6.12)",
)


@needs_kernel
def test_a_thread_gets_the_slice_that_it_asks_for() -> None:
    assert in_a_thread(SHORT) == SHORT


@needs_kernel
def test_a_computing_thread_gives_way() -> None:
    with computing_thread("compute") as worker:
        assert worker.submit(slice_of, 0).result() == LONG


@needs_kernel
def test_the_niceness_stays() -> None:
    code = (
        "import os; from hedgerow.scheduling import *; os.nice(7); assert ask_for_slice(SHORT);"
        "print(os.getpriority(os.PRIO_PROCESS, 0))"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    assert int(told) == min(19, os.nice(0) + 7)


def test_a_policy_of_its_own_is_left_alone() -> None:
    code = (
        "import os; from hedgerow.scheduling import *;"
        "os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0));"
        "print(ask_for_slice(SHORT), os.sched_getscheduler(0) == os.SCHED_BATCH)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.split() == [
        "False",
        "True",
    ]


@pytest.mark.parametrize(
    ("limit", "cores"),
    [("max 100000", 2), ("150000 100000", 2), ("100000 100000", 1), ("5000 100000", 1), ("900000 100000", 2), ("?", 2)],
)
def test_a_process_uses_the_cores_that_it_is_given(tmp_path: Path, limit: str, cores: int) -> None:
    given = tmp_path / "cpu.max"
    given.write_text(limit)
    with mock.patch("os.sched_getaffinity", return_value={3, 7}), mock.patch("os.cpu_count", return_value=64):
        assert usable_cores(given) == cores


def test_a_machine_without_limits_gives_its_cores(tmp_path: Path) -> None:
    assert usable_cores(tmp_path / "none") == len(os.sched_getaffinity(0))
