"""Answers health for a process that may hang: `python -m hedgerow.rpc.health_process SPEC`; see `health_keeper.py`.

A process that waits for a device may not answer anybody: where a driver's call does not return, every thread may wait
for it. So this one, which holds no model and no context of a device, answers in its place. It is a program of its own,
not a fork, and has none of the other's files, memory and devices. On its standard input the other writes a beat a line,
twice a second and at each change of its health. Where none has come for SILENT seconds, all that is asked about is
NOT_SERVING, "live" too; with the next beat it is what that says.

It ends with the process that started it: at the end of its input, or by the kernel. It says `ready PORT` once, or
`failed WHY`, on standard output. SIGINT and SIGTERM are ignored: who drains is asked about until its end.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import grpc.aio

from hedgerow.errors import HedgerowError
from hedgerow.rpc.health import Health
from hedgerow.rpc.logs import get_log, set_up_logging
from hedgerow.rpc.tls import TlsConfig, own_files, server_credentials
from hedgerow.scheduling import SHORT, ask_for_slice

BEAT = 0.5  # seconds between beats
SILENT = 6.0  # without one: a busy machine is late by a second or two; a hang is to be known within ten
TICK = 0.25
MOST_LINE = 4096  # bytes of a beat: a pipe takes so many at once or none of them (pipe(7))
MOST_WHY = 320  # characters, of up to twelve bytes each
MOST_CALLS = 256  # open at once
BIND_PATIENCE, BIND_AGAIN = 3.0, 0.1  # seconds; the port may be that of a process that is just ending
PROCESS = "process"
PR_SET_PDEATHSIG = 1
ENDS = (signal.SIGINT, signal.SIGTERM)
log = get_log(__name__)


class Spec(NamedTuple):
    """What it is told first. There is nothing secret in it: others can read the arguments of a program."""

    listen: str
    services: list[str]
    tls: list[str] | None  # certificate, key and, where clients must show theirs, authorities
    parent: int  # process id
    log: list[str]  # service, level, form


class Beat(NamedTuple):
    """A sign of life."""

    at: float  # seconds of the monotonic clock, which is one for all processes of a machine
    why: str  # what keeps the process from SERVING; "" where nothing does
    alive: bool = True  # False: only its end helps

    def pack(self) -> bytes:
        """One line of at most MOST_LINE bytes."""
        return json.dumps([self.at, self.why[:MOST_WHY], self.alive]).encode() + b"\n"


class Pulse:
    """What the beats so far say of the process; `health` is told."""

    def __init__(self, health: Health, silent: float = SILENT, clock: Callable[[], float] = time.monotonic) -> None:
        self._health, self._silent, self._clock = health, silent, clock
        self._last, self._alive, self._missing = clock(), True, False

    @property
    def beating(self) -> bool:
        """Whether the last beat is not older than `silent` seconds; one that was written long before it is read is."""
        return self._clock() - self._last <= self._silent

    @property
    def alive(self) -> bool:
        """For "live"."""
        return self.beating and self._alive

    def beat(self, beat: Beat) -> None:
        """One has come."""
        self._last = max(self._last, min(beat.at, self._clock()))
        self._alive = beat.alive
        self._health.report(PROCESS, beat.why or None)
        self.look()

    def look(self) -> None:
        """To be called every TICK: a hang brings nothing to read."""
        missing, waited = not self.beating, round(self._clock() - self._last, 1)
        if missing == self._missing:
            return
        self._missing = missing
        if missing:
            log.warning("the process hangs: it gave no sign of life; probes get NOT_SERVING", seconds=waited)
        else:
            log.info("the process gives signs of life again")
        self._health.report("beats", f"no sign of life for {self._silent:g} s" if missing else None)


class Lines:
    """Beats out of what is read in pieces."""

    def __init__(self) -> None:
        self._rest = b""

    def read(self, data: bytes) -> list[Beat]:
        """Those that are whole. Raises ValueError."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MOST_LINE:
            raise ValueError(f"a line of more than {MOST_LINE} bytes")
        return [Beat(*json.loads(line)) for line in lines]


def main() -> None:
    for each in ENDS:
        signal.signal(each, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDS)  # they were kept back until now
    spec = Spec(*json.loads(sys.argv[1]))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != spec.parent:
        os._exit(1)
    told = os.dup(1)
    os.dup2(2, 1)  # what anybody prints is for the log
    set_up_logging(*spec.log)
    ask_for_slice(SHORT)
    try:
        asyncio.run(serve(spec, told))
    except (HedgerowError, OSError, ValueError) as error:
        _say(told, f"failed {error}")
        os._exit(1)


async def serve(spec: Spec, told: int) -> None:
    """Until the end of the input, with which the process ends. Raises OSError where it cannot listen, ConfigError for
    files of TLS."""
    health = Health(spec.services)
    health.report(PROCESS, "no word of it yet")
    pulse, lines, ended = Pulse(health), Lines(), asyncio.get_running_loop().create_future()
    health.alive = lambda: pulse.alive
    server = grpc.aio.server(options=OPTIONS, maximum_concurrent_rpcs=MOST_CALLS)
    server.add_generic_rpc_handlers((health.handler(),))
    port = await _bind(server, spec)

    def arrived() -> None:
        data = os.read(0, 1 << 16)
        if not data:  # the process has ended, however it did; whoever starts it anew wants the port
            os._exit(0)
        try:
            for beat in lines.read(data):
                pulse.beat(beat)
        except ValueError as error:
            asyncio.get_running_loop().remove_reader(0)
            ended.set_exception(error)

    os.set_blocking(0, False)
    asyncio.get_running_loop().add_reader(0, arrived)
    await server.start()
    health.start()
    _say(told, f"ready {port}")
    while not ended.done():
        pulse.look()
        await asyncio.wait([ended], timeout=TICK)
    ended.result()


OPTIONS = (
    ("grpc.so_reuseport", 0),  # a port that is taken must fail
    ("grpc.max_receive_message_length", 1 << 16),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)


async def _bind(server: grpc.aio.Server, spec: Spec) -> int:
    files, client_certs = None, False
    if spec.tls is not None:
        cert, key, *ca = map(Path, spec.tls)
        client_certs = bool(ca)
        config = TlsConfig(tls_cert=cert, tls_key=key, tls_ca=ca[0] if ca else None, tls_client_certs=client_certs)
        files = own_files(config)
    end = time.monotonic() + BIND_PATIENCE
    while True:
        try:
            if files is None:
                return server.add_insecure_port(spec.listen)
            return server.add_secure_port(spec.listen, server_credentials(files, client_certs))
        except RuntimeError as error:
            if time.monotonic() > end:
                raise OSError(f"cannot listen there: {error}") from error
        await asyncio.sleep(BIND_AGAIN)


def _say(told: int, line: str) -> None:
    try:
        os.write(told, line.encode() + b"\n")
    except OSError:  # nobody is there any more
        os._exit(1)


if __name__ == "__main__":
    main()
