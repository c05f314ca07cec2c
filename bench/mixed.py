"""Streams that decode while a long prompt is computed beside them: time between steps, and the prompt's first token.

    python -m bench.mixed [--device cuda [--fed]] [--streams 8] [--length 3000] [--factors 0 1.7] [--rounds 5]

In this process, without services. `--warm` steps are run first, then `--alone` steps are timed, then the prompt joins
and steps are timed until its first token. In every round each factor (HEDGEROW_PREFILL_FACTOR) has its turn, with an
engine of its own. A ratio is that of one round; what is told is the median over rounds, and for p99 also that of all
rounds' steps together. `--fed`: steps feed each other on the GPU, as where the drafter is in the verifier's process.
Results go to bench/results/mixed.json (mixed-cuda.json, mixed-fed.json) with machine.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from hedgerow.model.blas import pin_blas

pin_blas(os.environ)  # before torch is loaded, as the services do

import torch  # noqa: E402

from bench.arguments import number, whole_from  # noqa: E402
from bench.drive import Job  # noqa: E402
from bench.serving import percentile  # noqa: E402
from bench.subjects import Subjects, machine  # noqa: E402
from hedgerow.engine.config import EngineConfig  # noqa: E402
from hedgerow.engine.fed import FedVerifier  # noqa: E402
from hedgerow.engine.step import step_here  # noqa: E402
from hedgerow.engine.tree import TreeConfig  # noqa: E402
from hedgerow.engine.types import Sampling, StepResult  # noqa: E402
from hedgerow.engine.verifier import VerifierEngine  # noqa: E402
from hedgerow.model.fed import FedSteps, fed_steps  # noqa: E402
from hedgerow.model.interface import Prepares  # noqa: E402

RESULTS = Path(__file__).parent / "results"
LONG = "long"


class Round(NamedTuple):
    """Milliseconds between steps without and with the prompt, and until its first token."""

    alone: Sequence[float]
    beside: Sequence[float]
    first_token: float


def one_step(engine: VerifierEngine, step: Callable[[], StepResult | None]) -> bool:
    """Runs a step and commits what it brought; whether the long prompt has its first token."""
    result = step()
    assert result is not None, "streams decode until the prompt is done"
    for update in result.updates:
        assert not update.finish or update.session_id == LONG, "a stream ended: raise the room, or lower --alone"
        engine.committed(update.session_id, update.epoch, update.attempt, update.offset + len(update.tokens))
    return any(update.session_id == LONG for update in result.updates)


def timed(engine: VerifierEngine, step: Callable[[], StepResult | None]) -> tuple[float, bool]:
    """Milliseconds of `one_step`, and what it gives."""
    begun = time.perf_counter()
    done = one_step(engine, step)
    return (time.perf_counter() - begun) * 1e3, done


def beside(engine: VerifierEngine, step: Callable[[], StepResult | None]) -> list[float]:
    """Milliseconds of each step until the long prompt, which was just started, has its first token."""
    found, done = list[float](), False
    while not done:
        ms, done = timed(engine, step)
        found.append(ms)
    return found


def settled() -> None:
    """What was made so far stays: as in a service, no full collection walks over it (hedgerow/rpc/work.py)."""
    gc.collect()
    gc.freeze()


def config_of(subjects: Subjects, factor: float, args: argparse.Namespace) -> EngineConfig:
    pages = (args.streams + 1) * -(-(subjects.model.config.max_position_embeddings + args.budget) // 64)
    return EngineConfig(max_sequences=args.streams + 1, pages=pages, prefill_factor=factor)


def prepare(subjects: Subjects, args: argparse.Namespace) -> FedSteps | None:
    """As a verifier does before its first request."""
    model, config = subjects.model, config_of(subjects, 0.0, args)
    if not isinstance(model, Prepares):
        return None
    model.new_cache(config.pages or 0)  # caches have its pages from now on, and nothing has to grow
    model.prepare(args.streams + 1, TreeConfig(args.budget).q_len, config.prefill_rows)
    if isinstance(subjects.draft_model, Prepares):
        subjects.draft_model.prepare(args.streams + 1, max(args.budget, 1))
    steps = fed_steps(model, subjects.draft_model) if args.fed else None
    if steps is not None:
        steps.prepare(args.streams + 1, [args.budget])
    settled()
    return steps


def measure(subjects: Subjects, steps: FedSteps | None, factor: float, turn: int, args: argparse.Namespace) -> Round:
    most = subjects.model.config.max_position_embeddings
    kind = FedVerifier if steps else VerifierEngine
    engine = kind(subjects.model, config_of(subjects, factor, args), subjects.vocabulary, subjects.eos)
    if isinstance(engine, FedVerifier):
        engine.feed(steps)
    drafter = subjects.drafter()

    def step() -> StepResult | None:
        return step_here(engine, drafter)

    endless = Sampling(max_tokens=most - 128, ignore_eos=True)
    for n in range(args.streams):
        prompt = subjects.prompts[(n + turn) % len(subjects.prompts)][-64:]
        engine.start(Job(f"s{n}", prompt, endless, args.budget).start())
    for _ in range(args.warm):
        one_step(engine, step)
    alone = [timed(engine, step)[0] for _ in range(args.alone)]
    tokens = [token for prompt in subjects.prompts for token in prompt]
    long = (tokens * (args.length // len(tokens) + 1))[turn : turn + args.length]
    engine.start(Job(LONG, long, Sampling(max_tokens=1, ignore_eos=True), args.budget).start())
    found = beside(engine, step)
    return Round(alone, found, sum(found))


def line(factor: float, found: Sequence[Round]) -> dict[str, float]:
    def ratio(share: float) -> float:
        ratios = (percentile(one.beside, share) / percentile(one.alone, share) for one in found)
        return round(float(statistics.median(ratios)), 2)

    every = Round([ms for one in found for ms in one.alone], [ms for one in found for ms in one.beside], 0.0)
    return {
        "factor": factor,
        "alone_ms": round(float(statistics.median(percentile(one.alone, 0.5) for one in found)), 2),
        "p50_ratio": ratio(0.5),
        "p99_ratio": ratio(0.99),
        "p99_together": round(percentile(every.beside, 0.99) / percentile(every.alone, 0.99), 2),
        "p99_alone_ms": round(percentile(every.alone, 0.99), 2),
        "first_token_ms": round(float(statistics.median(one.first_token for one in found)), 1),
        "steps_beside": round(float(statistics.median(len(one.beside) for one in found))),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.mixed", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", type=Path, default=Path("models/sapling"))
    parser.add_argument("--drafter", type=Path, default=Path("models/sapling-dflash"))
    parser.add_argument("--heads", type=Path, default=Path("models/heldout/heads.jsonl"))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--fed", action="store_true", help="steps feed each other")
    parser.add_argument("--streams", type=whole_from(1), default=8)
    parser.add_argument("--budget", type=whole_from(0), default=0)
    parser.add_argument("--length", type=whole_from(1), default=3000, help="tokens of the long prompt")
    parser.add_argument("--factors", type=number(0), nargs="+", default=[0.0, 1.7])
    parser.add_argument("--warm", type=whole_from(0), default=300)
    parser.add_argument("--alone", type=whole_from(1), default=200)
    parser.add_argument("--rounds", type=whole_from(1), default=5)
    parser.add_argument("--threads", type=whole_from(1), default=1)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    subjects = Subjects.read(
        args.model, args.drafter, args.heads, most_tokens=1024, threads=args.threads, device=args.device
    )
    steps = prepare(subjects, args)
    assert steps or not args.fed, "these models have no steps that feed each other"
    taken: dict[float, list[Round]] = {factor: [] for factor in args.factors}
    for turn in range(args.rounds):
        for factor in args.factors if turn % 2 else args.factors[::-1]:
            taken[factor].append(measure(subjects, steps, factor, turn, args))
    found = [line(factor, rounds) for factor, rounds in taken.items()]
    for one in found:
        print(json.dumps(one), flush=True)
    asked = {name: getattr(args, name) for name in ("streams", "budget", "length", "rounds", "warm", "alone")}
    RESULTS.mkdir(exist_ok=True)
    file = RESULTS / ("mixed-fed.json" if args.fed else "mixed.json" if args.device == "cpu" else "mixed-cuda.json")
    file.write_text(json.dumps({"machine": machine(), **asked, "factors": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
