"""Budgets that the verifier chooses against fixed ones, through the whole stack, in short turns.

    python -m bench.auto_budget                          the bundled drafter
    python -m bench.auto_budget --useless                its weights shuffled: no tree earns anything
    python -m bench.auto_budget --engine torch --streams 1 8

One stack; in every round each budget has a turn, and so has a request that names none, which HEDGEROW_AUTO_BUDGET
decides. Rates are tokens over seconds while all streams run, from when the last one begins to when the first one ends:
behind that a batch of the same budget is another one, and the smaller the more its streams differ. Medians over rounds,
and of each round's ratios, as a busy machine changes from minute to minute. `cpu` is tokens over the CPU seconds of all
processes of the stack, which say more than the clock where others want the cores. Tokens are compared in every round.
Results go to bench/results/auto-budget[-useless][-torch].json with machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from bench.arguments import whole_from
from bench.subjects import machine
from bench.tracing import cpu
from hedgerow.cli.supervisor import Stack, StackConfig, find_checkout
from hedgerow.client import AsyncClient, Options

RESULTS = Path(__file__).parent / "results"
AUTO = None
SETTINGS: dict[str, dict[str, float]] = {"greedy": {"temperature": 0.0}, "seeded": {"temperature": 0.8, "top_p": 0.95}}


class Turn(NamedTuple):
    """Some streams of one budget, all at once."""

    tokens: int  # after the first chunks
    seconds: float  # from the first chunk to the last
    rate: float  # tokens a second while all run
    cpu: float
    texts: tuple[tuple[int, ...], ...]
    budgets: Counter[int]


def shuffled(drafter: Path, into: Path) -> Path:
    """The drafter with the rows of every matrix in another order, and no card."""
    into.mkdir()
    (into / "config.json").write_bytes((drafter / "config.json").read_bytes())
    draw = torch.Generator().manual_seed(0)
    tensors = {
        name: tensor[torch.randperm(len(tensor), generator=draw)].contiguous() if tensor.dim() > 1 else tensor
        for name, tensor in load_file(drafter / "model.safetensors").items()
    }
    save_file(tensors, into / "model.safetensors", {"format": "pt"})
    return into


class Stream(NamedTuple):
    """One stream's tokens, its chunks (when, how many tokens), and each later step's budget."""

    tokens: list[int]
    chunks: list[tuple[float, int]]
    budgets: list[int]


async def stream(client: AsyncClient, prompt: str, options: Options) -> Stream:
    one = Stream([], [], [])
    async for chunk in client.generate(prompt, **options):
        if one.chunks:
            one.budgets.extend(step.budget for step in chunk.steps)
        one.chunks.append((time.perf_counter(), len(chunk.tokens)))
        one.tokens.extend(chunk.tokens)
    return one


def rate(streams: Sequence[Stream]) -> float:
    """Tokens a second of all streams while all run."""
    begin, end = max(one.chunks[0][0] for one in streams), min(one.chunks[-1][0] for one in streams)
    tokens = sum(count for one in streams for when, count in one.chunks if begin < when <= end)
    return tokens / (end - begin) if end > begin else 0.0


async def turn(client: AsyncClient, stack: Stack, prompts: Sequence[str], options: Options) -> Turn:
    before = sum(cpu(stack))
    done = await asyncio.gather(*(stream(client, prompt, options) for prompt in prompts))
    seconds = max(one.chunks[-1][0] for one in done) - min(one.chunks[0][0] for one in done)
    return Turn(
        sum(len(one.tokens) - one.chunks[0][1] for one in done), seconds, rate(done), sum(cpu(stack)) - before,
        tuple(tuple(one.tokens) for one in done), Counter(budget for one in done for budget in one.budgets),
    )  # fmt: skip


async def rounds(client: AsyncClient, stack: Stack, prompts: Sequence[str], args: argparse.Namespace) -> list[Any]:
    found = []
    for setting, sampling in SETTINGS.items():
        for streams in args.streams:
            turns: dict[int | None, list[Turn]] = {budget: [] for budget in (*args.budgets, AUTO)}
            for n in range(args.warm + args.rounds):
                some = [prompts[(n * streams + i) % len(prompts)] for i in range(streams)]
                order = random.Random(n).sample(list(turns), len(turns))  # no turn always follows the same other one
                for budget in order if n >= args.warm else [AUTO]:
                    options: Options = {"max_tokens": args.tokens, "seed": n, "return_steps": True, **sampling}  # type: ignore[typeddict-item]
                    if budget is not None:
                        options["budget"] = budget
                    one = await turn(client, stack, some, options)
                    if n >= args.warm:
                        turns[budget].append(one)
            found.append({"setting": setting, "streams": streams} | line(turns))
            print(json.dumps(found[-1]), flush=True)
    return found


def line(turns: Mapping[int | None, Sequence[Turn]]) -> dict[str, Any]:
    """Rates by budget, and what the chosen ones are worth against plain decoding and the best fixed one."""
    clock = {budget: [one.rate for one in some] for budget, some in turns.items()}
    cpu = {budget: sum(one.tokens for one in some) / sum(one.cpu for one in some) for budget, some in turns.items()}
    usual = {budget: statistics.median(some) for budget, some in clock.items()}
    best = max((budget for budget in usual if budget is not AUTO), key=lambda budget: usual[budget])
    best_cpu = max(value for budget, value in cpu.items() if budget is not AUTO)
    same = all(len({one.texts for one in some}) == 1 for some in zip(*turns.values(), strict=True))

    def against(budget: int | None) -> float:
        pairs = zip(clock[AUTO], clock[budget], strict=True)
        return round(statistics.median(mine / other for mine, other in pairs), 3)

    return {
        "tokens_per_second": {str(budget): round(value) for budget, value in usual.items()},
        "best_fixed": best,
        "auto_to_best": against(best),
        "auto_to_plain": against(0),
        "cpu_auto_to_best": round(cpu[AUTO] / best_cpu, 3),
        "cpu_auto_to_plain": round(cpu[AUTO] / cpu[0], 3),
        "same_tokens": same,
        "chosen": dict(sorted(sum((one.budgets for one in turns[AUTO]), Counter()).items())),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.auto_budget", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", type=Path, default=Path("models/sapling"))
    parser.add_argument("--drafter", type=Path, default=Path("models/sapling-dflash"))
    parser.add_argument("--heads", type=Path, default=Path("models/heldout/heads.jsonl"))
    parser.add_argument("--useless", action="store_true", help="shuffle the drafter's weights")
    parser.add_argument("--engine", choices=("auto", "torch"), default="auto")
    parser.add_argument("--most", type=whole_from(1), default=16, help="HEDGEROW_AUTO_BUDGET")
    parser.add_argument("--streams", type=whole_from(1), nargs="+", default=[1, 8, 32])
    parser.add_argument("--budgets", type=whole_from(0), nargs="+", default=[0, 4, 8, 16])
    parser.add_argument("--tokens", type=whole_from(1), default=96)
    parser.add_argument(
        "--warm", type=whole_from(0), default=3, help="turns of a kind in which budgets are learned, not counted"
    )
    parser.add_argument("--rounds", type=whole_from(1), default=9)
    args = parser.parse_args(argv)
    prompts = [json.loads(text)["prompt"] for text in args.heads.read_text().splitlines()]
    with tempfile.TemporaryDirectory(prefix="hedgerow-bench-") as data:
        drafter = args.drafter.resolve()
        if args.useless:
            drafter = shuffled(drafter, Path(data) / "shuffled")
        settings = {
            "verifier": {"AUTO_BUDGET": str(args.most), "ENGINE": args.engine, "ACCEPTANCE_LEAST": "0"},
            "drafter": {"ENGINE": args.engine},
        }
        (Path(data) / "stack").mkdir()
        config = StackConfig(find_checkout(), args.model.resolve(), Path(data) / "stack", drafter, settings=settings)

        async def measure(stack: Stack) -> list[Any]:
            async with AsyncClient(stack.address("gateway")) as client:
                return await rounds(client, stack, prompts, args)

        with Stack(config) as stack:
            found = asyncio.run(measure(stack))
    name = "auto-budget" + ("-useless" if args.useless else "") + ("-torch" if args.engine == "torch" else "")
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps({"machine": machine(), "rounds": found}, indent=1) + "\n")
    return 0 if all(one["same_tokens"] for one in found) else 1


if __name__ == "__main__":
    sys.exit(main())
