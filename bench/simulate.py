"""Many simulated schedules of the whole stack, checked; a failing seed is printed and can be replayed.

    python -m bench.simulate                    100,000 of them, in parts; what has its result is not run again
    python -m bench.simulate --seconds 600      as much of that as fits; run it again to go on
    python -m bench.simulate --summary          what the results add up to, for each state of the sources
    python -m bench.simulate --replay 4711      one schedule with its history

See tests/simulation. A schedule is decided by its seed and by the code. Each part's result carries a digest of the
sources that were driven, the shipped ones and the simulation's own; a part of other sources is run again, unless
`--any-sources` counts it where it was clean. A part during which they changed is not counted, and ends the run. Exits
with 1 if a schedule failed, or the sources changed.
"""

from __future__ import annotations

import argparse
import collections
import functools
import gc
import hashlib
import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from bench.arguments import number, whole_from

ROOT = Path(__file__).resolve().parents[1]
DRIVEN = (
    *("hedgerow/*.py", "hedgerow/client/*.py", "hedgerow/engine/*.py", "hedgerow/rpc/*.py", "hedgerow/v1/*.py"),
    *("services/gateway/*.py", "services/kvstore/*.py", "services/kvstore/scripts/*.lua", "services/verifier/*.py"),
    "tests/simulation/*.py",
)
PART = 100  # schedules whose result is one file
COLLECT = 20  # schedules after which a worker frees what they left
SHOWN = 20  # failing seeds that are printed


class Failure(NamedTuple):
    """A schedule that broke a promise."""

    seed: int
    violations: list[str]


@dataclass
class Tally:
    """What schedules came to; adds up. `seconds` are of processor time."""

    schedules: int = 0
    failures: list[Failure] = field(default_factory=list)
    faults: dict[str, int] = field(default_factory=dict)
    tokens: int = 0
    virtual_seconds: float = 0.0
    seconds: float = 0.0

    def add(self, other: Tally) -> None:
        """Count another's as well."""
        self.schedules += other.schedules
        self.failures += [Failure(*failure) for failure in other.failures]
        self.faults = dict(collections.Counter(self.faults) + collections.Counter(other.faults))
        self.tokens, self.seconds = self.tokens + other.tokens, self.seconds + other.seconds
        self.virtual_seconds += other.virtual_seconds


class Part(NamedTuple):
    """Seeds whose result is one file."""

    first: int
    size: int

    def path(self, results: Path) -> Path:
        """Where its result is."""
        return results / f"{self.first}-{self.size}.json"


def sources() -> str:
    """A digest of what schedules are made of and what they drive."""
    whole = hashlib.sha256()
    for path in sorted(path for pattern in DRIVEN for path in ROOT.glob(pattern) if not path.name.startswith("test_")):
        whole.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return whole.hexdigest()[:16]


@functools.cache
def loaded() -> str:
    """The digest of what this process runs: taken once, before it imports any of it."""
    return sources()


def begin() -> None:
    """In a worker, before its first part. It ends with its parent, whose end nothing else would tell it: a worker holds
    both ends of the pool's pipes.
    """
    loaded()
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)  # schedules are in the middle of something, and nobody is left to tell

    threading.Thread(target=follow, daemon=True).start()


def run_part(part: Part) -> tuple[Part, str | None, Tally]:
    """Run schedules one after the other; with the digest of what was run, None: it changed meanwhile."""
    ran = loaded()
    if sources() != ran:
        return part, None, Tally()
    from tests.simulation.schedule import run_schedule

    began, tally = time.process_time(), Tally(part.size)
    faults = collections.Counter[str]()
    for seed in range(part.first, part.first + part.size):
        outcome = run_schedule(seed)
        if outcome.violations:
            tally.failures.append(Failure(seed, outcome.violations))
        faults.update(fault.kind for fault in outcome.faults)
        tally.tokens, tally.virtual_seconds = tally.tokens + outcome.tokens, tally.virtual_seconds + outcome.seconds
        if seed % COLLECT == 0:
            gc.collect()
    tally.faults, tally.seconds = dict(faults), time.process_time() - began
    return part, ran if sources() == ran else None, tally


def parts(first: int, count: int) -> Iterator[Part]:
    """The parts of a run."""
    for start in range(first, first + count, PART):
        yield Part(start, min(PART, first + count - start))


def read(path: Path) -> tuple[str, Tally] | None:
    """A part's sources and result; None: there is none."""
    try:
        value = json.loads(path.read_text())
        return value.pop("sources"), Tally(**value)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write(path: Path, value: object) -> None:
    """Whole or not at all: a run may be stopped at any moment."""
    fresh = path.with_suffix(".tmp")
    fresh.write_text(json.dumps(value, sort_keys=True) + "\n")
    fresh.replace(path)


def simulate(wanted: Sequence[Part], results: Path, jobs: int, seconds: float, *, any_sources: bool) -> int:
    """Run the parts that have no result yet in `jobs` processes; 1 where a schedule failed, or the sources changed."""
    results.mkdir(parents=True, exist_ok=True)
    now, began, shown, failed = sources(), time.monotonic(), 0, 0
    left = [part for part in wanted if not _is_done(read(part.path(results)), now, any_sources=any_sources)]
    print(f"{len(wanted) - len(left)} of {len(wanted)} parts have their result; sources {now}", flush=True)
    with multiprocessing.get_context("spawn").Pool(jobs, begin, maxtasksperchild=10) as pool:
        for done, (part, ran, tally) in enumerate(pool.imap_unordered(run_part, left), 1):
            if ran is None:
                print(f"the sources changed while part {part.first} ran: it does not count; run again", flush=True)
                return 1
            write(part.path(results), asdict(tally) | {"sources": ran})
            failed += len(tally.failures)
            for failure in tally.failures:
                if shown < SHOWN:
                    shown += 1
                    print(f"seed {failure.seed} FAILS: {failure.violations[0]}", flush=True)
                    print(f"  replay: python -m bench.simulate --replay {failure.seed}", flush=True)
            if sys.stderr.isatty():
                print(f"\r{done} of {len(left)} parts, {failed} failed", end="", file=sys.stderr, flush=True)
            if seconds and time.monotonic() - began > seconds:
                print("time is over; run again to go on", flush=True)
                break
    print(f"{time.monotonic() - began:.0f} s with {jobs} jobs")
    return bool(failed)


def _is_done(result: tuple[str, Tally] | None, now: str, *, any_sources: bool) -> bool:
    return result is not None and (result[0] == now or (any_sources and not result[1].failures))


def summary(wanted: Sequence[Part], results: Path) -> int:
    """Say what the parts add up to, also in a file beside their folder; 1 where a schedule failed or has no result."""
    groups: dict[str, Tally] = {}
    for part in wanted:
        if (found := read(part.path(results))) is not None:
            groups.setdefault(found[0], Tally()).add(found[1])
    total = Tally()
    for ran, tally in groups.items():
        total.add(tally)
        told = ", ".join(f"{kind} {tally.faults[kind]}" for kind in sorted(tally.faults))
        print(f"sources {ran}: {tally.schedules} schedules, {len(tally.failures)} failed; {tally.tokens} tokens "
              f"committed, {tally.virtual_seconds / 3600:.1f} virtual hours; faults: {told}; {tally.seconds:.0f} s of "
              f"processor time, {1000 * tally.seconds / max(tally.schedules, 1):.1f} ms a schedule")  # fmt: skip
        for failure in tally.failures[:SHOWN]:
            print(f"  seed {failure.seed} failed: {failure.violations[0]}")
    asked = sum(part.size for part in wanted)
    print(f"{total.schedules} of {asked} schedules from seed {wanted[0].first}: {len(total.failures)} failed")
    told_all: list[dict[str, Any]] = [{"sources": ran} | asdict(tally) for ran, tally in groups.items()]
    if groups:
        write(results.with_suffix(".json"), told_all)
    return bool(total.failures) or total.schedules < asked


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


def main() -> int:
    """Parse and run."""
    parser = argparse.ArgumentParser(prog="python -m bench.simulate", description=__doc__.splitlines()[0])
    parser.add_argument("--schedules", type=whole_from(1), default=100_000, help="how many")
    parser.add_argument("--seed", type=int, default=1, help="the first one's")
    parser.add_argument("--jobs", type=whole_from(1), default=len(os.sched_getaffinity(0)), help="processes")
    parser.add_argument("--seconds", type=number(0), default=0, help="stop about then; 0: at the end")
    parser.add_argument("--results", type=Path, default=Path("bench/results/simulation"), help="a folder")
    parser.add_argument("--any-sources", action="store_true", help="clean parts of other sources count as well")
    parser.add_argument("--summary", action="store_true", help="run nothing; add the results up")
    parser.add_argument("--replay", type=int, help="run one seed and print its history")
    given = parser.parse_args()
    if given.replay is not None:
        return replay(given.replay)
    wanted = list(parts(given.seed, given.schedules))
    if given.summary:
        return summary(wanted, given.results)
    failed = simulate(wanted, given.results, given.jobs, given.seconds, any_sources=given.any_sources)
    return failed if given.seconds else summary(wanted, given.results) or failed


if __name__ == "__main__":
    sys.exit(main())
