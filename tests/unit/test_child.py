"""Supervision of one process, with real processes: the smallest Python programs that do what a test needs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from hedgerow.cli.child import Backoff, Child, Command
from hedgerow.errors import Unavailable
from tests.polling import eventually

ROOT = Path(__file__).resolve().parents[2]
SERVES = "import time; print('ready it 4711 admin=4712', flush=True); time.sleep(60)"
QUICK = Backoff(first=0.05, most=0.2, calm=60)


@contextmanager
def child(code: str, backoff: Backoff = QUICK, said: list[str] | None = None) -> Iterator[Child]:
    command = Command("it", [sys.executable, "-S", "-c", code], dict(os.environ), ROOT)
    made = Child(command, lambda name, line: None if said is None else said.append(line), backoff)
    made.start()
    try:
        yield made
    finally:
        made.stop(5)


def test_a_child_is_ready_when_it_says_so() -> None:
    with child(SERVES) as it:
        assert it.wait_ready(10) == (4711, 4712)
        assert it.starts == 1


def test_a_killed_child_is_started_again_and_is_not_ready_meanwhile() -> None:
    with child(SERVES, Backoff(first=1.0)) as it:
        it.wait_ready(10)
        first = it.pid
        it.kill()
        assert it.ready is None
        it.wait_ready(10)
        assert it.pid != first
        assert it.starts == 2


def test_a_child_that_ends_before_it_is_ready_is_reported_with_its_last_line() -> None:
    with child("import sys; print('no such model'); sys.exit(3)") as it:
        with pytest.raises(Unavailable, match="ended with 3; its last line: no such model"):
            it.wait_ready(10)
        assert it.starts == 1


def test_crashes_in_a_row_are_restarted_less_and_less_often() -> None:
    began = time.monotonic()
    with child("print('ready it 1', flush=True)", Backoff(first=0.05, most=0.2, calm=60)) as it:
        eventually(lambda: it.starts >= 5, 30)
        assert time.monotonic() - began >= 0.05 + 0.1 + 0.2 + 0.2


def test_a_paused_child_is_stopped_all_the_same() -> None:
    """A stopped process does not see SIGTERM; without the SIGCONT every stop would take the whole grace."""
    with child(SERVES) as it:
        it.wait_ready(10)
        os.kill(it.pid, signal.SIGSTOP)
        began = time.monotonic()
        assert it.stop(20) == -signal.SIGTERM
        assert time.monotonic() - began < 10


def test_a_child_that_ignores_sigterm_is_killed_after_the_grace_and_the_log_says_so() -> None:
    """A kill that nobody was told of hid that services did not end by themselves."""
    said: list[str] = []
    with child("import signal; signal.signal(15, signal.SIG_IGN)\n" + SERVES, said=said) as it:
        it.wait_ready(10)
        assert it.stop(0.2) == -signal.SIGKILL
    assert said == ["did not end within 0.2 s of SIGTERM; killed"]


def test_a_child_that_cannot_be_started_again_is_tried_until_it_can(tmp_path: Path) -> None:
    """The thread that watches it died of the OSError, and the service never came back."""
    said: list[str] = []
    folder = tmp_path / "folder"
    folder.mkdir()
    it = Child(
        Command("it", [sys.executable, "-S", "-c", SERVES], {}, folder), lambda n, line: said.append(line), QUICK
    )
    it.start()
    try:
        it.wait_ready(10)
        folder.rmdir()
        it.kill()
        eventually(lambda: any("ended with 127; starting it again" in line for line in said))
        assert any(line.startswith("cannot be started: [Errno 2]") for line in said)
        folder.mkdir()
        it.wait_ready(10)
    finally:
        it.stop(5)


def test_waiting_for_a_child_reminds_and_still_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """`hedgerow up` said nothing for 20 s while torch was loaded."""
    monkeypatch.setattr("hedgerow.cli.child.REMINDER", 0.05)
    reminded: list[int] = []
    late = r"not ready within 0\.3 s; its last line: it said nothing"
    with child("import time; time.sleep(60)") as it, pytest.raises(Unavailable, match=late):
        it.wait_ready(0.3, lambda: reminded.append(1))
    assert 1 <= len(reminded) <= 6


def test_a_child_that_is_stopped_between_two_starts_stays_stopped() -> None:
    with child("print('ready it 1', flush=True)", Backoff(first=30)) as it:
        eventually(lambda: it.starts == 1 and any("ready" in line for line in it.lines()) and it.ready is None)
        began = time.monotonic()
        it.stop(5)
        assert time.monotonic() - began < 5
        assert it.starts == 1


@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux'")
def test_children_die_with_a_supervisor_that_was_killed() -> None:
    code = f"""
import sys, threading, time
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from hedgerow.cli.child import Backoff, Child, Command
it = Child(Command("it", [sys.executable, "-S", "-c", {SERVES!r}], {{}}, Path("/")), lambda n, l: None, Backoff())
it.start(); it.wait_ready(20); print(it.pid, flush=True); time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        orphan = int(supervisor.stdout.readline())
        assert psutil.pid_exists(orphan)
        supervisor.kill()
        supervisor.wait()
        eventually(lambda: not psutil.pid_exists(orphan) or psutil.Process(orphan).status() == "zombie")
