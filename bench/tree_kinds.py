"""Conditional trees beside those of the marginals, through two whole stacks at once, in turns.

    python -m bench.tree_kinds [--rounds 7]

Both stacks run the bundled models and differ in `drafter.trees` only; in a round each has a turn of every case, in an
order that changes. `cpu` is tokens over the CPU seconds of all processes of a stack: the clock says less where others
want the cores. Medians over rounds of the ratio conditional / marginal. Tokens are compared in every round. Results go
to bench/results/tree-kinds.json with machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.arguments import whole_from
from bench.auto_budget import RESULTS, SETTINGS, Turn, turn
from bench.subjects import machine
from hedgerow.cli.supervisor import Stack, StackConfig, find_checkout
from hedgerow.client import AsyncClient, Options

KINDS = ("marginal", "conditional")


class Case(NamedTuple):
    streams: int
    budget: int
    setting: str


CASES = (
    Case(1, 7, "greedy"),
    Case(1, 16, "greedy"),
    Case(8, 7, "greedy"),
    Case(8, 16, "greedy"),
    Case(8, 16, "seeded"),
)


async def rounds(stacks: Mapping[str, Stack], prompts: Sequence[str], args: argparse.Namespace) -> list[dict[str, Any]]:
    taken: dict[Case, list[dict[str, Turn]]] = {case: [] for case in CASES}
    async with contextlib.AsyncExitStack() as opened:
        clients = {
            kind: await opened.enter_async_context(AsyncClient(stack.address("gateway")))
            for kind, stack in stacks.items()
        }
        for n in range(args.rounds + 1):  # the first one warms up
            for case in CASES:
                some = [prompts[(n * case.streams + i) % len(prompts)] for i in range(case.streams)]
                how = SETTINGS[case.setting]
                options: Options = {"max_tokens": args.tokens, "seed": n, "budget": case.budget, **how}  # type: ignore[typeddict-item]
                order = KINDS if n % 2 else KINDS[::-1]
                done = {kind: await turn(clients[kind], stacks[kind], some, options) for kind in order}
                if n:
                    taken[case].append(done)
    return [line(case, turns) for case, turns in taken.items()]


def line(case: Case, turns: Sequence[Mapping[str, Turn]]) -> dict[str, Any]:
    def ratio(of: str) -> float:
        rates = [[one[kind].tokens / getattr(one[kind], of) for kind in KINDS] for one in turns]
        return round(float(statistics.median(conditional / marginal for marginal, conditional in rates)), 3)

    same = all(len({one[kind].texts for kind in KINDS}) == 1 for one in turns)
    return {**case._asdict(), "cpu": ratio("cpu"), "clock": ratio("seconds"), "same_tokens": same}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.tree_kinds", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", type=Path, default=Path("models/sapling"))
    parser.add_argument("--drafter", type=Path, default=Path("models/sapling-dflash"))
    parser.add_argument("--heads", type=Path, default=Path("models/heldout/heads.jsonl"))
    parser.add_argument("--tokens", type=whole_from(1), default=128)
    parser.add_argument("--rounds", type=whole_from(1), default=7)
    args = parser.parse_args(argv)
    prompts = [json.loads(text)["prompt"] for text in args.heads.read_text().splitlines()]
    with contextlib.ExitStack() as opened:
        stacks = {}
        for kind in KINDS:
            data = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="hedgerow-bench-")))
            settings = {"drafter": {"TREES": kind}}
            config = StackConfig(find_checkout(), args.model.resolve(), data, args.drafter.resolve(), settings=settings)
            stacks[kind] = opened.enter_context(Stack(config))
        found = asyncio.run(rounds(stacks, prompts, args))
    for one in found:
        print(json.dumps(one), flush=True)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "tree-kinds.json").write_text(json.dumps({"machine": machine(), "cases": found}, indent=1) + "\n")
    return 0 if all(one["same_tokens"] for one in found) else 1


if __name__ == "__main__":
    sys.exit(main())
