"""One supervised process: started, heard, and started again when it crashes.

Each child has one thread that starts it, reads its output, reaps it and waits before the next start. The thread must
outlive the process: Linux delivers the parent-death signal when the *thread* that forked ends, not the process.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hedgerow.errors import Unavailable

OnLine = Callable[[str, str], None]

REMINDER = 5.0  # seconds
CANNOT_START = 127  # a shell's status for it

_READY = re.compile(r"ready (?P<name>[\w-]+) (?P<port>\d+)(?: admin=(?P<admin>\d+))?$")

# The child asks for the signal itself: a preexec_fn could deadlock on a lock that another thread held at the fork.
_PR_SET_PDEATHSIG = 1
_TIED = (
    "import ctypes, os, sys\n"
    f"ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, int(sys.argv[2]))\n"
    "if os.getppid() == int(sys.argv[1]):\n"
    "    os.execvp(sys.argv[3], sys.argv[3:])\n"
)


class Ready(NamedTuple):
    """Ports from a child's ready line."""

    port: int
    admin: int | None


@dataclass(frozen=True)
class Backoff:
    """Seconds between a crash and the next start: doubles from `first` to `most`, back to `first` after `calm`."""

    first: float = 0.2
    most: float = 10.0
    calm: float = 20.0


@dataclass(frozen=True)
class Command:
    """What to run. `death_signal` reaches the process when the supervisor dies without stopping it (Linux)."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: Path
    death_signal: signal.Signals = signal.SIGKILL

    def tied(self) -> list[str]:
        """The arguments, wrapped so that the process cannot outlive this one."""
        if sys.platform != "linux":
            return list(self.argv)
        return [sys.executable, "-I", "-S", "-c", _TIED, str(os.getpid()), str(int(self.death_signal)), *self.argv]


class Child:
    """A process that should be running. All methods may be called from any thread."""

    def __init__(self, command: Command, on_line: OnLine, backoff: Backoff) -> None:
        self.command = command
        self.name = command.name
        self.starts = 0
        self._on_line, self._backoff = on_line, backoff
        self._lines: deque[str] = deque(maxlen=2000)
        self._changed = threading.Condition()
        self._process: subprocess.Popen[str] | None = None
        self._ready: Ready | None = None
        self._exit_code: int | None = None
        self._was_ready = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name=f"watch-{self.name}", daemon=True)

    def start(self) -> None:
        """Starts the process; returns at once."""
        self._thread.start()

    @property
    def pid(self) -> int:
        """The running process. Raises Unavailable between a crash and the next start."""
        with self._changed:
            if self._process is None:
                raise Unavailable(self.name, "it is not running")
            return self._process.pid

    @property
    def ready(self) -> Ready | None:
        """Ports of the running process; None until it said that it is ready."""
        with self._changed:
            return self._ready

    def lines(self) -> list[str]:
        """The last lines of output, restarts included."""
        return list(self._lines)

    def wait_ready(self, timeout: float, remind: Callable[[], None] = lambda: None) -> Ready:
        """Blocks until the process is ready, and calls `remind` every few seconds meanwhile.

        Raises Unavailable with its last line if it ended first or is too slow.
        """
        end = time.monotonic() + timeout
        while True:
            with self._changed:
                left = max(0.0, end - time.monotonic())
                self._changed.wait_for(lambda: self._ready is not None or self._gave_up, min(left, REMINDER))
                if self._ready is not None:
                    return self._ready
                if self._gave_up or left <= REMINDER:
                    break
            remind()
        last = self._lines[-1] if self._lines else "it said nothing"
        why = f"ended with {self._exit_code}" if self._gave_up else f"not ready within {timeout:g} s"
        raise Unavailable(self.name, f"{why}; its last line: {last}")

    def kill(self) -> None:
        """SIGKILL; returns when the process is gone. The supervisor starts it again."""
        with self._changed:
            process = self._process
            if process is None:
                raise Unavailable(self.name, "it is not running")
            process.kill()
            self._changed.wait_for(lambda: self._process is not process, 10)

    def ask_to_stop(self) -> None:
        """SIGTERM, once: a second one would end a service in the middle of its drain. Returns at once."""
        with self._changed:
            if self._process is not None and not self._stopping.is_set():
                self._process.terminate()
                self._process.send_signal(signal.SIGCONT)  # a stopped process would never see the SIGTERM
            self._stopping.set()

    def stop(self, grace: float) -> int | None:
        """`ask_to_stop`, and SIGKILL after `grace` seconds, which is logged.

        Returns the exit code; None if it was never started.
        """
        self.ask_to_stop()
        if self._thread.ident is None:
            return None
        self._thread.join(grace)
        with self._changed:
            stuck = self._process
            if stuck is not None:
                stuck.kill()
        if stuck is not None:
            self._on_line(self.name, f"did not end within {grace:g} s of SIGTERM; killed")
        self._thread.join()
        return self._exit_code

    @property
    def _gave_up(self) -> bool:
        return self._exit_code is not None and not self._was_ready

    def _watch(self) -> None:
        delay = self._backoff.first
        while not self._stopping.is_set():
            began = time.monotonic()
            code = self._run()
            if self._stopping.is_set() or self._gave_up:
                return
            if time.monotonic() - began > self._backoff.calm:
                delay = self._backoff.first
            self._on_line(self.name, f"ended with {code}; starting it again in {delay:.1f} s")
            self._stopping.wait(delay)
            delay = min(2 * delay, self._backoff.most)

    def _run(self) -> int:
        """One life of the process, to its exit code. What keeps it from starting is heard as a line of its own."""
        try:
            process = self._open()
        except OSError as error:  # no memory, no descriptors, the folder is gone
            self._hear(f"cannot be started: {error}")
            return self._ended(CANNOT_START)
        with self._changed:
            self._process, self.starts = process, self.starts + 1
            if self._stopping.is_set():
                process.terminate()
            self._changed.notify_all()
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                self._hear(line.rstrip("\n"))
        return self._ended(process.wait())

    def _open(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command.tied(),
            env=dict(self.command.env),
            cwd=self.command.cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C in the terminal is for the supervisor, which stops the children in order
        )

    def _ended(self, code: int) -> int:
        with self._changed:
            self._process, self._ready, self._exit_code = None, None, code
            self._changed.notify_all()
        return code

    def _hear(self, line: str) -> None:
        self._lines.append(line)
        found = _READY.match(line)
        if found is None:
            self._on_line(self.name, line)
            return
        with self._changed:
            self._ready = Ready(int(found["port"]), int(found["admin"]) if found["admin"] else None)
            self._was_ready = True
            self._changed.notify_all()
