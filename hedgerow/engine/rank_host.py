"""A host of a group that is not its first: it starts its ranks for the first host, and passes on what is said.

    host = RankHost(Joins("10.0.0.7:7414", secret, host=1, split=Split(4, 2)), folder, threads=1)
    host.run()                                   # until host.close(); starts anew whenever the group is over

Each rank has a connection and a thread of its own. The group is over for this host when a connection breaks, a rank
ends, or nothing comes from the first host for SILENCE seconds; then all its ranks are ended, and it asks to be let in
again. The first host does the same from its side, so that either of them may be the one that was lost.
"""

from __future__ import annotations

import contextlib
import logging
import marshal
import os
import selectors
import socket
import subprocess
import threading
import time
from collections.abc import Set
from pathlib import Path
from typing import NamedTuple

from hedgerow.engine.rank_channels import start
from hedgerow.engine.rank_door import PROOF_WITHIN, SPEAKS, Split
from hedgerow.engine.rank_process import BEAT, BEAT_MESSAGE, LENGTH, Spec, pack
from hedgerow.engine.rank_tls import Cipher, Context
from hedgerow.engine.rank_wire import Sealed, WireError, knock, write_all

log = logging.getLogger(__name__)
SILENCE = 20.0  # seconds without a word of the first host, once a rank is ready
LOADING_SILENCE = 120.0  # before that: imports hold its interpreter for a while
PATIENCE = 8.0  # seconds until something that is written must have been read
AGAIN, REMINDER = 1.0, 10.0  # seconds between two tries to come in, and between two lines that say so
READY, LEAVING = b"ready ", b"leaving\n"


class Terms(NamedTuple):
    """What the first host decides for all ranks."""

    patience: float
    backend: str
    engine: str
    feature_layers: list[int]

    def packed(self) -> bytes:
        return pack(tuple(self))


class Joins(NamedTuple):
    """Which group a host belongs to, and as what."""

    leader: str  # host:port
    secret: bytes
    host: int
    split: Split
    address: str = ""  # of this host, for the other ranks; empty: the one that leads to the first host
    tls: Context | None = None  # what is shown, and asked of the first host; None: without

    def connect(self, rank: int) -> Sealed:
        """Raises WireError where it is not let in, OSError where there is nobody."""
        name, _, port = self.leader.rpartition(":")
        name, source = name.strip("[]"), (self.address, 0) if self.address else None
        cipher = None if self.tls is None else Cipher(self.tls(), name)
        connection = socket.create_connection((name, int(port)), PROOF_WITHIN, source)
        claim = {"speaks": SPEAKS, "ranks": self.split.ranks, "hosts": self.split.hosts, "host": self.host}
        try:
            return knock(connection, self.secret, claim | {"rank": rank}, PROOF_WITHIN, cipher)
        except BaseException:
            connection.close()
            raise


class RankHost:
    """`why`: what keeps this host's ranks from serving; "" while nothing does."""

    def __init__(self, joins: Joins, folder: Path, threads: int, cores: Set[int] = frozenset()) -> None:
        self.joins, self.folder, self.threads, self.cores = joins, folder, threads, sorted(cores)
        self.why = "it has not joined the group yet"
        self.closed = threading.Event()
        self._life: _Life | None = None
        self._last = False

    def run(self) -> None:
        """Joins the group, again and again; returns when it is closed, or has left."""
        said = -REMINDER
        while not (self.closed.is_set() or self._last):
            life = self._life = _Life(self)
            life.run()
            self.why = f"it is not in the group: {life.why}"
            if life.joined or time.monotonic() - said > REMINDER:
                said = time.monotonic()
                log.info("this host is not in the group: %s", life.why)
            self.closed.wait(AGAIN)

    def leave(self) -> bool:
        """Tells the first host that this one is about to end, so that its sequences can go elsewhere; its ranks go on
        until the first host ends. Whether there was a group to tell."""
        self._last = True
        told = self._life is not None and self._life.leave()
        if not told:
            self.close()
        return told

    @property
    def pids(self) -> list[int]:
        """Of this host's ranks."""
        return [] if self._life is None else [rank.pid for rank in self._life.ranks]

    def close(self) -> None:
        """Ends its ranks."""
        self.closed.set()


class _Life:
    """One membership of a host in its group, from its first connection to its end."""

    def __init__(self, host: RankHost) -> None:
        self._host, self._joins = host, host.joins
        self._over, self._turn = threading.Event(), threading.Lock()
        self._wires: dict[int, Sealed] = {}
        self.ranks: list[subprocess.Popen[bytes]] = []
        self.why, self.joined, self._unready = "", False, self._joins.split.each

    def run(self) -> None:
        """Returns when the group is over for this host, and none of its ranks is left."""
        try:
            for rank in self._joins.split.of(self._joins.host):
                self._wires[rank] = self._joins.connect(rank)
            self.joined = True
            self._host.why = "its ranks are not ready"
            log.info("this host is in the group of %s", self._joins.leader)
            serving = [threading.Thread(target=self._serve, args=pair, daemon=True) for pair in self._wires.items()]
            for thread in serving:
                thread.start()
            for thread in serving:
                thread.join()
        except OSError as error:
            self._end(str(error))
        finally:
            for wire in self._wires.values():
                wire.close()

    def leave(self) -> bool:
        if not self.joined or self._over.is_set():
            return False
        with contextlib.suppress(WireError):
            next(iter(self._wires.values())).send(LEAVING, 1.0)  # one says it for all
        return True

    def _end(self, why: str) -> None:
        """The first reason stays."""
        with self._turn:
            self.why = self.why or why
        self._over.set()

    def _serve(self, rank: int, wire: Sealed) -> None:
        """One rank, to its end. A thread of its own: the kernel ends a child with the thread that started it."""
        process: subprocess.Popen[bytes] | None = None
        try:
            process = self._start(rank, wire)
            self._pass_on(rank, wire, process)
        except (OSError, ValueError) as error:
            self._end(f"rank {rank}: {error}")
        finally:
            self._end(f"rank {rank} is over")
            wire.end()
            if process is not None:
                process.kill()
                process.wait()
                for end in (process.stdin, process.stdout):
                    assert end is not None
                    end.close()

    def _start(self, rank: int, wire: Sealed) -> subprocess.Popen[bytes]:
        terms = Terms(*marshal.loads(self._first_word(wire)[LENGTH.size :]))
        split, place = self._joins.split, rank - self._joins.split.of(self._joins.host).start
        spec = Spec(
            str(self._host.folder.resolve()), rank, split.ranks, (place, split.each), self._joins.address or wire.here,
            terms.patience, self._host.threads, terms.backend, os.getpid(), self._host.cores, terms.engine,
            terms.feature_layers, place == 0,
        )  # fmt: skip
        process = start(spec)
        with self._turn:
            self.ranks.append(process)
        return process

    def _first_word(self, wire: Sealed) -> bytes:
        """What comes once all hosts are there; before that, signs of life."""
        heard = time.monotonic()
        with selectors.DefaultSelector() as ready:
            ready.register(wire, selectors.EVENT_READ)
            while True:
                ready.select(BEAT)
                for message in wire.read():  # it may have come with the verdict, where no selector sees it
                    heard = time.monotonic()
                    if message != BEAT_MESSAGE:
                        return message
                self._check(heard, LOADING_SILENCE)

    def _pass_on(self, rank: int, wire: Sealed, process: subprocess.Popen[bytes]) -> None:
        """Until one end is gone."""
        assert process.stdin is not None
        assert process.stdout is not None
        to, said, heard, silence = process.stdin.fileno(), process.stdout.fileno(), time.monotonic(), LOADING_SILENCE
        with selectors.DefaultSelector() as ready:
            ready.register(wire, selectors.EVENT_READ)
            ready.register(said, selectors.EVENT_READ)
            while True:
                for key, _ in ready.select(BEAT):
                    if key.fd == said:
                        data = os.read(said, 1 << 16)
                        if not data:
                            raise WireError(f"it ended with status {process.wait()}")
                        wire.send(data, PATIENCE)
                        if data.startswith(READY) or b"\n" + READY in data:
                            silence = SILENCE
                            self._is_ready()
                    else:
                        heard = time.monotonic()
                        write_all(to, b"".join(wire.read()), PATIENCE)
                self._check(heard, silence)

    def _is_ready(self) -> None:
        with self._turn:
            self._unready -= 1
            if not self._unready:
                self._host.why = ""

    def _check(self, heard: float, silence: float) -> None:
        """Raises WireError where there is no use in going on."""
        if self._over.is_set() or self._host.closed.is_set():
            raise WireError("this host's ranks end")
        if time.monotonic() - heard > silence:
            raise WireError(f"no sign of life of the first host for {silence:.0f} s")
