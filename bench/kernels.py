"""Every GPU op at its shapes: median time, bytes and operations a second, and the distance from this device's floor.

    python -m bench.kernels [--ops tree_build kv_compact] [--rounds 9] [--sustained 0.6]
        [--out bench/results/kernels-h200.json] [--commit 1a2b3c4, where the sources are no checkout]

How an op gets in: a module in bench/kernel_cells/ (one an op, or a few that belong together) has

    def cells() -> Iterator[Cell]: ...

and is found by its being there. It is imported only on a machine with a GPU. A `Cell` (bench/kernel_cells/__init__.py)
names op, shape and form, says what must be read, written and computed at least, and makes data sets: `make()` gives a
`Call` with its own random inputs and outputs. So many are made that one cycle touches 160 MB, more than L2 holds; large
pools may be shared, with other pages a call. `run` only launches. A peer or a baseline is a cell of the same op and
shape with another `form`; it is measured by turns with the kernel. A cell whose module, `make`, `check` or capture
fails is reported with its error and does not stop the others; the exit status is 1 then.

How it is measured: the first call runs with poisoned outputs, those that an op allocates itself included, and is
checked. All data sets go into one CUDA graph, call
after call; a sample is one replay, or as many as last 2 ms, over its calls, gaps between launches included. Forms take
turns; the value is the median of the rounds, near a burst's. `--sustained`: then each form alone, so long. `floor` is
the larger of bytes over the rate and operations over the matrix rate, both measured in this run: the copy rate where at
least a third of the bytes is written, else the read rate. It knows nothing of launches: one node of a graph that does
nothing takes `node`. The report is written anew behind each group of cells: a run that is cut short leaves what it has.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import pkgutil
import shlex
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch

import bench.kernel_cells
from bench.arguments import number, whole_from
from bench.device_rates import Rates, graph_of, measure_rates, milliseconds
from bench.kernel_cells import COLD, Call, Cell, Work
from bench.subjects import machine

LEAST_CALLS, LEAST_MS = 24, 2.0
MOST_SECONDS = 600  # of one cell without a pause


class Ready(NamedTuple):
    """A cell whose calls are captured."""

    cell: Cell
    graph: torch.cuda.CUDAGraph
    calls: int
    cold: bool  # a cycle touches more than L2 holds
    replays: int  # of one sample
    keep: list[Call]  # the data must live as long as the graph


def floor_us(work: Work, rates: Rates) -> float:
    moved = work.read + work.written
    rate = rates.copy if 3 * work.written >= moved else rates.read
    return max(moved / rate, work.flops / rates.matmul) * 1e6


def poison(tensors: Sequence[torch.Tensor]) -> None:
    """NaN, or a number that no kernel writes: an element that is left out shows."""
    for tensor in tensors:
        tensor.fill_(float("nan") if tensor.is_floating_point() else 0x5A)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """What torch allocates and does not fill is NaN, or the largest integer: outputs that an op makes itself."""
    before = torch.are_deterministic_algorithms_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of references whose sums have no order
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before)


def prepare(cell: Cell) -> Ready:
    sets = max(2, min(cell.most_sets, math.ceil(COLD / max(cell.footprint, 1))))
    calls = [cell.make() for _ in range(sets)]
    first = calls[0]
    poison(first.outputs)
    with poisoned_memory():
        first.run()
        torch.cuda.synchronize()
        if first.check is not None:
            first.check()
    cycles = -(-LEAST_CALLS // sets)
    graph = graph_of([call.run for call in calls] * cycles)
    count = sets * cycles
    graph.replay()
    replays = max(1, math.ceil(LEAST_MS / max(milliseconds(graph.replay), 1e-3)))
    return Ready(cell, graph, count, sets * cell.footprint >= COLD, replays, calls)


def sample(ready: Ready) -> float:
    """us a call."""

    def replay() -> None:
        for _ in range(ready.replays):
            ready.graph.replay()

    return milliseconds(replay) * 1e3 / (ready.replays * ready.calls)


def samples(ready: Sequence[Ready], rounds: int) -> list[list[float]]:
    """us a call, `rounds` samples each, by turns."""
    taken: list[list[float]] = [[] for _ in ready]
    for _ in range(rounds):
        for one, times in zip(ready, taken, strict=True):
            times.append(sample(one))
    return taken


def sustained(ready: Ready, seconds: float) -> float | None:
    """us a call once the card has been at it for a while: of its last two fifths. A card that draws its limit slows."""
    times, end = list[float](), time.monotonic() + seconds
    while time.monotonic() < end:
        times.append(sample(ready))
    return statistics.median(times[len(times) * 3 // 5 :]) if times else None


def row(ready: Ready, times: Sequence[float], lasting: float | None, rates: Rates) -> dict[str, Any]:
    cell, work = ready.cell, ready.cell.work
    us, floor = statistics.median(times), floor_us(work, rates)
    limit = cell.limit if cell.times is None else round(cell.times * floor, 3)
    return {
        "op": cell.op,
        "shape": cell.shape,
        "form": cell.form,
        "us": round(us, 3),
        "lowest": round(min(times), 3),
        "highest": round(max(times), 3),
        "sustained_us": None if lasting is None else round(lasting, 3),
        "gb_s": round((work.read + work.written) / us / 1e3, 1),
        "tflop_s": round(work.flops / us / 1e6, 2),
        "floor_us": round(floor, 3),
        "ratio": round(us / floor, 2) if floor else None,
        "limit_us": limit,
        "within": None if limit is None else us <= limit,
        "cold": ready.cold,
        "calls": ready.calls,
    }


def modules() -> list[str]:
    return [module.name for module in pkgutil.iter_modules(bench.kernel_cells.__path__)]


def found(failures: list[str]) -> Iterator[Cell]:
    for name in modules():
        try:
            yield from importlib.import_module(f"bench.kernel_cells.{name}").cells()
        except Exception:  # noqa: BLE001  one op's mistake does not cost the others their device time
            failures.append(f"{name}: {traceback.format_exc(limit=-2)}")


def asked_for(ops: Sequence[str], cells: Sequence[Cell]) -> list[Cell]:
    """Those of `ops`, all if there are none. ValueError names an op that no cell is of."""
    known = sorted({cell.op for cell in cells})
    unknown = sorted({*ops} - {*known})
    if unknown:
        raise ValueError(f"--ops: no cell is of {', '.join(unknown)}; there are {', '.join(known)}")
    return [cell for cell in cells if not ops or cell.op in ops]


def measured(
    cells: Sequence[Cell], rounds: int, seconds: float, rates: Rates, failures: list[str]
) -> Iterator[list[dict[str, Any]]]:
    """The rows of the cells that are measured by turns."""
    for (op, shape), group in groupby(cells, key=lambda cell: (cell.op, cell.shape)):
        ready = []
        for cell in group:
            try:
                ready.append(prepare(cell))
            except Exception:  # noqa: BLE001  as above
                failures.append(f"{op} {shape} {cell.form}: {traceback.format_exc(limit=-2)}")
        taken = samples(ready, rounds)
        yield [row(one, times, sustained(one, seconds), rates) for one, times in zip(ready, taken, strict=True)]


def line(found: dict[str, Any]) -> str:
    ratio = "-" if found["ratio"] is None else f"{found['ratio']:.2f}x"
    bar = "" if found["limit_us"] is None else f"  bar {found['limit_us']:g} {'met' if found['within'] else 'MISSED'}"
    warm = "" if found["cold"] else "  (warm)"
    if found["sustained_us"] is not None:
        bar += f"  sustained {found['sustained_us']:.2f} us"
    return (
        f"{found['op']:22} {found['shape']:34} {found['form']:18} {found['us']:9.2f} us  floor {found['floor_us']:8.2f}"
        f"  {ratio:>8}  {found['gb_s']:7.0f} GB/s {found['tflop_s']:7.1f} TF/s{bar}{warm}"
    )


def arguments_of(given: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ops", nargs="+", default=[], help="only these")
    parser.add_argument("--rounds", type=whole_from(1), default=9)
    parser.add_argument(
        "--sustained", type=number(0, MOST_SECONDS), default=0.0, help="seconds of each cell without a pause, as well"
    )
    parser.add_argument("--commit", default=machine()["commit"], help="of the sources, where git cannot tell")
    parser.add_argument("--out", type=Path, default=Path("bench/results/kernels.json"))
    asked = parser.parse_args(given)
    if not asked.out.parent.is_dir():
        parser.error(f"--out: {asked.out.parent} is no folder")
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    return asked


def main(arguments: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    asked, failures = arguments_of(given), list[str]()
    try:
        cells = asked_for(asked.ops, [*found(failures)])
    except ValueError as error:
        print(*failures, error, sep="\n", file=sys.stderr)
        return 2
    rates, rows = measure_rates(), list[dict[str, Any]]()
    print(f"{rates.describe()}", flush=True)
    report = {
        "device": torch.cuda.get_device_name(),
        "commit": asked.commit,
        "command": shlex.join(["python", "-m", "bench.kernels", *given]),
        "torch": torch.__version__,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "rates": rates._asdict(),
        "cells": rows,
        "failures": failures,
    }
    for taken in measured(cells, asked.rounds, asked.sustained, rates, failures):
        rows += taken
        for one in taken:
            print(line(one), flush=True)
        asked.out.write_text(json.dumps(report, indent=1) + "\n")
    print(*failures, sep="\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
