"""A group of ranks as a Target like any other: what rank 0 computes, every rank does."""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any, NoReturn, Protocol

import torch

from hedgerow.model.batch import ForwardOutput, SequenceRows
from hedgerow.model.config import K2Config
from hedgerow.model.interface import Verified, checked_taps, made_of
from kernels.tree_accept import Walked, WalkRows


class Told(Protocol):
    """What a target asks of its group."""

    prepared: bool  # no step compiles any more

    def tell(self, *message: Any) -> None: ...
    def lose(self, why: str) -> NoReturn: ...
    def bounded(self) -> contextlib.AbstractContextManager[None]:
        """What is done in it waits for the other ranks where nothing else would end the waiting."""
        ...


class GroupCache:
    """Rank 0's cache, and the number under which every other rank has its own."""

    def __init__(self, own: Any, number: int, group: Told) -> None:
        self.own, self.number, self._group = own, number, group
        self.page_size: int = own.page_size
        self.pages: int = own.pages

    def copy(self, src_slots: Sequence[int], dst_slots: Sequence[int]) -> None:
        self._group.tell("copy", self.number, list(src_slots), list(dst_slots))
        self.own.copy(src_slots, dst_slots)


class GroupTarget:
    """`model`: rank 0's, made by `load_rank`."""

    def __init__(self, model: Any, group: Told) -> None:
        self.model, self.group = model, group
        self.config: K2Config = model.config
        self.checkpoint_hash, self.kernel_law, self.architecture = (
            model.checkpoint_hash, model.kernel_law, model.architecture,
        )  # fmt: skip
        self.feature_width: int = model.feature_width
        self.shards: int = model.shards
        self._caches, self._gone = 0, deque[int]()  # numbers given, and those of caches that nobody has any more

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return self.model.feature_layers  # type: ignore[no-any-return]

    def tap(self, layers: Sequence[int]) -> None:
        """As `interface.Taps.tap`. Every rank: what is asked of the last layer decides which sums are made."""
        checked = checked_taps(layers, self.feature_layers, self.config.num_hidden_layers)
        self.group.tell("tap", 0, list(checked))
        self.model.tap(checked)

    def new_cache(self, pages: int) -> GroupCache:
        while self._gone:  # a finalizer runs in any thread, in the middle of a message too
            self.group.tell("drop", self._gone.popleft())
        self._caches += 1
        self.group.tell("cache", self._caches, pages)
        cache = GroupCache(self.model.new_cache(pages), self._caches, self.group)
        weakref.finalize(cache, self._gone.append, cache.number)
        return cache

    def forward(self, rows: Sequence[SequenceRows], cache: GroupCache) -> ForwardOutput:
        self.group.tell("forward", cache.number, [plain(part) for part in rows])
        with self.together():
            return self.model.forward(rows, cache.own)  # type: ignore[no-any-return]

    def walk(self, logits: torch.Tensor, trees: Sequence[WalkRows]) -> list[Walked]:
        return self.model.walk(logits, trees)  # type: ignore[no-any-return]

    def experts(self) -> float | None:
        return self.model.experts()  # type: ignore[no-any-return]  # every rank routes all rows

    @property
    def made(self) -> int:
        return made_of(self.model)()  # every rank records the same steps

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """A fault in it, of a collective or of torch, is the group's: the ranks are no longer at one point."""
        try:
            yield
        except RuntimeError as error:
            self.group.lose(f"a collective failed: {str(error).splitlines()[0]}")


class CudaGroupTarget(GroupTarget):
    """Of ranks on GPUs: a step of trees is one pass on each of them, and draws there."""

    least_free: int | None = None  # as in `interface.Among`

    @property
    def waited(self) -> float:
        return self.model.waited  # type: ignore[no-any-return]

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        with super().together(), self.group.bounded():
            yield

    def walk(self, logits: torch.Tensor, trees: Sequence[WalkRows]) -> list[Walked]:
        with self.together():  # waits for what `forward` launched
            return super().walk(logits, trees)

    def verify(self, rows: Sequence[SequenceRows], cache: GroupCache, trees: Sequence[WalkRows]) -> Verified:
        told = [(tree.first, list(tree.parents), list(tree.tokens), tuple(tree.law)) for tree in trees]
        self.group.tell("verify", cache.number, [plain(part) for part in rows], told)
        with self.together():
            return self.model.verify(rows, cache.own, trees)  # type: ignore[no-any-return]

    @property
    def direct(self) -> bool:
        """Whether the ranks read each other's memory."""
        return self.model.direct  # type: ignore[no-any-return]

    def gather(self) -> None:
        """They do not from now on: NCCL carries their parts."""
        self.group.tell("gather", 0)
        with self.together():
            self.model.gather()

    def prepare(self, sequences: int, each: int, prompt_rows: int = 0) -> None:
        """Compiles for minutes: a rank that hangs is seen by its silence alone."""
        self.group.tell("prepare", 0, sequences, each, prompt_rows)
        self.model.prepare(sequences, each, prompt_rows)
        self.group.prepared = True


def plain(rows: SequenceRows) -> tuple[Any, ...]:
    """The arguments of an equal SequenceRows, as numbers and lists."""
    values = (getattr(rows, field.name) for field in fields(SequenceRows))
    return tuple(value if isinstance(value, int) else list(value) for value in values)
