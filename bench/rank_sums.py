"""What the end of a block costs between two ranks: all parts added in rank order, the residual stream, and the norm.

    python -m bench.rank_sums [--rows 1 4 8 16 32 64 256] [--out bench/results/rank-sums.json]

A process a GPU; K2.6's hidden size, parts in bfloat16. Each form is a CUDA graph of 100 calls; the value is the slower
rank's median of rounds, in which the forms take turns. Forms: `peers` (kernels/gpu/peer_norm.py: ranks write into each
other's memory), `gathered` (NCCL gathers, one kernel adds and norms: where there is no peer access), and what others
have, with our add + norm behind it: NCCL's all-reduce, and PyTorch's symmetric memory with one and with two shots
(whose sums have an order of their own). NVLink multicast is off.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from bench.arguments import whole_from
from kernels.collectives import connect

HIDDEN, CALLS, ROUNDS, REPLAYS, MOST, CHECKED = 7168, 100, 5, 5, 512, 60
MULTICAST_OFF = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
# bytes of a part -> us, of the fused form
BARS = {14336: 8.0, 57344: 8.0, 114688: 8.0, 917504: 11.0}


def forms(rank: int, count: int, rows: int, peers: Any, pair: Any) -> dict[str, Callable[[int], object]]:
    """Call number n of each form."""
    import torch.distributed._symmetric_memory as symmetric

    from kernels.gpu.add_rmsnorm import add_rmsnorm
    from kernels.gpu.peer_norm import peer_norm
    from kernels.gpu.rank_norm import rank_norm

    dist: Any = torch.distributed
    device = torch.device("cuda", rank)
    draw = torch.Generator(device).manual_seed(rank)
    x = torch.randn(rows, HIDDEN, device=device)
    part = torch.randn(rows, HIDDEN, device=device, generator=draw).bfloat16()
    w, out = torch.ones(HIDDEN, device=device).bfloat16(), torch.empty(rows, HIDDEN, device=device).bfloat16()
    name = dist.group.WORLD.group_name
    shared = symmetric.empty((rows, HIDDEN), dtype=torch.bfloat16, device=device)
    symmetric.rendezvous(shared, name)
    ops: Any = torch.ops.symm_mem

    def normed(delta: torch.Tensor) -> None:
        add_rmsnorm(x, w, out, 1e-5, delta=delta)

    def reduced() -> torch.Tensor:
        dist.all_reduce(part)
        return part

    found: dict[str, Callable[[int], object]] = {
        "gathered": lambda n: rank_norm(x, peers.gather([part]), w, out, 1e-5),
        "nccl all-reduce": lambda n: normed(reduced()),
        "symmetric one-shot": lambda n: normed(ops.one_shot_all_reduce(shared, "sum", name)),
        "symmetric two-shot": lambda n: normed(ops.two_shot_all_reduce_(shared, "sum", name)),
    }
    if pair is not None:
        for one in pair:
            one.part[:rows] = part
        found["peers"] = lambda n: peer_norm(x, pair[n % 2], w, out, 1e-5)
    return found


def exact(rank: int, rows: int, peers: Any, pair: Any) -> bool:
    """Whether both of our forms have the bits of one process that has all parts: over many calls without a pause, each
    with other parts, so that a rank that reads too early or too late shows."""
    from kernels.gpu.peer_norm import peer_norm
    from kernels.gpu.rank_norm import rank_norm

    device, draw = torch.device("cuda", rank), torch.Generator().manual_seed(rows)
    parts = (torch.randn(CHECKED, peers.count, rows, HIDDEN, generator=draw) * 100).bfloat16().to(device)
    parts[..., 5::7] = -0.0  # what `peer_norm` does not send
    w, found = torch.ones(HIDDEN, device=device).bfloat16(), []

    def direct(x: torch.Tensor, n: int, out: torch.Tensor) -> None:
        pair[n % 2].part[:rows].copy_(parts[n, rank])
        peer_norm(x, pair[n % 2], w, out, 1e-5)

    ways: list[Callable[[torch.Tensor, int, torch.Tensor], None]] = [
        lambda x, n, out: rank_norm(x, parts[n], w, out, 1e-5),
        lambda x, n, out: rank_norm(x, peers.gather([parts[n, rank]]), w, out, 1e-5),
    ]
    if pair is not None:
        ways.append(direct)
    for way in ways:
        x, outs = torch.full((rows, HIDDEN), 0.5, device=device), []
        for n in range(CHECKED):
            outs.append(torch.empty(rows, HIDDEN, device=device).bfloat16())
            way(x, n, outs[-1])
        found.append((x, torch.stack(outs)))
    return all(torch.equal(x, found[0][0]) and torch.equal(outs, found[0][1]) for x, outs in found)


def measure(found: dict[str, Callable[[int], object]]) -> dict[str, float]:
    """us a call."""
    from bench.device_rates import graph_of, milliseconds

    graphs = {name: graph_of([lambda n=n, call=call: call(n) for n in range(CALLS)]) for name, call in found.items()}  # type: ignore[misc]
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            graph.replay()

            def several(graph: torch.cuda.CUDAGraph = graph) -> None:
                for _ in range(REPLAYS):
                    graph.replay()

            times[name].append(milliseconds(several) * 1e3 / (REPLAYS * CALLS))
    return {name: round(statistics.median(line), 2) for name, line in times.items()}


def one_rank(rank: int, count: int, folder: Path, rows: Sequence[int]) -> None:
    from kernels.gpu.peers import share

    dist: Any = torch.distributed
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", init_method=f"file://{folder / 'world'}", rank=rank, world_size=count)
    peers, report = connect("nccl", str(folder / "meeting"), rank, count, 60), list[dict[str, Any]]()
    dist.all_reduce(torch.zeros(1, device=device))
    made = [share(peers, rank, MOST, HIDDEN, device) for _ in range(2)]
    pair = None if None in made else made
    with torch.inference_mode():
        for number in rows:
            same = exact(rank, number, peers, pair)
            us = measure(forms(rank, count, number, peers, pair))
            report.append({"rows": number, "bytes": number * HIDDEN * 2, "exact": same, "us": us})
            (folder / f"{rank}.json").write_text(json.dumps(report))
    torch.cuda.synchronize()
    os._exit(0)  # groups that are taken down wait for each other


def line(found: dict[str, Any]) -> str:
    times = "  ".join(f"{name} {us:.2f}" for name, us in sorted(found["us"].items(), key=lambda item: item[1]))
    bar = "" if found["bar_us"] is None else f"  bar {found['bar_us']:g} {'met' if found['within'] else 'MISSED'}"
    return f"T={found['rows']:<4} {found['bytes']:>9} B  {times}{bar}  exact: {found['exact']}"


def joined(reports: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The slower rank's times, and whether all had the bits."""
    rows = []
    for lines in zip(*reports, strict=False):
        us = {name: max(found["us"][name] for found in lines) for name in lines[0]["us"]}
        bar, peers = BARS.get(lines[0]["bytes"]), us.get("peers")
        within = None if bar is None or peers is None else peers <= bar
        exact = all(found["exact"] for found in lines)
        rows.append(lines[0] | {"us": us, "bar_us": bar, "within": within, "exact": exact})
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=whole_from(1), nargs="+", default=[1, 4, 8, 16, 32, 64, 256])
    parser.add_argument("--ranks", type=whole_from(2), default=2)
    parser.add_argument("--commit", default="", help="of the sources")
    parser.add_argument("--out", type=Path, default=Path("bench/results/rank-sums.json"))
    parser.add_argument("--rank", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--aside", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.rank is not None:
        one_rank(asked.rank, asked.ranks, asked.aside, asked.rows)
    if torch.cuda.device_count() < asked.ranks:
        parser.error(f"needs {asked.ranks} CUDA devices")
    with tempfile.TemporaryDirectory() as aside:
        command = [sys.executable, "-m", "bench.rank_sums", "--ranks", str(asked.ranks), "--aside", aside]
        command += ["--rows", *map(str, asked.rows)]
        env = os.environ | MULTICAST_OFF
        ranks = [subprocess.Popen([*command, "--rank", str(n)], env=env) for n in range(asked.ranks)]
        try:
            failed = sum(rank.wait(100) != 0 for rank in ranks) > 0
        finally:
            for rank in ranks:
                rank.kill()
        files = [Path(aside, f"{n}.json") for n in range(asked.ranks)]
        reports = [json.loads(file.read_text()) if file.exists() else [] for file in files]
    rows = joined(reports)
    print(*map(line, rows), sep="\n")
    report = {
        "device": torch.cuda.get_device_name(), "ranks": asked.ranks, "commit": asked.commit,
        "torch": torch.__version__, "date": datetime.now(UTC).strftime("%Y-%m-%d"), "cells": rows,
    }  # fmt: skip
    asked.out.write_text(json.dumps(report, indent=1) + "\n")
    return int(failed or not all(row["exact"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
