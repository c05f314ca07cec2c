"""Which cores a rank of a group runs on: those of one NUMA node, where the machine has several.

Memory of another node's is read at a fraction of the speed, and Linux keeps a page where it was first written: a rank
that is bound before it loads has its weights beside its cores. Ranks are spread over the nodes in their order, as GPUs
are numbered. A machine of one node, and one whose nodes cannot be read, is left alone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence, Set
from pathlib import Path

NODES = Path("/sys/devices/system/node")


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


def place(rank: int, count: int, by_node: Sequence[Set[int]], usable: Set[int]) -> Set[int]:
    """The cores for rank `rank` of `count`: of one node, and usable; `usable` where fewer than two nodes have some."""
    there = [node & usable for node in by_node if node & usable]
    return there[rank * len(there) // count] if len(there) > 1 else usable


def usable() -> Set[int]:
    """Cores that this process may use; empty where that is not told."""
    return os.sched_getaffinity(0) if sys.platform == "linux" else frozenset()


def bind(rank: int, count: int, among: Set[int]) -> Set[int] | None:
    """Binds all threads of this process, and those that they will start. The cores; None: nothing was bound.

    `among`: what was usable before any rank was bound; a process has its parent's cores.
    """
    chosen = place(rank, count, nodes(), among)
    if chosen == among:
        return None
    for thread in os.listdir("/proc/self/task"):
        try:
            os.sched_setaffinity(int(thread), chosen)
        except OSError:  # it has ended, or a container does not allow it: slower, not wrong
            continue
    return chosen
