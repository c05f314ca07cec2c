"""Compiles what ends a block of several ranks, and reads the order in it: python -m tests.gpu_compile_ranks 90"""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from kernels.gpu.rank_norm import peer_norm, rank_norm, rank_part
from tests import gpu_compile
from tests.gpu_compile import SHARED, build, launches

ROWS, HIDDEN, MOST = 16, 7168, 512


def calls(count: int) -> None:
    long, part = torch.zeros(count, dtype=torch.int64), torch.zeros(MOST, HIDDEN, dtype=torch.bfloat16)
    peers: Any = SimpleNamespace(
        rank=count - 1, count=count, part=part, part_offsets=long, flag_offsets=long,
        flags=torch.zeros(count, MOST, dtype=torch.int32), turns=torch.zeros(MOST, dtype=torch.int32),
    )  # fmt: skip
    x, w, out = torch.zeros(ROWS, HIDDEN), part[0], part[:ROWS]
    peer_norm(x, peers, w, out, 1e-5)
    rank_norm(x, torch.zeros(count, ROWS, HIDDEN, dtype=torch.bfloat16), w, out, 1e-5)
    rank_part(x, torch.zeros(ROWS, 8, HIDDEN), out)


def check_order(ptx: str) -> None:
    """Tells, waits, lets all threads wait for those that did, and only then reads a part or counts its turn."""
    wait = ptx.index("ld.acquire.sys")
    assert "atom.global.sys.release" in ptx[:wait], "nobody is told"
    behind = re.search(r"bar\.sync|ld\.global|st\.global", ptx[wait + 1 :])
    assert behind is not None
    assert behind[0] == "bar.sync", f"{behind[0]} before all threads have waited"
    assert ptx.index("griddepcontrol.wait") < ptx.index("atom."), "told before the part is made"


if __name__ == "__main__":
    capability, texts = int(sys.argv[1]), list[str]()
    usual = gpu_compile.read

    def read(kernel: Any, card: int) -> Any:
        texts.append(kernel.asm["ptx"])
        return usual(kernel, card)

    with patch.object(gpu_compile, "read", read):
        for count in (2, 8):
            for launch in launches(lambda count=count: calls(count)):  # type: ignore[misc]
                launch.arguments["PDL"] = True
                built = build(launch, capability)
                assert built.spilled == 0, built
                assert built.shared <= SHARED[capability], built
                if launch.arguments.get("PEERS"):
                    check_order(texts[-1])
                print(f"{built.name}, {count} ranks: {built.registers} registers")
    print(f"{len(texts)} kernels")
