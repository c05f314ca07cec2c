"""What a group's target tells the other ranks. True groups: test_rank_group.py, and on GPUs tests/gpu."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import NoReturn

import pytest
import torch

from hedgerow.engine.rank_process import pack, unpack
from hedgerow.engine.rank_target import CudaGroupTarget, GroupCache, GroupTarget
from hedgerow.errors import InvalidRequest, Unavailable
from hedgerow.model.batch import SequenceRows
from hedgerow.model.interface import Prepares, Taps, Verified, WholeSteps
from hedgerow.model.selfcheck import SelfCheckFailed
from kernels.sample import Law
from kernels.tree_accept import WalkRows
from services.verifier.ranks import _check


class Calls:
    """A rank's model on a device, and the group that it is told to: what was asked of each, in order."""

    def __init__(self) -> None:
        self.told: list[tuple[object, ...]] = []
        self.checkpoint_hash = self.kernel_law = self.architecture = None
        self.config = SimpleNamespace(num_hidden_layers=4)
        self.feature_layers: tuple[int, ...] = (1, 3)
        self.feature_width, self.shards, self.waited = 0, 2, 1.5
        self.inside, self.fails, self.direct, self.prepared = 0, False, True, False

    def tell(self, *message: object) -> None:
        assert unpack(io.BytesIO(pack(message))) == message
        self.told.append(message)

    def lose(self, why: str) -> NoReturn:
        raise Unavailable("the rank group", why)

    @contextmanager
    def bounded(self) -> Iterator[None]:
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1

    def new_cache(self, pages: int) -> object:
        return SimpleNamespace(page_size=64, pages=pages)

    def tap(self, layers: Sequence[int]) -> None:
        self.feature_layers = tuple(layers)

    def verify(self, rows: object, cache: object, trees: object) -> Verified:
        assert self.inside == 1, "nothing bounds the step"
        if self.fails:
            raise RuntimeError("CUDA error: an illegal access\nmore of it")
        self.told.append(("here", rows, cache, trees))
        return Verified([], torch.empty(0))

    def gather(self) -> None:
        assert self.inside == 1
        self.told.append(("gathered",))
        self.direct = False

    def prepare(self, *sizes: int) -> None:
        assert self.inside == 0, "a compiler may take longer than a step"
        self.told.append(("prepared", *sizes))


def test_ranks_on_devices_are_told_whole_steps() -> None:
    calls = Calls()
    target = CudaGroupTarget(calls, calls)
    assert isinstance(target, WholeSteps)
    assert isinstance(target, Prepares)
    assert not isinstance(GroupTarget(calls, calls), WholeSteps), "ranks on CPUs have no such pass"
    cache = GroupCache(SimpleNamespace(page_size=64, pages=3), 7, calls)
    law = Law(0.9, 20, 0.95, 0.0, (1 << 64) - 5, 3, 12)
    rows, trees = [SequenceRows(5, (1, 2), [9, 8], (-1, 0), range(2), limit=80)], [WalkRows(0, (-1, 0), [9, 8], law)]
    target.verify(rows, cache, trees)
    target.prepare(8, 9, 256)
    (kind, number, told, laws), here, *prepared = calls.told
    assert (kind, number) == ("verify", 7)
    assert [SequenceRows(*part) for part in told] == [SequenceRows(5, [1, 2], [9, 8], [-1, 0], [0, 1], limit=80)]  # type: ignore[attr-defined]
    assert [WalkRows(*tree[:3], Law(*tree[3])) for tree in laws] == [WalkRows(0, [-1, 0], [9, 8], law)]  # type: ignore[attr-defined]
    assert here == ("here", rows, cache.own, trees)
    assert prepared == [("prepare", 0, 8, 9, 256), ("prepared", 8, 9, 256)]
    assert calls.prepared
    calls.fails = True
    with pytest.raises(Unavailable, match=r"a collective failed: CUDA error: an illegal access$"):
        target.verify(rows, cache, trees)


def test_ranks_are_told_of_layers_and_of_caches_that_are_gone() -> None:
    calls = Calls()
    target = GroupTarget(calls, calls)
    assert isinstance(target, Taps)
    kept, gone = target.new_cache(3), target.new_cache(5)
    del gone
    target.tap((0, 2))
    assert target.feature_layers == (0, 2)
    with pytest.raises(InvalidRequest, match=r"feature_layers.*2 of the target's 4 layers"):
        target.tap((0, 4))
    again = target.new_cache(7)
    assert calls.told == [("cache", 1, 3), ("cache", 2, 5), ("tap", 0, [0, 2]), ("drop", 2), ("cache", 3, 7)]
    assert (kept.number, again.number) == (1, 3)


def test_memory_that_gives_other_bits_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The self-check fails over the ranks' own memory: all ranks are told to gather, and are checked again."""
    calls = Calls()
    target, checked = CudaGroupTarget(calls, calls), list[bool]()

    def check(model: CudaGroupTarget) -> None:
        checked.append(model.direct)
        if model.direct or calls.fails:
            raise SelfCheckFailed("a row in a tree has other bits than the row alone")

    monkeypatch.setattr("services.verifier.ranks.check_rows", check)
    _check(target)
    assert checked == [True, False]
    assert calls.told == [("gather", 0), ("gathered",)]
    calls.fails = True
    with pytest.raises(SelfCheckFailed):
        _check(target)
    assert len(calls.told) == 2, "there is nothing else to turn to"
