"""Keeps the process that answers health in this one's place (`health_process.py`), and tells it how this one is.

The beats come from the event loop: where that hangs, they stop. A beat never waits: one for which the pipe has no room
is left out. A process that ends, or whose pipe stays full, is started anew, with a longer pause each time.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Coroutine
from typing import Any

from hedgerow.rpc.config import ConfigError, variable_of
from hedgerow.rpc.health import Health
from hedgerow.rpc.health_process import BEAT, ENDS, MOST_LINE, SILENT, Beat, Spec
from hedgerow.rpc.logs import get_log
from hedgerow.rpc.server import ServerConfig
from hedgerow.rpc.work import serve_while

START_PATIENCE = 60.0  # seconds; it takes less than one on an idle machine
END_PATIENCE = 5.0
FIRST_DELAY, LAST_DELAY = 0.5, 30.0  # seconds between two starts
WHAT = "health process"
log = get_log(__name__)


async def answered_beside(
    serving: Coroutine[Any, Any, None], name: str, listen: str | None, config: ServerConfig, health: Health
) -> None:
    """`serving`, and at `listen` a process that answers its health until it has drained; None: there is none.

    Raises what `serving` does, and ConfigError where nobody can listen there.
    """
    if listen is None:
        await serving
    else:
        await serve_while(serving, Keeper(spec_of(name, listen, config, health), health).run())


def spec_of(name: str, listen: str, config: ServerConfig, health: Health) -> Spec:
    """Its port speaks TLS as the admin port does."""
    tls = None
    if config.tls_cert is not None and config.tls_admin:
        given = (config.tls_cert, config.tls_key, config.tls_ca if config.tls_client_certs else None)
        tls = [str(path) for path in given if path is not None]
    said = [f"{name}-health", config.log_level, config.log_format]
    return Spec(listen, list(health.services), tls, os.getpid(), said)


class Keeper:
    """One such process at a time. `health`: of this process, which is not SERVING before the first one answers."""

    def __init__(self, spec: Spec, health: Health) -> None:
        self._spec, self._health = spec, health
        self._changed = asyncio.Event()
        self._answered = False  # ever
        self.process: subprocess.Popen[bytes] | None = None
        health.report(WHAT, "it is starting")

    async def run(self) -> None:
        """Until cancelled. Raises ConfigError where the first one cannot answer."""
        delay = FIRST_DELAY
        while True:
            began = time.monotonic()
            try:
                why = await self._run_one()
            except OSError as error:  # no process or file is left to be had; the service needs none
                why = str(error)
            if not self._answered:
                raise ConfigError(variable_of("health_listen"), repr(self._spec.listen), why)
            delay = FIRST_DELAY if time.monotonic() - began > LAST_DELAY else delay
            log.warning("the process that answers health is over; it is started anew", why=why, seconds=delay)
            await asyncio.sleep(delay)
            delay = min(2 * delay, LAST_DELAY)

    async def _run_one(self) -> str:
        """Why it is over."""
        process = self.process = start(self._spec)
        try:
            with self._health.watching(self._changed):
                return await self._beats(process)
        finally:
            process.kill()
            try:  # at once, unless the kernel itself waits for something: then whoever comes later reaps it
                with contextlib.suppress(subprocess.TimeoutExpired):
                    await asyncio.to_thread(process.wait, END_PATIENCE)
            finally:
                for end in (process.stdin, process.stdout):
                    assert end is not None
                    with contextlib.suppress(OSError):
                        end.close()

    async def _beats(self, process: subprocess.Popen[bytes]) -> str:
        assert process.stdout is not None
        said = asyncio.ensure_future(asyncio.to_thread(process.stdout.readline, MOST_LINE))
        said.add_done_callback(lambda _: self._changed.set())
        began = taken = time.monotonic()
        ready = False
        try:
            while process.poll() is None:
                now = time.monotonic()
                if self._beat(process) or not ready:  # it does not read before it is ready
                    taken = now
                if said.done() and not ready and not (ready := self._said(process, _text(said.result()))):
                    break
                if now - taken > SILENT or not (ready or now - began < START_PATIENCE):
                    return "it hangs"
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), BEAT)
                self._changed.clear()
            if not ready:
                return _text(await said).removeprefix("failed ") or "it ended before it answered"
            return f"it ended with status {process.returncode}"
        finally:
            said.cancel()

    def _said(self, process: subprocess.Popen[bytes], word: str) -> bool:
        kind, _, port = word.partition(" ")
        if kind != "ready":
            return False
        log.info("a process of its own answers health", pid=process.pid, port=port)
        self._answered = True
        self._health.facts["health"] = f"port {port}, process {process.pid}"
        self._health.report(WHAT, None)
        return True

    def _beat(self, process: subprocess.Popen[bytes]) -> bool:
        """Whether it was taken."""
        assert process.stdin is not None
        why = [f"{what}: {why}" for what, why in self._health.troubles.items() if what != WHAT]
        if self._health.draining.is_set():
            why.append("it drains")
        try:
            os.write(process.stdin.fileno(), Beat(time.monotonic(), "; ".join(why), self._health.alive()).pack())
        except BlockingIOError:
            return False
        except OSError:  # it has ended, which is seen where it is waited for
            return True
        return True


def _text(line: bytes) -> str:
    return line.decode(errors="replace").strip()


def start(spec: Spec) -> subprocess.Popen[bytes]:
    """A new program with no file of this process but its log; its input does not block. Raises OSError."""
    arguments = json.dumps(spec)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)  # it inherits that, and ignores them once it can
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "hedgerow.rpc.health_process", arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0,
        )  # fmt: skip
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert process.stdin is not None
    os.set_blocking(process.stdin.fileno(), False)
    if hasattr(fcntl, "F_SETPIPE_SZ"):  # so that it is soon noticed when nobody reads
        with contextlib.suppress(OSError):
            fcntl.fcntl(process.stdin.fileno(), fcntl.F_SETPIPE_SZ, MOST_LINE)
    return process
