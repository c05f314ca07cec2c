"""What bench.kernels makes of its times; the times need a GPU."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

import bench.kernels as kernels
from bench.device_rates import Rates
from bench.kernel_cells import Cell, Work


def ready(replays: int, calls: int) -> Any:
    replayed = itertools.count()
    cell = Cell("op", "T=1", Work(4_000_000), lambda: pytest.fail("made"), 1)
    graph = SimpleNamespace(replay=lambda: next(replayed), replayed=replayed)
    return kernels.Ready(cell, graph, calls, True, replays, [])  # type: ignore[arg-type]


def test_a_sample_is_of_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "milliseconds", lambda run: run() or 2.0)
    one = ready(replays=4, calls=50)
    assert kernels.sample(one) == 10.0
    assert next(one.graph.replayed) == 4


def test_what_is_sustained_is_the_last_two_fifths(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, slower = itertools.count(), itertools.count(1)
    monkeypatch.setattr(kernels, "milliseconds", lambda run: next(slower) * 1e-3)
    monkeypatch.setattr(kernels.time, "monotonic", lambda: next(clock))
    assert kernels.sustained(ready(1, 1), 11) == 8.5  # of 1 .. 10: 7, 8, 9, 10
    assert kernels.sustained(ready(1, 1), 0) is None


def test_a_row_says_both() -> None:
    rates = Rates(read=4e12, copy=4e12, matmul=1e15, sustained=1e15, node=1e-6)
    found = kernels.row(ready(1, 1), [1.9, 2.0, 2.1], 2.5, rates)
    assert (found["us"], found["ratio"], found["sustained_us"]) == (2.0, 2.0, 2.5)
    assert "sustained 2.50 us" in kernels.line(found)
    assert "sustained" not in kernels.line(kernels.row(ready(1, 1), [2.0], None, rates))
