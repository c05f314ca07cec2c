"""The first rank of a tensor-parallel group: starts the others, tells them every step, and knows when one is lost.

    group = RankGroup(folder, count=2, feature_layers=(1, 4), on_lost=...)
    target = group.load()                        # a Target like any other; its calls are the whole group's

A rank that dies, hangs or fails takes the group down within SILENCE + a second: every other rank is ended, `on_lost`
hears why, and calls raise Unavailable from then on. A group is not mended: whoever owns it ends and starts anew.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

import torch

from hedgerow.engine.rank_process import BEAT, Spec, pack
from hedgerow.errors import Unavailable
from hedgerow.model.batch import ForwardOutput, SequenceRows
from hedgerow.model.cache import LatentCache
from hedgerow.model.compiled import CompiledCache, CompiledK2
from hedgerow.model.config import K2Config
from hedgerow.model.k2 import K2Model, check_ranks
from hedgerow.model.loader import Checkpoint
from hedgerow.model.ranked import RankEngine, load_rank
from hedgerow.model.tensors import Share
from kernels.collectives import PeerRanks, connect
from kernels.tree_accept import Walked, WalkRows

log = logging.getLogger(__name__)
SILENCE = 6.0  # seconds without a sign of life, once a rank is ready: it hangs
LOADING_SILENCE = 120.0  # before that: imports hold the interpreter for a while, on a cold disk for long
PATIENCE = 8.0  # seconds of one collective: a rank that lives and does not come
OnLost = Callable[[str], None]


class RankGroup:
    """Ranks 1 .. count - 1 as processes; rank 0 is this one. Calls come from one thread at a time.

    `engine`: what computes every rank. `cores`: among which the other ranks choose their node's (`numa.py`); empty:
    they are not bound.

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
    ) -> None:
        check_ranks([Checkpoint(folder, Share(0, count))], K2Config.from_folder(folder))
        self.folder, self.count, self.patience, self._on_lost = folder, count, patience, on_lost
        self.why = ""  # it is lost; "" while it is not
        self._threads, self._aside = threads, tempfile.TemporaryDirectory(prefix="hedgerow-ranks-")
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._cores, self._engine, self._layers = sorted(cores), engine, list(feature_layers)
        self._laws: dict[int, str] = {}
        self._changed, self._losing, self._ending = threading.Condition(), threading.RLock(), False
        # One thread starts and watches: Linux ends a child when the thread that started it does.
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._watcher.start()

    def load(self) -> GroupTarget:
        """Every rank reads its part, side by side. Raises ConfigError, CheckpointError or Unavailable; then no rank is
        left."""
        try:
            model = load_rank(self._engine, self.folder, self._layers, self._threads, self._meet())
            self._wait_ready(model.kernel_law)
        except BaseException:
            self.close()
            raise
        self._aside.cleanup()  # a process that is killed leaves no folder
        return GroupTarget(model, self)

    @property
    def pids(self) -> list[int]:
        """Of ranks 1 and up."""
        return [rank.pid for rank in self._ranks]

    def tell(self, *message: Any) -> None:
        """All other ranks do this next. Raises Unavailable where the group is lost."""
        self._check()
        data = pack(message)
        for number, rank in enumerate(self._ranks, 1):
            self._write(number, rank, memoryview(data))

    def lose(self, why: str) -> NoReturn:
        """Takes the group down. Raises Unavailable once `on_lost` has returned, whoever called it.

        No step fails before that: an owner whose `on_lost` ends the process leaves no sequence an error.
        """
        with self._losing:
            if not self.why:
                self.why = why
                with self._changed:
                    self._changed.notify_all()
                for rank in self._ranks:  # a stopped one ends too
                    rank.kill()
                if not self._ending:
                    self._on_lost(why)
        raise Unavailable("the rank group", self.why)

    def close(self) -> None:
        """Ends the other ranks."""
        self._ending = True
        self._watcher.join(10)
        for rank in self._ranks:
            rank.kill()
            rank.wait(10)
            for end in (rank.stdin, rank.stdout):
                if end is not None:
                    end.close()
        self._aside.cleanup()

    def _meet(self) -> PeerRanks:
        try:
            return connect("gloo", self._meeting, 0, self.count, self.patience, self._check)
        except RuntimeError as error:
            self.lose(f"the ranks cannot connect: {str(error).splitlines()[0]}")

    @property
    def _meeting(self) -> str:
        return os.path.join(self._aside.name, "meeting")

    def _check(self) -> None:
        if self.why:
            self.lose(self.why)
        if self._ending:
            raise Unavailable("the rank group", "it was closed")

    def _wait_ready(self, law: str) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.why or len(self._laws) == self.count - 1)
        self._check()
        for rank, other in self._laws.items():
            if other != law:
                self.lose(f"rank {rank} computes by {other}, rank 0 by {law}")

    def _write(self, number: int, rank: subprocess.Popen[bytes], data: memoryview) -> None:
        """A rank that hangs does not read, and its pipe fills: bounded by `patience`."""
        assert rank.stdin is not None
        end = time.monotonic() + self.patience
        with selectors.DefaultSelector() as ready:
            ready.register(rank.stdin, selectors.EVENT_WRITE)
            while data:
                if not ready.select(max(0.0, end - time.monotonic())):
                    self.lose(f"rank {number} does not read what it is told")
                try:
                    data = data[os.write(rank.stdin.fileno(), data) :]
                except OSError as error:
                    self.lose(f"rank {number} is gone: {error.strerror}")

    def _start(self) -> None:
        for number in range(1, self.count):
            rank = subprocess.Popen(
                [sys.executable, "-m", "hedgerow.engine.rank_process"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0,
            )  # fmt: skip
            assert rank.stdin is not None
            self._ranks.append(rank)
            spec = Spec(
                str(self.folder.resolve()), number, self.count, self._meeting, self.patience, self._threads, "gloo",
                os.getpid(), self._cores, self._engine, self._layers,
            )  # fmt: skip
            with contextlib.suppress(OSError):  # its end is seen below
                rank.stdin.write(pack(tuple(spec)))
            os.set_blocking(rank.stdin.fileno(), False)

    def _watch(self) -> None:
        with contextlib.suppress(Unavailable):  # said
            try:
                self._start()
                self._listen()
            except OSError as error:
                self.lose(f"a rank cannot be started: {error}")

    def _listen(self) -> None:
        """Until a rank is lost, or the group ends."""
        heard, rest = dict.fromkeys(range(1, self.count), time.monotonic()), dict.fromkeys(range(1, self.count), b"")
        with selectors.DefaultSelector() as ready:
            for number, rank in enumerate(self._ranks, 1):
                assert rank.stdout is not None
                ready.register(rank.stdout, selectors.EVENT_READ, number)
            while not self._ending:
                for key, _ in ready.select(BEAT):
                    data, number = os.read(key.fd, 1 << 16), key.data
                    if not data:
                        self._lost_process(number)
                    heard[number] = time.monotonic()
                    *lines, rest[number] = (rest[number] + data).split(b"\n")
                    for line in filter(None, lines):
                        self._hear(number, line.decode())
                now = time.monotonic()
                for number, last in heard.items():
                    if now - last > (SILENCE if number in self._laws else LOADING_SILENCE):
                        self.lose(f"rank {number} hangs: no sign of life for {now - last:.0f} s")

    def _hear(self, number: int, line: str) -> None:
        kind, _, said = line.partition(" ")
        if kind == "failed":
            self.lose(f"rank {number} failed: {json.loads(said)}")
        with self._changed:
            self._laws[number] = json.loads(said)
            self._changed.notify_all()

    def _lost_process(self, number: int) -> None:
        if self._ending:
            raise Unavailable("the rank group", "it was closed")
        try:
            status = self._ranks[number - 1].wait(1)
        except subprocess.TimeoutExpired:
            self.lose(f"rank {number} closed its output")
        self.lose(f"rank {number} ended with status {status}")


class GroupCache:
    """Rank 0's cache, and the number under which every other rank has its own."""

    def __init__(self, own: LatentCache | CompiledCache, number: int, group: RankGroup) -> None:
        self.own, self.number, self._group = own, number, group
        self.page_size, self.pages = own.page_size, own.pages

    def copy(self, src_slots: Sequence[int], dst_slots: Sequence[int]) -> None:
        self._group.tell("copy", self.number, list(src_slots), list(dst_slots))
        self.own.copy(src_slots, dst_slots)


class GroupTarget:
    """The group as a Target: what rank 0 computes, every rank does."""

    def __init__(self, model: K2Model | CompiledK2, group: RankGroup) -> None:
        self.model, self.group = model, group
        self.config: K2Config = model.config
        self.checkpoint_hash, self.kernel_law, self.architecture = (
            model.checkpoint_hash, model.kernel_law, model.architecture,
        )  # fmt: skip
        self.feature_layers, self.feature_width = model.feature_layers, model.feature_width
        self.shards, self._caches = model.shards, 0

    def new_cache(self, pages: int) -> GroupCache:
        self._caches += 1
        self.group.tell("cache", self._caches, pages)
        return GroupCache(self.model.new_cache(pages), self._caches, self.group)

    def forward(self, rows: Sequence[SequenceRows], cache: GroupCache) -> ForwardOutput:
        self.group.tell("forward", cache.number, [plain(part) for part in rows])
        try:
            own: Any = cache.own  # made by this model
            return self.model.forward(rows, own)
        except RuntimeError as error:  # of a collective, or of torch: the ranks are no longer at one point
            self.group.lose(f"a collective failed: {str(error).splitlines()[0]}")

    def walk(self, logits: torch.Tensor, trees: Sequence[WalkRows]) -> list[Walked]:
        return self.model.walk(logits, trees)

    def experts(self) -> float | None:
        return self.model.experts()  # every rank routes all rows


def plain(rows: SequenceRows) -> tuple[Any, ...]:
    """The arguments of an equal SequenceRows, as numbers and lists."""
    values = (getattr(rows, field.name) for field in fields(SequenceRows))
    return tuple(value if isinstance(value, int) else list(value) for value in values)
