"""Faults with real processes, again and again: the client's stream must be the undisturbed one every time.

    python -m bench.chaos --repetitions 20                       every case of tests/chaos/cases.py
    python -m bench.chaos --repetitions 20 --case kill-verifier  one case; may be repeated
    python -m bench.chaos --repetitions 20 --jobs 4              four clusters side by side

A repetition's number decides batch (1 and 16), sampling (greedy and seeded) and client. Each is a file under
--results, so that a run can be stopped and goes on; what they say together goes to <results>.json. Exit status 1 where
a token was lost, came twice or was another, or a case has fewer repetitions than asked for.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.arguments import number, whole_from
from bench.sharing import others, taken
from bench.subjects import machine
from tests.chaos.cases import BY_NAME, CASES
from tests.chaos.cluster import Cluster, Shape
from tests.chaos.readers import READERS
from tests.chaos.run import Case, References, repeat


def run(args: argparse.Namespace) -> int:
    """Every repetition whose result is missing, then the summary."""
    args.results.mkdir(parents=True, exist_ok=True)
    given = ["-m", "bench.chaos", *args.given, "--jobs", "1", "--worker"]
    if args.worker:
        return work(args)
    with others(given, args.jobs - 1):
        work(args)
    return summary(args)


def work(args: argparse.Namespace) -> int:
    """Repetition after repetition that no other process is at. Cases of one shape share a cluster."""
    cases = [BY_NAME[name] for name in args.case] if args.case else list(CASES)
    for shape in dict.fromkeys(case.shape for case in cases):
        parts = [(case, r) for r in range(args.repetitions) for case in cases if case.shape == shape]
        missing = [part for part in parts if not path_of(args, *part).exists()]
        while missing and not (args.until and time.time() > args.until):
            missing = on_one_cluster(args, shape, missing)
    return 0


def on_one_cluster(args: argparse.Namespace, shape: Shape, parts: list[tuple[Case, int]]) -> list[tuple[Case, int]]:
    """Works until a repetition fails, which may leave the cluster in any state; gives what is left to do."""
    with tempfile.TemporaryDirectory(prefix="hedgerow-chaos-") as folder, Cluster(shape, Path(folder)) as cluster:
        known = References()
        for number, (case, repetition) in enumerate(parts):
            if args.until and time.time() > args.until:
                return []
            path = path_of(args, case, repetition)
            with taken(path.with_suffix(".lock")) as free:
                if not free or path.exists():
                    continue
                outcome = one(cluster, case, repetition, known, args.readers.split(","))
                write(path, outcome)
            print(line_of(outcome), flush=True)
            if not outcome["clean"]:
                print(cluster.last_words(), file=sys.stderr, flush=True)
                return parts[number + 1 :]
    return []


def one(cluster: Cluster, case: Case, repetition: int, known: References, kinds: Sequence[str]) -> dict[str, Any]:
    """One repetition and everything around it, as a result; what goes wrong is one of its problems."""
    head = {"case": case.name, "repetition": repetition, "commit": machine()["commit"]}
    try:
        cluster.settle()
        outcome = asyncio.run(repeat(cluster, case, repetition, known, tuple(kinds)))
        cluster.settle()
    except Exception as error:  # noqa: BLE001  every fault of a repetition is a finding
        text = "".join(traceback.format_exception(error))
        return head | {"clean": False, "lost": 0, "duplicated": 0, "different": 0, "problems": [text]}
    verdict = dataclasses.asdict(outcome.verdict)
    rest = {name: getattr(outcome, name) for name in ("batch", "temperature", "reader", "resumes")}
    times = {
        "first_chunk_s": round(outcome.first, 3),
        "recovery_s": round(outcome.recovery, 3),
        "seconds": round(outcome.seconds, 1),
    }
    return head | rest | times | verdict | {"clean": outcome.verdict.clean}


def line_of(result: dict[str, Any]) -> str:
    """A result on one line."""
    told = ", ".join(f"{name} {result[name]}" for name in ("batch", "temperature", "reader", "recovery_s", "resumes")
                     if name in result)  # fmt: skip
    wrong = (
        ""
        if result["clean"]
        else f"  WRONG: {result['lost']} lost, {result['duplicated']} twice, "
        + (f"{result['different']} different; {result['problems'][:3]}")
    )
    return f"{result['case']} {result['repetition']}: {told}{wrong}"


def path_of(args: argparse.Namespace, case: Case, repetition: int) -> Path:
    """Where a repetition's result goes."""
    folder: Path = args.results
    return folder / f"{case.name}.{repetition}.json"


def summary(args: argparse.Namespace) -> int:
    """What all results say; 1 where they are not all there and clean."""
    cases = [BY_NAME[name] for name in args.case] if args.case else list(CASES)
    rows, bad = {}, 0
    for case in cases:
        paths = [path_of(args, case, r) for r in range(args.repetitions)]
        results = [json.loads(path.read_text()) for path in paths if path.exists()]
        sums = {name: sum(result[name] for result in results) for name in ("lost", "duplicated", "different")}
        unclean = [result for result in results if not result["clean"]]
        row: dict[str, Any] = {"repetitions": len(results), **sums, "unclean": len(unclean)}
        for batch in (1, 16):
            times = [result["recovery_s"] for result in results if result.get("batch") == batch]
            if times:
                first = statistics.median(r["first_chunk_s"] for r in results if r.get("batch") == batch)
                row[f"batch_{batch}"] = {
                    "recovery_s_median": round(statistics.median(times), 2), "recovery_s_most": round(max(times), 2),
                    "first_chunk_s_median": round(first, 2),
                }  # fmt: skip
        row["problems"] = [problem for result in unclean for problem in result["problems"]][:5]
        rows[case.name] = row
        bad += len(results) < args.repetitions or bool(unclean)
        print(f"{case.name}: {json.dumps({k: v for k, v in row.items() if k != 'problems'})}")
    write(args.results.with_suffix(".json"), {"machine": machine(), "cases": rows})
    return 1 if bad else 0


def write(path: Path, value: object) -> None:
    """Whole or not at all: a run may be stopped at any moment."""
    fresh = path.with_suffix(".tmp")
    fresh.write_text(json.dumps(value, indent=1) + "\n")
    fresh.replace(path)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.chaos", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--repetitions", type=whole_from(1), default=20, help="of each case")
    parser.add_argument("--case", action="append", choices=list(BY_NAME), help="one case; may be repeated")
    parser.add_argument("--jobs", type=whole_from(1), default=1, help="clusters side by side; each wants two cores")
    parser.add_argument("--readers", default=",".join(READERS), help="the clients to use in turns")
    parser.add_argument("--results", type=Path, default=Path("bench/results/chaos"))
    parser.add_argument("--seconds", type=number(0), default=0, help="begin no repetition after these; 0: no bound")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.given = sys.argv[1:] if argv is None else list(argv)
    if args.seconds and not args.until:
        args.until = time.time() + args.seconds
        args.given += ["--until", str(args.until)]
    return run(args)


if __name__ == "__main__":
    sys.exit(main())
