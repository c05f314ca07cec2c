"""Speed, overhead and start-up of the whole stack on this machine, through the SDK, in exact mode.

    python -m bench.serving speed      tok/s of fixed budgets against plain, interleaved, one stream
    python -m bench.serving length     tok/s of 1,000-token outputs against 100-token ones
    python -m bench.serving streams    tok/s of eight streams together against one
    python -m bench.serving overhead   from a step's end in the verifier to the client's receipt, 1 and 32 streams
    python -m bench.serving all        these four; start-up time is always printed

Results go to bench/results/serving-<part>.json with commit and machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.arguments import whole_from
from bench.probe import counters
from bench.subjects import machine
from hedgerow.cli.supervisor import Stack, StackConfig, find_checkout
from hedgerow.client import AsyncClient

RESULTS = Path("bench/results")


@dataclass
class Stream:
    """What a client saw of one generation: when each chunk came and how many tokens it brought."""

    moments: list[float] = field(default_factory=list)  # perf_counter seconds
    counts: list[int] = field(default_factory=list)
    delays: list[float] = field(default_factory=list)  # milliseconds from the step's end to here
    steps: int = 0
    first_steps: int = 0  # of the first chunk

    def rate(self) -> float:
        """Tokens a second after the first chunk."""
        return (sum(self.counts) - self.counts[0]) / (self.moments[-1] - self.moments[0])

    def step_ms(self) -> float:
        """Milliseconds a step, after the first chunk: what `bench.step` takes in one process, and all around it."""
        return 1e3 * (self.moments[-1] - self.moments[0]) / (self.steps - self.first_steps)


async def generate(client: AsyncClient, prompt: str, tokens: int, budget: int) -> Stream:
    stream = Stream()
    options: dict[str, Any] = {"max_tokens": tokens, "budget": budget, "ignore_eos": True, "return_steps": True}
    async for chunk in client.generate(prompt, **options):
        stream.moments.append(time.perf_counter())
        stream.counts.append(len(chunk.tokens))
        stream.steps += len(chunk.steps)
        stream.first_steps = stream.first_steps or len(chunk.steps)
        if chunk.timings is not None:
            stream.delays.append((time.time_ns() - chunk.timings.step_end_unix_ns) / 1e6)
    return stream


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


async def speed(client: AsyncClient, prompts: Sequence[str], args: argparse.Namespace) -> dict[str, Any]:
    """Every budget on every prompt, in turns; the ratio is the median over prompts of paired ratios."""
    rates: dict[int, list[float]] = {budget: [] for budget in args.budgets}
    steps: dict[int, list[float]] = {budget: [] for budget in args.budgets}
    for prompt in prompts[: args.prompts]:
        for budget in args.budgets:
            stream = await generate(client, prompt, args.tokens, budget)
            rates[budget].append(stream.rate())
            steps[budget].append(stream.step_ms())
    out = {}
    for budget, mine in rates.items():
        ratio = statistics.median(a / b for a, b in zip(mine, rates[0], strict=True))
        rate, step = statistics.median(mine), statistics.median(steps[budget])
        out[str(budget)] = {"tok_s": round(rate, 1), "ratio": round(ratio, 3), "step_ms": round(step, 2)}
        print(f"budget {budget:2}: {rate:6.1f} tok/s, {ratio:.2f} x plain, {step:.2f} ms a step", flush=True)
    return out


async def length(client: AsyncClient, prompts: Sequence[str], args: argparse.Namespace) -> dict[str, Any]:
    """One 1,000-token output against a 100-token one of the same prompt, in turns."""
    out = {}
    for budget in (0, args.budget):
        pairs = []
        for prompt in prompts[:4]:
            short = await generate(client, prompt, 100, budget)
            long = await generate(client, prompt, 1000, budget)
            pairs.append((short.rate(), long.rate()))
        ratio = statistics.median(long / short for short, long in pairs)
        out[str(budget)] = {"tok_s_100": [round(a, 1) for a, _ in pairs], "tok_s_1000": [round(b, 1) for _, b in pairs],
                            "ratio": round(ratio, 3)}  # fmt: skip
        print(f"budget {budget}: 1,000-token outputs at {ratio:.2f} of the rate of 100-token ones", flush=True)
    return out


def together(streams: Sequence[Stream]) -> float:
    """Tokens a second of all streams while all of them decode: after the last one's first chunk, until one ends."""
    begin, end = max(stream.moments[0] for stream in streams), min(stream.moments[-1] for stream in streams)
    tokens = sum(
        n for stream in streams for t, n in zip(stream.moments, stream.counts, strict=True) if begin < t <= end
    )
    return tokens / (end - begin)


async def streams(client: AsyncClient, prompts: Sequence[str], args: argparse.Namespace) -> dict[str, Any]:
    """Eight streams against one, in turns."""
    out = {}
    for budget in (0, args.budget):
        rates: dict[int, list[float]] = {1: [], 8: []}
        for first in range(3):
            for count in rates:
                chosen = prompts[8 * first : 8 * first + count]
                done = await asyncio.gather(*(generate(client, text, 4 * args.tokens, budget) for text in chosen))
                rates[count].append(together(done))
        ratio = statistics.median(eight / one for one, eight in zip(rates[1], rates[8], strict=True))
        figures = {str(count): round(statistics.median(some), 1) for count, some in rates.items()}
        out[str(budget)] = {"tok_s": figures, "ratio": round(ratio, 3)}
        print(f"budget {budget:2}: 8 streams together make {ratio:.2f} x the tok/s of one: {figures}", flush=True)
    return out


async def overhead(
    client: AsyncClient, prompts: Sequence[str], args: argparse.Namespace, stack: Stack
) -> dict[str, Any]:
    """Delays from the verifier's step end to the client, and messages a hop sends a step."""
    out = {}
    for streams in (1, 32):
        before = counters(stack)
        chosen = [prompts[i % len(prompts)] for i in range(streams)]
        runs = [generate(client, prompt, args.tokens, args.budget) for prompt in chosen]
        delays = [delay for stream in await asyncio.gather(*runs) for delay in stream.delays]
        spent = {name: value - before[name] for name, value in counters(stack).items()}
        out[str(streams)] = {
            "p50_ms": round(percentile(delays, 0.5), 2),
            "p99_ms": round(percentile(delays, 0.99), 2),
            "verifier_messages_per_step": round(spent["verifier"] / spent["steps"], 2),
            "store_messages_per_step": round(spent["store"] / spent["steps"], 2),
        }
        print(f"{streams:2} streams: {out[str(streams)]}", flush=True)
    return out


Part = Callable[[AsyncClient, Sequence[str], argparse.Namespace], Awaitable[dict[str, Any]]]
# The one without a function looks into the services as well.
PARTS: dict[str, Part | None] = {"speed": speed, "length": length, "streams": streams, "overhead": None}


@contextmanager
def running(args: argparse.Namespace) -> Iterator[Stack]:
    with tempfile.TemporaryDirectory(prefix="hedgerow-bench-") as data:
        engine = {"ENGINE": args.engine}
        config = StackConfig(
            find_checkout(),
            args.model.resolve(),
            Path(data),
            args.drafter.resolve(),
            budget=args.budget,
            settings={"verifier": engine, "drafter": engine},
        )
        began = time.perf_counter()
        with Stack(config) as stack:
            print(f"the whole stack is ready after {time.perf_counter() - began:.1f} s", flush=True)
            args.startup_s = round(time.perf_counter() - began, 1)
            yield stack


async def measure(stack: Stack, args: argparse.Namespace) -> None:
    prompts = [json.loads(line)["prompt"] for line in args.heads.read_text().splitlines()]
    async with AsyncClient(stack.address("gateway")) as client:
        await generate(client, prompts[0], 32, args.budget)  # warms every path
        parts = PARTS if args.part == "all" else {args.part: PARTS[args.part]}
        for name, part in parts.items():
            figures = await (overhead(client, prompts, args, stack) if part is None else part(client, prompts, args))
            result = {"machine": machine(), "engine": args.engine, "startup_s": args.startup_s, name: figures}
            suffix = "" if args.engine == "auto" else f"-{args.engine}"
            (RESULTS / f"serving-{name}{suffix}.json").write_text(json.dumps(result, indent=1) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.serving", description=__doc__.split("\n", 1)[0])
    parser.add_argument("part", nargs="?", default="all", choices=(*PARTS, "all"))
    parser.add_argument("--engine", choices=("auto", "compiled", "torch"), default="auto", help="of both models")
    parser.add_argument("--model", type=Path, default=Path("models/sapling"))
    parser.add_argument("--drafter", type=Path, default=Path("models/sapling-dflash"))
    parser.add_argument("--heads", type=Path, default=Path("models/heldout/heads.jsonl"))
    parser.add_argument("--prompts", type=whole_from(1), default=12)
    parser.add_argument("--tokens", type=whole_from(1), default=96)
    parser.add_argument("--budget", type=whole_from(0), default=8)
    parser.add_argument("--budgets", type=whole_from(0), nargs="*", default=[0, 4, 8, 12, 16])
    args = parser.parse_args(argv)
    with running(args) as stack:
        asyncio.run(measure(stack, args))
    return 0


if __name__ == "__main__":
    sys.exit(main())
