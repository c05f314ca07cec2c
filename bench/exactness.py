"""The exactness run: trees of every budget, batched and alone, against plain one-by-one decoding, token for token.

    python -m bench.exactness run --prompts 40      every cell that has no result yet; stops and resumes
    python -m bench.exactness run --jobs 8          eight processes that share the cells; one a core if not given
    python -m bench.exactness summary               what the results add up to
    python -m bench.exactness slice --seconds 170   random parts of it within a time, for `make test`
    python -m bench.exactness run --device cuda --fast      how many tokens differ where the law of splits is not kept

A cell is a sampling setting and a block of eight prompts; its result is one file. In a cell every prompt is decoded
plainly by a bare loop over the model, then by the engine at budgets 0 to 63, one at a time and eight at once (arriving
one after the other), with the drafter; and for the first 20 prompts with random valid trees. On a GPU the engine's
steps feed each other, as in the service. Results count together only if they come from the same source and checkpoints.
Exits with 1 if any token differs. With --fast they may: path D then splits keys by the batch's size, which nobody is
served with, and what that does is counted (--results elsewhere).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

from hedgerow.model.blas import pin_blas

pin_blas(os.environ)  # before torch is loaded, as the services do

import torch  # noqa: E402

from bench.arguments import DAY, number, whole_from  # noqa: E402
from bench.drive import Job, drive_now, plain  # noqa: E402
from bench.exactness_cells import Cell, Extent, Tally  # noqa: E402
from bench.sharing import others, read, taken, write  # noqa: E402
from bench.subjects import Subjects, logit_gap, machine  # noqa: E402
from hedgerow.engine.config import EngineConfig  # noqa: E402
from hedgerow.engine.fed import FedVerifier  # noqa: E402
from hedgerow.engine.step import Drafter  # noqa: E402
from hedgerow.engine.types import Sampling  # noqa: E402
from hedgerow.model.fed import fed_steps  # noqa: E402
from hedgerow.scheduling import usable_cores  # noqa: E402
from tests.random_drafter import RandomDrafter  # noqa: E402

SETTINGS = {
    "greedy": Sampling(temperature=0.0),
    "t1": Sampling(temperature=1.0),
    "t08-p095": Sampling(temperature=0.8, top_p=0.95),
    "t07-k20": Sampling(temperature=0.7, top_k=20),
}
BUDGETS = (0, 1, 7, 12, 16, 32, 63)
BATCHES = (1, 8)
BLOCK = 8
RANDOM_PROMPTS = 20  # that are also run with random trees


class Comparison:
    """Runs jobs through the engine and compares them with plain decoding, which is done once per prompt and setting.

    fast: path D splits keys at multiples of 32 times the batch, not of what the session's length gives.
    """

    def __init__(self, subjects: Subjects, tokens: int, fast: bool = False) -> None:
        self.subjects, self.tokens, self.fast = subjects, tokens, fast
        self.feed = fed_steps(subjects.model, subjects.draft_model)
        self._plain: dict[tuple[str, int], list[int]] = {}

    def sampling(self, setting: str, prompt: int) -> Sampling:
        # all of the tokens are wanted, so an end of sequence does not end it
        return replace(SETTINGS[setting], seed=1000 + prompt, max_tokens=self.tokens, ignore_eos=True)

    def reference(self, setting: str, prompt: int) -> list[int]:
        key = (setting, prompt)
        if key not in self._plain:
            s = self.subjects
            self._plain[key] = plain(s.model, s.prompts[prompt], self.sampling(setting, prompt), s.eos)
        return self._plain[key]

    def run(self, setting: str, prompts: Sequence[int], budget: int, batch: int, trees: str) -> Tally:
        """The prompts at one budget, `batch` at a time."""
        begun, s = time.perf_counter(), self.subjects
        expected = {f"p{p}": self.reference(setting, p) for p in prompts}
        engine = FedVerifier(s.model, EngineConfig(max_sequences=batch), s.vocabulary, s.eos)
        engine.feed(self.feed)
        jobs = [
            Job(f"p{p}", s.prompts[p], self.sampling(setting, p), budget, arrives=2 * i) for i, p in enumerate(prompts)
        ]
        drafter: Drafter = s.drafter()
        if trees == "random":  # of tokens that do occur, so that a node is accepted now and then
            drafter = RandomDrafter(1000 * prompts[0] + budget, sorted({t for text in expected.values() for t in text}))
        with split_by(batch) if self.fast else nullcontext():
            done = drive_now(engine, drafter, jobs)
        got = done.tokens
        tally = Tally(len(jobs), sum(map(len, got.values())), steps=len(done.results), fed=engine.fed_steps)
        for job, prompt in zip(jobs, prompts, strict=True):
            if got[job.name] != expected[job.name]:
                where = {"setting": setting, "prompt": prompt, "budget": budget, "batch": batch, "trees": trees}
                tally.differences.append(where | self.divergence(job, expected[job.name], got[job.name]))
        tally.seconds = time.perf_counter() - begun
        return tally

    def divergence(self, job: Job, expected: list[int], got: list[int]) -> dict[str, object]:
        """The first differing offset, both tokens, and how far apart their logits are."""
        pairs = enumerate(zip(expected, got, strict=False))
        offset = next((i for i, (a, b) in pairs if a != b), min(len(expected), len(got)))
        a, b = (tokens[offset] if offset < len(tokens) else None for tokens in (expected, got))
        gap = None
        if a is not None and b is not None:
            gap = logit_gap(self.subjects.model, [*job.prompt, *expected[:offset]], a, b)
        return {"offset": offset, "position": len(job.prompt) + offset, "plain": a, "tree": b, "logit_gap": gap}


@contextmanager
def split_by(batch: int) -> Iterator[None]:
    """Path D's splits on a GPU as wide as suits a batch: what a fast mode would do, and sessions forbid."""
    from hedgerow.model import cuda_plan  # needs triton

    law, width = cuda_plan.width_of, max(64, 32 * batch)
    cuda_plan.width_of = cast(Any, lambda limit: width)
    try:
        yield
    finally:
        cuda_plan.width_of = law


def run_cell(comparison: Comparison, cell: Cell, extent: Extent) -> Tally:
    tally = Tally()
    for batch in extent.batches:
        for budget in extent.budgets:
            if budget or cell.trees == "drafter":
                tally.add(comparison.run(cell.setting, extent.members(cell), budget, batch, cell.trees))
    return tally


def load(args: argparse.Namespace) -> Subjects:
    torch.set_num_threads(args.threads)
    if args.tiny:
        return Subjects.tiny(engine=args.engine)
    return Subjects.read(args.model, args.drafter, args.heads, most_tokens=1024, engine=args.engine, device=args.device)


def run(args: argparse.Namespace) -> int:
    """Every cell whose result is missing, of other source, or of other checkpoints."""
    args.results.mkdir(parents=True, exist_ok=True)
    with others(["-m", "bench.exactness", *args.given, "--jobs", "1"], args.jobs - 1) as crowd:
        mine = run_cells(args)
    return 1 if mine or any(process.returncode for process in crowd) else 0


def run_cells(args: argparse.Namespace) -> int:
    """Cell after cell that no other process is at."""
    subjects = load(args)
    comparison, failed = Comparison(subjects, args.tokens, args.fast), 0
    count = min(args.prompts, len(subjects.prompts))
    lists = tuple(args.settings), tuple(args.budgets), tuple(args.batches)
    extent = Extent(count, args.random_prompts, args.block, *lists)
    identity = subjects.identity | {"tokens_each": args.tokens, "extent": [list(part) for part in lists]}
    identity |= {"steps": "fed" if comparison.feed else "waiting"} | ({"fast": True} if args.fast else {})
    until = time.monotonic() + args.seconds if args.seconds else None
    for cell in extent.cells():
        path = args.results / f"{cell.name}.json"
        with taken(path.with_suffix(".lock")) as free:
            done = read(path)
            if not free or (done and done["identity"] == identity and done["prompts"] == extent.members(cell)):
                continue
            if until is not None and time.monotonic() > until:
                print("time is over; run again to go on", flush=True)
                break
            tally = run_cell(comparison, cell, extent)
            result = {"cell": cell.name, "prompts": extent.members(cell), "identity": identity, "machine": machine()}
            write(path, result | asdict(tally))
        print(f"{cell.name}: {tally}, {tally.seconds:.0f} s", flush=True)
        failed += 0 if args.fast else report(tally)
    return 1 if failed else 0


def slice_(args: argparse.Namespace) -> int:
    """Random (setting, prompts, budget, batch, trees) until the time is over, one at least."""
    seed = args.seed if args.seed is not None else random.SystemRandom().randrange(1_000_000)
    print(f"exactness slice, seed {seed}: python -m bench.exactness slice --seed {seed}", flush=True)
    begun, choose, total, longest = time.monotonic(), random.Random(seed), Tally(), 0.0
    subjects = load(args)
    comparison, everyone = Comparison(subjects, args.tokens), range(len(subjects.prompts))
    comparison.reference("greedy", choose.choice(everyone))
    # as many prompts at once as this machine decodes plainly in a twentieth of the time
    count = min(max(int(args.seconds / 20 / (time.monotonic() - begun)), 1), 8, len(everyone))
    while not total.sequences or time.monotonic() - begun + 1.5 * longest < args.seconds:
        setting, prompts = choose.choice(list(SETTINGS)), sorted(choose.sample(everyone, count))
        for _ in range(4):  # the plain reference is dear: several comparisons share one
            started = time.monotonic()
            trees = "random" if choose.random() < 0.2 else "drafter"
            total.add(comparison.run(setting, prompts, choose.choice(BUDGETS), choose.choice(BATCHES), trees))
            longest = max(longest, time.monotonic() - started)
            if time.monotonic() - begun + longest > args.seconds:
                break
    print(f"{total}, {time.monotonic() - begun:.0f} s")
    return 1 if report(total) else 0


def summary(args: argparse.Namespace) -> int:
    """Adds the results up, for each source and machine that they come from, also into a file beside their folder."""
    groups: dict[str, Tally] = {}
    for path in sorted(args.results.glob("*.json")):
        result = read(path)
        if result is None:
            print(f"{path}: not a result")
            return 1
        key = json.dumps(result["identity"] | result["machine"], sort_keys=True)
        counts = {name: result[name] for name in ("sequences", "tokens", "differences", "seconds", "steps", "fed")}
        groups.setdefault(key, Tally()).add(Tally(**counts))
    if not groups:
        print(f"no results in {args.results}")
        return 1
    for key, tally in groups.items():
        print(f"{tally}, {tally.seconds:.0f} s: {key}")
    write(args.results.with_suffix(".json"), [json.loads(key) | asdict(tally) for key, tally in groups.items()])
    return 1 if sum(report(tally) for tally in groups.values()) else 0


def report(tally: Tally) -> int:
    """Prints the first divergence; gives the number of them."""
    if tally.differences:
        print(f"DIFFERENT: {json.dumps(tally.differences[0])}", file=sys.stderr)
    return len(tally.differences)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.exactness", description=__doc__.split("\n", 1)[0])
    commands = parser.add_subparsers(required=True)
    for name, command in (("run", run), ("slice", slice_), ("summary", summary)):
        sub = commands.add_parser(name, help=(command.__doc__ or "").split("\n", 1)[0])
        sub.set_defaults(command=command)
        sub.add_argument("--results", type=Path, default=Path("bench/results/exactness"))
        sub.add_argument("--model", type=Path, default=Path("models/sapling"))
        sub.add_argument("--drafter", type=Path, default=Path("models/sapling-dflash"))
        sub.add_argument("--heads", type=Path, default=Path("models/heldout/heads.jsonl"))
        sub.add_argument("--tiny", action="store_true", help="random weights instead of the bundled model")
        sub.add_argument("--engine", choices=("torch", "compiled", "auto"), default="auto", help="of the target")
        sub.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of target and drafter")
        sub.add_argument("--tokens", type=whole_from(1), default=96, help="of each generation")
        sub.add_argument("--threads", type=whole_from(1), default=1)
        sub.add_argument("--seconds", type=number(0, DAY), default=170 if name == "slice" else 0)
        if name == "run":
            sub.add_argument("--prompts", type=whole_from(1), default=40)
            sub.add_argument(
                "--random-prompts",
                type=whole_from(0),
                default=RANDOM_PROMPTS,
                help="that are also run with random trees",
            )
            sub.add_argument("--block", type=whole_from(1), default=BLOCK, help="prompts of a cell; no batch is larger")
            sub.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
            sub.add_argument("--budgets", nargs="+", type=whole_from(0), default=BUDGETS)
            sub.add_argument("--batches", nargs="+", type=whole_from(1), default=BATCHES)
            sub.add_argument(
                "--jobs", type=whole_from(1), default=usable_cores(), help="processes that share the cells"
            )
            sub.add_argument("--fast", action="store_true", help="count what splits by batch change, on a GPU")
        if name == "slice":
            sub.add_argument("--seed", type=int)
    args = parser.parse_args(argv)
    if args.command is run and max(args.batches) > args.block:
        parser.error(f"--batches: {max(args.batches)} is more than the {args.block} prompts of a --block")
    args.given = sys.argv[1:] if argv is None else list(argv)
    result: int = args.command(args)
    return result


if __name__ == "__main__":
    sys.exit(main())
