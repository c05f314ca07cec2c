"""Many simulated schedules of the whole stack, checked; a failing seed is printed and can be replayed.

    python -m bench.simulate --schedules 100000 --seed 1 --jobs 2
    python -m bench.simulate --replay 4711

See tests/simulation. A schedule is decided by its seed and by the code, so a seed that fails replays until the code
changes.
"""

from __future__ import annotations

import argparse
import collections
import gc
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

CHUNK = 100  # schedules that a worker runs at a time
SHOWN = 20  # failing seeds that are printed


class Failure(NamedTuple):
    """A schedule that broke a promise."""

    seed: int
    violations: list[str]


class Chunk(NamedTuple):
    """What a worker found."""

    schedules: int
    failures: list[Failure]
    faults: dict[str, int]
    tokens: int
    virtual_seconds: float


def run_chunk(seeds: range) -> Chunk:
    """Run schedules one after the other."""
    from tests.simulation.schedule import run_schedule

    failures, faults, tokens, seconds = [], collections.Counter[str](), 0, 0.0
    for seed in seeds:
        outcome = run_schedule(seed)
        if outcome.violations:
            failures.append(Failure(seed, outcome.violations))
        faults.update(fault.kind for fault in outcome.faults)
        tokens, seconds = tokens + outcome.tokens, seconds + outcome.seconds
    gc.collect()
    return Chunk(len(seeds), failures, dict(faults), tokens, seconds)


def replay(seed: int) -> int:
    """Run one schedule and print its history."""
    from tests.simulation.schedule import Settings, run_schedule

    outcome = run_schedule(seed, Settings(verbose=True))
    for at, who, what in outcome.trace:
        print(f"{at:10.4f}  {who:8} {what}")
    print(f"seed {seed}: {outcome.tokens} tokens, {outcome.seconds:.3f} virtual seconds, history {outcome.digest[:16]}")
    for violation in outcome.violations:
        print(f"VIOLATION {violation}")
    return bool(outcome.violations)


def _chunks(first: int, count: int) -> Iterator[range]:
    for start in range(first, first + count, CHUNK):
        yield range(start, min(start + CHUNK, first + count))


def simulate(first: int, count: int, jobs: int) -> int:
    """Run schedules in `jobs` processes and say what came of them; 1 where one failed."""
    began, done, shown = time.monotonic(), 0, 0
    failed, faults, tokens, virtual = 0, collections.Counter[str](), 0, 0.0
    with multiprocessing.get_context("spawn").Pool(jobs, maxtasksperchild=50) as pool:
        for chunk in pool.imap_unordered(run_chunk, _chunks(first, count)):
            done += chunk.schedules
            faults.update(chunk.faults)
            tokens, virtual, failed = (
                tokens + chunk.tokens,
                virtual + chunk.virtual_seconds,
                failed + len(chunk.failures),
            )
            for failure in chunk.failures:
                if shown < SHOWN:
                    shown += 1
                    print(f"seed {failure.seed} FAILS: {failure.violations[0]}", flush=True)
                    print(f"  replay: python -m bench.simulate --replay {failure.seed}", flush=True)
            if sys.stderr.isatty():
                print(f"\r{done} of {count}, {failed} failed", end="", file=sys.stderr, flush=True)
    seconds = time.monotonic() - began
    told = ", ".join(f"{kind} {faults[kind]}" for kind in sorted(faults))
    print(f"{done} schedules from seed {first}: {failed} failed")
    print(f"{tokens} tokens committed, {virtual / 3600:.1f} virtual hours; faults: {told}")
    print(f"{seconds:.0f} s with {jobs} jobs, {1000 * seconds * jobs / max(done, 1):.1f} ms a schedule and core")
    return bool(failed)


def main() -> int:
    """Parse and run."""
    parser = argparse.ArgumentParser(prog="python -m bench.simulate", description=__doc__.splitlines()[0])
    parser.add_argument("--schedules", type=int, default=100_000, help="how many")
    parser.add_argument("--seed", type=int, default=1, help="the first one's")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes")
    parser.add_argument("--replay", type=int, help="run one seed and print its history")
    given = parser.parse_args()
    if given.replay is not None:
        return replay(given.replay)
    if given.schedules < 1 or given.jobs < 1:
        parser.error("--schedules and --jobs are at least 1")
    return simulate(given.seed, given.schedules, given.jobs)


if __name__ == "__main__":
    sys.exit(main())
