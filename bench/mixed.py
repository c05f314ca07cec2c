"""Streams that decode while a long prompt is computed beside them: time between steps, and the prompt's first token.

    python -m bench.mixed [--device cuda] [--streams 8] [--length 3000] [--factors 0 1.7] [--rounds 5]

In this process, without services. `--warm` steps are run first, then `--alone` steps are timed, then the prompt joins
and steps are timed until its first token. In every round each factor (HEDGEROW_PREFILL_FACTOR) has its turn, with an
engine of its own. A ratio is that of one round; what is told is the median over rounds. Results go to
bench/results/mixed.json (mixed-cuda.json) with machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from hedgerow.model.blas import pin_blas

pin_blas(os.environ)  # before torch is loaded, as the services do

import torch  # noqa: E402

from bench.drive import Job  # noqa: E402
from bench.serving import percentile  # noqa: E402
from bench.subjects import Subjects, machine  # noqa: E402
from hedgerow.engine.config import EngineConfig  # noqa: E402
from hedgerow.engine.step import Drafter, step  # noqa: E402
from hedgerow.engine.types import Sampling  # noqa: E402
from hedgerow.engine.verifier import VerifierEngine  # noqa: E402

RESULTS = Path(__file__).parent / "results"
LONG = "long"


class Round(NamedTuple):
    """Milliseconds between steps without and with the prompt, and until its first token."""

    alone: Sequence[float]
    beside: Sequence[float]
    first_token: float


async def one_step(engine: VerifierEngine, drafter: Drafter) -> bool:
    """Runs a step and commits what it brought; whether the long prompt has its first token."""
    result = await step(engine, drafter)
    assert result is not None, "streams decode until the prompt is done"
    for update in result.updates:
        assert not update.finish or update.session_id == LONG, "a stream ended: raise the room, or lower --alone"
        engine.committed(update.session_id, update.epoch, update.attempt, update.offset + len(update.tokens))
    return any(update.session_id == LONG for update in result.updates)


async def measure(subjects: Subjects, factor: float, turn: int, args: argparse.Namespace) -> Round:
    most = subjects.model.config.max_position_embeddings
    pages = (args.streams + 1) * -(-most // 64)
    config = EngineConfig(max_sequences=args.streams + 1, pages=pages, prefill_factor=factor)
    engine = VerifierEngine(subjects.model, config, subjects.vocabulary, subjects.eos)
    drafter = subjects.drafter()
    endless = Sampling(max_tokens=most - 128, ignore_eos=True)
    for n in range(args.streams):
        prompt = subjects.prompts[(n + turn) % len(subjects.prompts)][-64:]
        engine.start(Job(f"s{n}", prompt, endless, args.budget).start())
    for _ in range(args.warm):
        await one_step(engine, drafter)

    async def timed() -> tuple[float, bool]:
        begun = time.perf_counter()
        done = await one_step(engine, drafter)
        return (time.perf_counter() - begun) * 1e3, done

    alone = [(await timed())[0] for _ in range(args.alone)]
    tokens = [token for prompt in subjects.prompts for token in prompt]
    long = (tokens * (args.length // len(tokens) + 1))[turn : turn + args.length]
    engine.start(Job(LONG, long, Sampling(max_tokens=1, ignore_eos=True), 0).start())
    beside, done = list[float](), False
    while not done:
        ms, done = await timed()
        beside.append(ms)
    return Round(alone, beside, sum(beside))


def line(factor: float, found: Sequence[Round]) -> dict[str, float]:
    def ratio(share: float) -> float:
        ratios = (percentile(one.beside, share) / percentile(one.alone, share) for one in found)
        return round(float(statistics.median(ratios)), 2)

    return {
        "factor": factor,
        "alone_ms": round(float(statistics.median(percentile(one.alone, 0.5) for one in found)), 2),
        "p50_ratio": ratio(0.5),
        "p99_ratio": ratio(0.99),
        "first_token_ms": round(float(statistics.median(one.first_token for one in found)), 1),
        "steps_beside": round(float(statistics.median(len(one.beside) for one in found))),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.mixed", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", type=Path, default=Path("models/sapling"))
    parser.add_argument("--drafter", type=Path, default=Path("models/sapling-dflash"))
    parser.add_argument("--heads", type=Path, default=Path("models/heldout/heads.jsonl"))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--budget", type=int, default=0)
    parser.add_argument("--length", type=int, default=3000, help="tokens of the long prompt")
    parser.add_argument("--factors", type=float, nargs="+", default=[0.0, 1.7])
    parser.add_argument("--warm", type=int, default=300)
    parser.add_argument("--alone", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    subjects = Subjects.read(
        args.model, args.drafter, args.heads, most_tokens=1024, threads=args.threads, device=args.device
    )
    taken: dict[float, list[Round]] = {factor: [] for factor in args.factors}
    for turn in range(args.rounds):
        for factor in args.factors if turn % 2 else args.factors[::-1]:
            taken[factor].append(asyncio.run(measure(subjects, factor, turn, args)))
    found = [line(factor, rounds) for factor, rounds in taken.items()]
    for one in found:
        print(json.dumps(one), flush=True)
    asked = {name: getattr(args, name) for name in ("streams", "budget", "length", "rounds", "warm", "alone")}
    RESULTS.mkdir(exist_ok=True)
    file = RESULTS / ("mixed.json" if args.device == "cpu" else "mixed-cuda.json")
    file.write_text(json.dumps({"machine": machine(), **asked, "factors": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
