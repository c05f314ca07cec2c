"""The first rank of a tensor-parallel group: starts the others, tells them every step, and knows when one is lost.

    group = RankGroup(folder, count=2, feature_layers=(1, 4), on_lost=...)
    target = group.load()                        # a Target like any other; its calls are the whole group's

The others are processes of this host, or of several (`rank_door.py` lets them in, `rank_host.py` is their side).

A rank that dies, hangs or fails takes the group down within SILENCE + a second: every other rank is ended, `on_lost`
hears why, and calls raise Unavailable from then on. A group is not mended: whoever owns it ends and starts anew.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import threading
import time
from collections.abc import Callable, Iterator, Sequence, Set
from pathlib import Path
from typing import Any, NoReturn

from hedgerow.engine.rank_board import Board
from hedgerow.engine.rank_channels import Channel, LocalRank, RemoteRank
from hedgerow.engine.rank_door import Door, Split
from hedgerow.engine.rank_host import Terms
from hedgerow.engine.rank_process import BEAT, Spec, pack
from hedgerow.engine.rank_target import CudaGroupTarget, GroupTarget
from hedgerow.engine.rank_wire import WireError
from hedgerow.errors import Unavailable
from hedgerow.model.config import K2Config
from hedgerow.model.k2 import check_ranks
from hedgerow.model.loader import Checkpoint
from hedgerow.model.manifest import Manifest
from hedgerow.model.ranked import RankEngine, backend_of, load_rank
from hedgerow.model.tensors import Share
from kernels.collectives import PeerRanks, connect

log = logging.getLogger(__name__)
SILENCE = 6.0  # seconds without a sign of life, once a rank is ready: it hangs
STOOD_STILL = 3.0  # between two looks at the ranks: it was this process that did
LOADING_SILENCE = 120.0  # before that: imports hold the interpreter for a while, on a cold disk for long
PATIENCE = 8.0  # seconds of one collective: a rank that lives and does not come
STEP = 30.0  # seconds of a step on GPUs, which wait there without a bound; it may compile a kernel
PREPARED_STEP = 8.0  # once all shapes of steps have been met
OnLost = Callable[[str], None]


def check_folder(folder: Path, numbers: Sequence[int], count: int) -> None:
    """Raises ConfigError or CheckpointError, by headers, where ranks `numbers` of `count` cannot read their parts: of a
    converted folder each rank's file is looked at."""
    files = numbers if Manifest.read(folder) is not None else numbers[:1]
    check_ranks([Checkpoint(folder, Share(rank, count)) for rank in files], K2Config.from_folder(folder))


class RankGroup:
    """Ranks 1 .. count - 1 as processes; rank 0 is this one. Calls come from one thread at a time.

    `engine`: what computes every rank. `cores`: among which this host's other ranks choose their node's (`numa.py`);
    empty: they are not bound. `door`: of a group of several `hosts`, where the others come in; it is closed here.
    `on_leaving` hears of a host that is about to end. `address`: of this host, for the others' ranks; empty: the one at
    which they came in. `room`: rows of a step and pages of the cache that each device must have memory for.

    Raises ConfigError or CheckpointError for a folder that so many ranks cannot share, before anything is started.
    """

    def __init__(
        self,
        folder: Path,
        count: int,
        threads: int = 1,
        on_lost: OnLost = lambda why: None,
        patience: float = PATIENCE,
        cores: Set[int] = frozenset(),
        engine: RankEngine = "torch",
        feature_layers: Sequence[int] = (),
        hosts: int = 1,
        door: Door | None = None,
        on_leaving: OnLost = lambda who: None,
        address: str = "",
        room: tuple[int, int | None] = (0, None),
    ) -> None:
        self._split = Split(count, hosts)
        check_folder(folder, self._split.of(0), count)
        self.folder, self.count, self.patience, self._on_lost = folder, count, patience, on_lost
        self.why = ""  # it is lost; "" while it is not
        self._room, self._door, self._on_leaving = room, door, on_leaving
        self._threads, self._board = threads, Board(self._check, self._write)
        self._ranks: dict[int, Channel] = {}
        self._engine, self._cores = engine, sorted(cores)
        self._terms = Terms(patience, backend_of(engine), engine, list(feature_layers))
        self._given, self._address = address, "127.0.0.1" if door is None else ""
        self._ready: dict[int, tuple[str, str]] = {}  # law and checkpoint of each other rank
        self._free: list[int] = []  # bytes of other ranks' devices that their weights left
        self._begun: float | None = None  # when what must not last for ever began
        self.prepared = False  # no step compiles any more
        self._changed, self._losing, self._ending = threading.Condition(), threading.RLock(), False
        # One thread starts and watches: Linux ends a child when the thread that started it does.
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._watcher.start()

    def load(self) -> GroupTarget:
        """Every rank reads its part, side by side. Raises ConfigError, CheckpointError or Unavailable; then no rank is
        left."""
        try:
            model = load_rank(self._engine, self.folder, self._terms.feature_layers, self._threads, self._meet())
            self._wait_ready(model.kernel_law, model.checkpoint_hash)
        except BaseException:
            self.close()
            raise
        if self._engine != "cuda":
            return GroupTarget(model, self)
        target = CudaGroupTarget(model, self)
        target.least_free = min(self._free, default=None)
        return target

    @property
    def pids(self) -> list[int]:
        """Of this host's ranks, 1 and up."""
        return [rank.process.pid for rank in self._ranks.values() if isinstance(rank, LocalRank)]

    def tell(self, *message: Any) -> None:
        """All other ranks do this next. Raises Unavailable where the group is lost."""
        self._check()
        data = pack(message)
        for rank in self._ranks.values():
            self._write(rank, data)

    @contextlib.contextmanager
    def bounded(self) -> Iterator[None]:
        """What is done in it may take STEP seconds, or PREPARED_STEP; then the group is lost, whoever it waits for."""
        self._begun = time.monotonic()
        try:
            yield
        finally:
            self._begun = None

    def lose(self, why: str) -> NoReturn:
        """Takes the group down. Raises Unavailable once `on_lost` has returned, whoever called it.

        No step fails before that: an owner whose `on_lost` ends the process leaves no sequence an error.
        """
        with self._losing:
            if not self.why:
                self.why = why
                with self._changed:
                    self._changed.notify_all()
                for rank in self._ranks.values():  # a stopped one ends too
                    rank.kill()
                if not self._ending:
                    self._on_lost(why)
        raise Unavailable("the rank group", self.why)

    def close(self) -> None:
        """Ends the other ranks."""
        self._ending = True
        self._watcher.join(10)
        if self._door is not None:
            self._door.close()
        for rank in self._ranks.values():
            rank.close()

    def _meet(self) -> PeerRanks:
        with self._changed:
            self._changed.wait_for(lambda: self.why or self._address or self._ending)
        self._check()
        backend: Any = self._terms.backend
        try:
            return connect(backend, self._board, 0, self.count, self.patience, address=self._address)
        except RuntimeError as error:
            self.lose(f"the ranks cannot connect: {str(error).splitlines()[0]}")

    def _check(self) -> None:
        if self.why:
            self.lose(self.why)
        if self._ending:
            raise Unavailable("the rank group", "it was closed")

    def _wait_ready(self, *mine: str) -> None:
        """All others have the law and the checkpoint of rank 0; one that is not its host's first tells of none."""
        with self._changed:
            self._changed.wait_for(lambda: self.why or len(self._ready) == self.count - 1)
        self._check()
        for rank, told in self._ready.items():
            for what, there, here in zip(("law", "checkpoint"), told, mine, strict=True):
                if there and there != here:
                    self.lose(f"{self._ranks[rank].name} has the {what} {there}, rank 0 has {here}")

    def _write(self, rank: Channel, data: bytes) -> None:
        """A rank that hangs does not read, and its pipe fills: bounded by `patience`."""
        try:
            rank.write(data, self.patience)
        except WireError as error:
            self.lose(f"{rank.name} cannot be told: {error}")

    def _start(self) -> None:
        """The other hosts' ranks first: nothing waits for them with its memory full."""
        others: dict[int, RemoteRank] = {}
        if self._door is not None:
            others = self._door.gather(self._check)
            self._ranks |= others
            for rank in others.values():
                self._write(rank, self._terms.packed())
            self._address = self._given or next(iter(others.values())).wire.here
        for number in self._split.of(0)[1:]:
            terms = self._terms
            spec = Spec(
                str(self.folder.resolve()), number, self.count, (number, self._split.each), self._address,
                terms.patience, self._threads, terms.backend, os.getpid(), self._cores, terms.engine,
                terms.feature_layers, False, self._room,
            )  # fmt: skip
            self._ranks[number] = LocalRank(spec)
        with self._changed:
            self._changed.notify_all()

    def _watch(self) -> None:
        with contextlib.suppress(Unavailable):  # said
            try:
                self._start()
                self._listen()
            except Unavailable:
                raise
            except OSError as error:
                self.lose(f"a rank cannot be started: {error}")
            except Exception as error:  # noqa: BLE001  who waits for this thread would do so for ever
                self.lose(f"nobody watches the ranks: {type(error).__name__}: {error}")

    def _listen(self) -> None:
        """Until a rank is lost, or the group ends."""
        looked = time.monotonic()
        heard, rest = dict.fromkeys(self._ranks, looked), dict.fromkeys(self._ranks, b"")
        with selectors.DefaultSelector() as ready:
            for number, rank in self._ranks.items():
                ready.register(rank, selectors.EVENT_READ, number)
            while not self._ending:
                for key, _ in ready.select(BEAT):
                    number = key.data
                    heard[number] = time.monotonic()
                    *lines, rest[number] = (rest[number] + self._read(self._ranks[number])).split(b"\n")
                    for line in filter(None, lines):
                        self._hear(number, line.decode())
                if time.monotonic() - looked > STOOD_STILL:  # what the ranks said meanwhile is still to be read
                    heard = dict.fromkeys(heard, time.monotonic())
                looked = time.monotonic()
                self._beat(heard)

    def _beat(self, heard: dict[int, float]) -> None:
        now = time.monotonic()
        for number, last in heard.items():
            if now - last > (SILENCE if number in self._ready else LOADING_SILENCE):
                self.lose(f"{self._ranks[number].name} hangs: no sign of life for {now - last:.0f} s")
        if (begun := self._begun) is not None and now - begun > (PREPARED_STEP if self.prepared else STEP):
            self.lose(f"a step is not over after {now - begun:.0f} s")
        for rank in self._ranks.values():
            try:
                rank.beat()
            except WireError as error:
                self.lose(f"{rank.name} cannot be told: {error}")

    def _read(self, rank: Channel) -> bytes:
        try:
            data = rank.read()
        except WireError as error:
            self._check()
            self.lose(f"{rank.name} is gone: {error}")
        if not data:
            self._check()
            self.lose(f"{rank.name} {rank.ended()}")
        return data

    def _hear(self, number: int, line: str) -> None:
        kind, _, said = line.partition(" ")
        rank = self._ranks[number]
        if kind == "failed":
            self.lose(f"{rank.name} failed: {json.loads(said)}")
        if kind in ("put", "get"):
            self._board.line(rank, kind, said)
        if kind == "leaving":
            self._on_leaving(rank.name)
        if kind == "ready":
            law, checkpoint, free = json.loads(said)
            with self._changed:
                self._free += [] if free is None else [free]
                self._ready[number] = (law, checkpoint)
                self._changed.notify_all()
