"""The step of one TP=8 rank of K2.6 on this GPU: times over batch x rows x context, and how far from the floor.

    python -m bench.rank_step [--batches 1 8] [--rows 1 8 16 32 64] [--contexts 8192 32768] [--overlaps 0 0.5]
        [--profile 1x1 1x16 8x8] [--layers 61] [--out bench/results/rank-step.json]

Weights are drawn on the device in the true shapes (76 GB); model and step are the engine's own (bench/rank_model.py):
from the rows' tokens to the accepted path, its latents moved and its features on the host, in one CUDA graph. With
`--ranks 1`, the default, without communication: what a rank computes by itself. `--ranks 2`: two of the eight on two
GPUs, whose sums are made between them (bench/rank_pair.py); the slower one's times. Every sequence has a tree of so
many rows after `context` tokens, its pages in random order. Routing is replayed: uniform, or with a set overlap between
the rows of a tree.

`ms`: median of rounds of replays, which take turns with nothing else; `verify` is the whole call, the host's part
too. `floor`: bytes of weights, of the distinct experts and of the cache over the read rate that this run measured
(attention: the larger of that and its operations). A profile gives the time of each class of op in one replay.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.arguments import number, whole_from
from bench.device_rates import Rates, measure_rates, milliseconds
from bench.rank_floor import dense_bytes, distinct, least, routing
from bench.rank_model import COMMON, GREEDY, Drawn, RankedModel, RankModel, rank_config, rank_sizes
from bench.rank_pair import pair
from bench.rank_profile import Profile, profile
from hedgerow.model.batch import SequenceRows
from hedgerow.model.cuda_cache import CudaCache
from hedgerow.model.tensors import Share
from kernels.collectives import Ranks, connect
from kernels.gpu.row_layout import PAGE
from kernels.tree_accept import WalkRows

TAPS = (1, 12, 24, 35, 47, 58)  # of a published drafter's kind
ANSWER = 1024  # tokens that a session may still have: with the context, its limit
ROUND_MS = 60.0
# (batch, rows) -> ms, at a context of 8k and uniform routing, without communication
BARS = {(1, 1): 3.2, (1, 8): 5.4, (1, 16): 8.0, (1, 32): 12.5, (8, 8): 18.0}


class Cell(NamedTuple):
    batch: int
    rows: int  # of each tree
    context: int
    overlap: float

    def __str__(self) -> str:
        return f"B={self.batch} T={self.rows} L={self.context} overlap={self.overlap:g}"


class Bench:
    """The rank, its cache, and the random numbers of all cells. `ranks`: of how many it is one; all of them call the
    same."""

    def __init__(self, layers: int, most: Cell, rows: int, ranks: Ranks | None = None) -> None:
        self.ranks = ranks
        self.device = torch.device("cuda", ranks.mine[0] if ranks else 0)
        self.config = rank_config(rank_sizes(layers))
        taps = [tap for tap in TAPS if tap < layers]
        self.model: RankModel | RankedModel
        if ranks is None:
            self.model = RankModel(self.config, Drawn(self.device), taps, rows)
        else:
            drawn = Drawn(self.device, share=Share(ranks.mine[0], ranks.count))
            self.model = RankedModel(rank_config(rank_sizes(layers, ranks.count)), [drawn], ranks, taps, rows)
        self.dense = dense_bytes(self.config)
        self.each = -(-(most.context + most.rows) // PAGE)
        self.cache = self.model.fill(most.batch * self.each)
        self.draw = torch.Generator(self.device).manual_seed(1)

    def trees(self, cell: Cell) -> tuple[list[SequenceRows], list[WalkRows]]:
        order = torch.randperm(self.cache.pages, generator=self.draw, device=self.device).tolist()
        tokens = torch.randint(
            0, self.config.vocab_size, (cell.batch, cell.rows), generator=self.draw, device=self.device
        ).tolist()
        parents = [(row - 1) // 2 if row else -1 for row in range(cell.rows)]
        rows = [
            SequenceRows(
                cell.context, order[n * self.each : (n + 1) * self.each], tokens[n], parents, range(cell.rows),
                limit=cell.context + ANSWER,
            )
            for n in range(cell.batch)
        ]  # fmt: skip
        return rows, [WalkRows(n * cell.rows, parents, tokens[n], GREEDY) for n in range(cell.batch)]

    def agreed(self, count: int) -> int:
        """The first rank's: a rank that replays more often than another waits for ever."""
        if self.ranks is None:
            return count
        return int(self.ranks.gather([torch.tensor([count], device=self.device)])[0])

    def measure(self, cell: Cell, rates: Rates, rounds: int) -> dict[str, Any]:
        rows, trees = self.trees(cell)
        replayed = routing(self.config, cell.batch, cell.rows, cell.overlap, self.draw, COMMON)
        self.model.routing[:, : replayed.shape[1]] = replayed
        launch = self.model.recorded(rows, self.cache, trees)
        experts = distinct(self.config, replayed)
        torch.cuda.synchronize()
        once = milliseconds(launch)
        replays = self.agreed(max(3, round(ROUND_MS / once)))

        def several() -> None:
            for _ in range(replays):
                launch()

        times = [milliseconds(several) / replays for _ in range(rounds)]
        walls = []
        for _ in range(5):
            begun = time.perf_counter()
            self.model.verify(rows, self.cache, trees)
            walls.append((time.perf_counter() - begun) * 1e3)
        moved = least(self.config, self.dense, experts, cell.batch, cell.rows, cell.context)
        ms, floor = statistics.median(times), moved.seconds(rates.read, rates.matmul) * 1e3
        alone = self.ranks is None and cell.context == 8192 and not cell.overlap
        bar = BARS.get((cell.batch, cell.rows)) if alone else None
        return cell._asdict() | {
            "ms": round(ms, 3),
            "lowest": round(min(times), 3),
            "highest": round(max(times), 3),
            "verify_ms": round(statistics.median(walls), 3),
            "bytes": moved.bytes,
            "tb_s": round(moved.bytes / ms / 1e9, 3),
            "floor_ms": round(floor, 3),
            "ratio": round(ms / floor, 2),
            "distinct": round(experts, 1),
            "bar_ms": bar,
            "within": None if bar is None else ms <= bar,
        }


def line(found: dict[str, Any]) -> str:
    bar = "" if found["bar_ms"] is None else f"  bar {found['bar_ms']:g} {'met' if found['within'] else 'MISSED'}"
    return (
        f"B={found['batch']:<3} T={found['rows']:<3} L={found['context']:<7} overlap {found['overlap']:<4g} "
        f"{found['ms']:8.3f} ms ({found['lowest']:.3f}-{found['highest']:.3f}, verify {found['verify_ms']:.3f})  "
        f"{found['bytes'] / 1e9:6.2f} GB {found['tb_s']:5.2f} TB/s  "
        f"floor {found['floor_ms']:7.3f} {found['ratio']:5.2f}x  {found['distinct']:5.1f} experts{bar}"
    )


def cells(asked: argparse.Namespace) -> Iterator[Cell]:
    """Bars first: what a limit of time cuts off is the rest."""
    found = [
        Cell(batch, rows, context, overlap)
        for overlap in asked.overlaps
        for context in asked.contexts
        for batch in asked.batches
        for rows in asked.rows
        if batch * rows <= asked.most_rows and (not overlap or (rows > 1 and context == asked.contexts[0]))
    ]
    yield from sorted(found, key=lambda cell: (cell.overlap, cell.context != 8192, cell.context))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batches", type=whole_from(1), nargs="+", default=[1, 8])
    parser.add_argument("--rows", type=whole_from(1), nargs="+", default=[1, 8, 16, 32, 64])
    parser.add_argument("--contexts", type=whole_from(1), nargs="+", default=[8192, 32768])
    parser.add_argument("--overlaps", type=number(0, 1), nargs="+", default=[0.0])
    parser.add_argument(
        "--profile", nargs="*", default=["1x1", "1x16", "8x8"], help="batch x rows, at the first context"
    )
    parser.add_argument("--most-rows", type=whole_from(1), default=256, help="of a step; larger cells are left out")
    parser.add_argument("--layers", type=whole_from(1), default=61)
    parser.add_argument("--ranks", type=whole_from(1), default=1, help="of the eight, a GPU each")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--meeting", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=whole_from(1), default=5)
    parser.add_argument("--seconds", type=number(1), default=float("inf"), help="no cell is begun after so many")
    parser.add_argument("--commit", default="", help="of the sources")
    parser.add_argument("--out", type=Path, default=Path("bench/results/rank-step.json"))
    asked = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    if asked.ranks > 1 and asked.rank is None:
        return pair(asked.ranks, list(arguments if arguments is not None else sys.argv[1:]), asked.out)
    begun, ranks = time.monotonic(), None
    if asked.rank is not None:
        torch.cuda.set_device(asked.rank)
        ranks = connect("nccl", asked.meeting, asked.rank, asked.ranks, 60)
    rates = measure_rates()
    print(rates.describe(), flush=True)
    torch.cuda.empty_cache()
    wanted = list(cells(asked))
    most = Cell(max(c.batch for c in wanted), max(c.rows for c in wanted), max(c.context for c in wanted), 0.0)
    bench = Bench(asked.layers, most, asked.most_rows, ranks)
    torch.cuda.synchronize()
    print(f"{torch.cuda.memory_allocated() / 1e9:.1f} GB made after {time.monotonic() - begun:.0f} s", flush=True)
    rows, profiles, failures = list[dict[str, Any]](), dict[str, Profile](), list[str]()
    for cell in wanted:
        if bench.agreed(time.monotonic() - begun > asked.seconds):
            failures.append(f"{cell}: no time left")
            continue
        rows.append(bench.measure(cell, rates, asked.rounds))
        print(line(rows[-1]), flush=True)
        key = f"{cell.batch}x{cell.rows}"
        if key in asked.profile and key not in profiles and not cell.overlap:
            profiles[key] = profile(bench.model.recorded(*_step(bench, cell)), asked.layers)
            print(profiles[key].describe(key), flush=True)
    if not rows:
        print(*failures, sep="\n", file=sys.stderr)
        return 1
    report = {
        "device": torch.cuda.get_device_name(), "commit": asked.commit, "torch": torch.__version__,
        "ranks": asked.ranks, "law": bench.model.kernel_law, "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "layers": asked.layers, "rates": rates._asdict(), "dense_bytes": bench.dense, "cells": rows,
        "profiles": {key: found.as_dict() for key, found in profiles.items()}, "failures": failures,
    }  # fmt: skip
    asked.out.write_text(json.dumps(report, indent=1) + "\n")
    print(*failures, sep="\n")
    return 0


def _step(bench: Bench, cell: Cell) -> tuple[list[SequenceRows], CudaCache, list[WalkRows]]:
    rows, trees = bench.trees(cell)
    return rows, bench.cache, trees


if __name__ == "__main__":
    sys.exit(main())
