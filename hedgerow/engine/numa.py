"""Which cores a rank of a group runs on: those of one NUMA node, where the machine has several.

Memory of another node's is read at a fraction of the speed, and Linux keeps a page where it was first written: a rank
that is bound before it loads has its weights beside its cores. A rank with a GPU goes to that GPU's node, where Linux
tells of it; other ranks are spread over the nodes in their order. A machine of one node, and one whose nodes cannot be
read, is left alone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence, Set
from pathlib import Path

NODES = Path("/sys/devices/system/node")
DEVICES = Path("/sys/bus/pci/devices")


def nodes(root: Path = NODES) -> list[frozenset[int]]:
    """Cores of each node, by the node's number; empty where that is not told."""
    found = {}
    for folder in root.glob("node[0-9]*"):
        try:
            found[int(folder.name.removeprefix("node"))] = cores(folder.joinpath("cpulist").read_text())
        except (OSError, ValueError):
            return []
    return [found[number] for number in sorted(found)]


def cores(text: str) -> frozenset[int]:
    """Linux' list of numbers, as 0-3,8. Raises ValueError."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return frozenset(found)


def device_node(address: str, root: Path = DEVICES) -> int | None:
    """The node of the PCI device at this address, as 0000:1b:00.0; None where nobody says."""
    try:
        number = int((root / address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return number if number >= 0 else None


def place(rank: int, count: int, by_node: Sequence[Set[int]], usable: Set[int], wanted: int | None = None) -> Set[int]:
    """The cores for rank `rank` of `count`: of one node, the `wanted` one if it has some, and usable; `usable` where
    fewer than two nodes have some."""
    there = [node & usable for node in by_node if node & usable]
    if len(there) < 2:
        return usable
    if wanted is not None and wanted < len(by_node) and by_node[wanted] & usable:
        return by_node[wanted] & usable
    return there[rank * len(there) // count]


def usable() -> Set[int]:
    """Cores that this process may use; empty where that is not told."""
    return os.sched_getaffinity(0) if sys.platform == "linux" else frozenset()


def bind(rank: int, count: int, among: Set[int], wanted: int | None = None) -> Set[int] | None:
    """Binds all threads of this process, and those that they will start. The cores; None: nothing was bound.

    `among`: what was usable before any rank was bound; a process has its parent's cores. `wanted`: its device's node.
    """
    chosen = place(rank, count, nodes(), among, wanted)
    if chosen == among:
        return None
    for thread in os.listdir("/proc/self/task"):
        try:
            os.sched_setaffinity(int(thread), chosen)
        except OSError:  # it has ended, or a container does not allow it: slower, not wrong
            continue
    return chosen
