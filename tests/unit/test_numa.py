"""Ranks on NUMA nodes: from what Linux tells of them to the cores that a rank is bound to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hedgerow.engine.numa import cores, device_node, nodes, place
from hedgerow.model.devices import pci_address

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


def test_a_rank_goes_to_its_devices_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs of the second node are not on both; what has no usable cores, or is not told, counts for nothing."""
    found = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x9B, pci_device_id=0)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: found)
    assert pci_address(1) == "0000:9b:00.0"
    folder = tmp_path / "0000:9b:00.0"
    folder.mkdir()
    (folder / "numa_node").write_text("1\n")
    assert device_node("0000:9b:00.0", tmp_path) == 1
    (folder / "numa_node").write_text("-1\n")
    assert (device_node("0000:9b:00.0", tmp_path), device_node("", tmp_path)) == (None, None)
    two, everything = [frozenset(range(8)), frozenset(range(8, 16))], set(range(16))
    assert [min(place(rank, 2, two, everything, 1)) for rank in range(2)] == [8, 8]
    assert place(0, 2, two, everything, 7) == two[0]
    assert place(0, 2, two, {0, 1}, 1) == {0, 1}


def test_an_older_torch_tells_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: SimpleNamespace())
    assert pci_address(0) == ""


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
