"""Compiles what ends a block of several ranks, and reads the order in it: python -m tests.gpu_compile_ranks 90"""

from __future__ import annotations

import re
import sys
from typing import Any
from unittest.mock import patch

import torch

from kernels.gpu.peer_norm import peer_norm
from kernels.gpu.peers import PeerBuffer, empty
from kernels.gpu.rank_norm import rank_norm, rank_part
from tests import gpu_compile
from tests.gpu_compile import SHARED, build, launches

ROWS, WIDE, HIDDEN, MOST = 16, 256, 7168, 512


def calls(count: int) -> None:
    part = torch.zeros(MOST, HIDDEN, dtype=torch.bfloat16)
    peers: Any = PeerBuffer(count - 1, empty(count, MOST, HIDDEN, "cpu"), [None] * count)
    x, w, out = torch.zeros(ROWS, HIDDEN), part[0], part[:ROWS]
    peer_norm(x, peers, w, out, 1e-5)
    if count > 2:
        wide = torch.zeros(WIDE, HIDDEN)
        peer_norm(wide, peers, w, part[:WIDE], 1e-5)
        peer_norm(wide, peers, w, part[:WIDE], 1e-5, wide)
    rank_norm(x, torch.zeros(count, ROWS, HIDDEN, dtype=torch.bfloat16), w, out, 1e-5)
    rank_part(x, torch.zeros(ROWS, 8, HIDDEN), out)


def check_order(ptx: str) -> None:
    """Sends before it waits for anybody, empties what it has read behind a barrier, in whole vectors; and its norm adds
    in the order in which the norm of parts side by side does."""
    wait, part, polls = ptx.index("griddepcontrol.wait"), ptx.index("ld.global"), ptx.index("ld.volatile.global.v4")
    assert wait < part, "read before it is made"
    sent = ptx.index("st.global.v4")
    assert part < sent < polls, "waits before it sends"
    behind = re.search(r"bar\.sync|st\.global", ptx[polls:])
    assert behind is not None
    assert behind[0] == "bar.sync", "empties what another thread may not have read"
    assert "ld.volatile.global.b" not in ptx, "narrow"


def order_of_the_norm(ttgir: str) -> str:
    """The layout of what the norm sums: equal ones sum in the same order."""
    reduced = [line for line in ttgir.splitlines() if re.search(r"\) : \(tensor<\d+xf32, #\w+>\) -> f32", line)]
    name = re.search(r"#\w+", reduced[0])
    assert name is not None
    assert len(reduced) == 1
    return next(line for line in ttgir.splitlines() if line.startswith(f"{name[0]} ="))


if __name__ == "__main__":
    capability, texts = int(sys.argv[1]), list[Any]()
    usual = gpu_compile.read

    def read(kernel: Any, card: int) -> Any:
        texts.append(kernel.asm)
        return usual(kernel, card)

    with patch.object(gpu_compile, "read", read):
        for count in (2, 8):
            for launch in launches(lambda count=count: calls(count)):  # type: ignore[misc]
                launch.arguments["PDL"] = True
                built = build(launch, capability)
                assert built.spilled == 0, built
                assert built.shared <= SHARED[capability], built
                if built.name == "_peer_norm":
                    check_order(texts[-1]["ptx"])
                    peers = order_of_the_norm(texts[-1]["ttgir"])
                elif built.name == "_peer_norm_twice":
                    assert "ld.volatile.global.b" not in texts[-1]["ptx"], "narrow"
                    assert order_of_the_norm(texts[-1]["ttgir"]) == peers
                elif built.name == "_rank_norm":
                    assert order_of_the_norm(texts[-1]["ttgir"]) == peers
                print(f"{built.name}, {count} ranks: {built.registers} registers")
    print(f"{len(texts)} kernels")
