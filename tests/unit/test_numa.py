"""Ranks on NUMA nodes: from what Linux tells of them to the cores that a rank is bound to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hedgerow.engine.numa import cores, nodes, place

ROOT = Path(__file__).resolve().parents[2]


def write(root: Path, *lists: str) -> Path:
    for number, text in enumerate(lists):
        (root / f"node{number}").mkdir(parents=True)
        (root / f"node{number}" / "cpulist").write_text(text + "\n")
    return root


@pytest.mark.parametrize(
    ("text", "numbers"), [("0", {0}), ("0-3", {0, 1, 2, 3}), ("0-1,8,10-11", {0, 1, 8, 10, 11}), ("", set())]
)
def test_lists_of_cores(text: str, numbers: set[int]) -> None:
    assert cores(text) == numbers


def test_nodes_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    write(tmp_path, *(f"{n}" for n in range(11)))
    assert nodes(tmp_path) == [frozenset({n}) for n in range(11)]
    assert nodes(tmp_path / "nowhere") == []
    (tmp_path / "node3" / "cpulist").write_text("all of them")
    assert nodes(tmp_path) == []


def test_ranks_are_spread_over_the_nodes_in_their_order() -> None:
    two = [frozenset(range(8)), frozenset(range(8, 16))]
    everything = set(range(16))
    assert [min(place(rank, 8, two, everything)) for rank in range(8)] == [0, 0, 0, 0, 8, 8, 8, 8]
    assert [min(place(rank, 2, two, everything)) for rank in range(2)] == [0, 8]
    four = [frozenset({n}) for n in range(4)]
    assert [place(rank, 2, four, {0, 1, 2, 3}) for rank in range(2)] == [{0}, {2}]


def test_only_usable_cores_count() -> None:
    """A container with cores of one node is left alone, and a node without cores (memory alone) holds no rank."""
    two = [frozenset(range(8)), frozenset(range(8, 16))]
    assert place(1, 2, two, {0, 1, 2}) == {0, 1, 2}
    assert place(1, 2, two, {3, 9}) == {9}
    assert place(0, 2, [frozenset(), frozenset({0, 1})], {0, 1}) == {0, 1}
    assert place(0, 2, [], {0, 1}) == {0, 1}


@pytest.mark.skipif(sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2, reason="needs two cores of Linux")
def test_every_thread_is_bound(tmp_path: Path) -> None:
    one, other = sorted(os.sched_getaffinity(0))[:2]
    write(tmp_path, str(one), str(other))
    code = f"""
import os, pathlib, threading
from hedgerow.engine import numa
numa.nodes.__defaults__ = (pathlib.Path({str(tmp_path)!r}),)
stay, began, found = threading.Event(), threading.Event(), []
def run():
    began.set()
    stay.wait()
    found.append(os.sched_getaffinity(0))
thread = threading.Thread(target=run)
thread.start()
began.wait()
assert numa.bind(1, 2, {{{one}, {other}}}) == {{{other}}}
stay.set()
thread.join()
later = threading.Thread(target=run)
later.start()
later.join()
assert found == [{{{other}}}] * 2 and os.sched_getaffinity(0) == {{{other}}}, found
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
