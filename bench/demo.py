"""`make demo`: start the stack, stream real text with its accepted runs marked, see which trees pay, stop.

Every prompt of models/demo.json is streamed with trees first. Then all of them run with every budget, plain decoding
among them, in turns: the tables show what a step costs and brings with each, and the budget that this recommends. One
more turn names no budget: the verifier chooses in each step.
Where the drafter has a selector, what conditional trees bring is shown beside the trees of its marginals.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.arguments import number, whole_from
from bench.budgets import BUDGETS, CHOSEN, Cost, Measured, best_tree, cost, measure, open_stream, recommend, turns, why
from hedgerow.cli.supervisor import Stack, StackConfig, find_checkout
from hedgerow.client import Client
from hedgerow.errors import HedgerowError
from hedgerow.model.selector import BESIDE

ROUNDS = (3, 7)  # at least, at most
MOST = 16  # nodes of a tree whose budget the verifier chooses
KIND_BUDGETS = (8, 16)  # at which both kinds of trees are compared
COLOURS = ("\x1b[38;5;30m", "\x1b[38;5;130m")  # two that read on dark and on light
BONUS, DIM, RESET = "\x1b[1m", "\x1b[2m", "\x1b[0m"
Answers = Mapping[int, Sequence[Sequence[Measured]]]  # [budget][prompt][round]


def show(client: Client, prompt: dict[str, Any], budget: int, colour: bool) -> None:
    """Streams one generation. On a terminal each step's run has a colour of its own; elsewhere a run of several tokens
    is in brackets.
    """
    asked = prompt["messages"][-1]["content"] if "messages" in prompt else prompt["prompt"]
    print(f"\n{DIM if colour else ''}{asked}{RESET if colour else ''}", end="\n" if "messages" in prompt else "")
    inks: Iterator[str] = itertools.cycle(COLOURS)
    for chunk in open_stream(client, prompt, budget):
        run = sum(step.accepted for step in chunk.steps)
        before, after = ("[", "]") if run and chunk.text else ("", "")
        if colour:
            before, after = next(inks) + (BONUS if run > 3 else ""), RESET
        print(f"{before}{chunk.text}{after}", end="", flush=True)
    print()


def print_table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Columns as wide as their widest cell; the first to the left, the others to the right."""
    cells = [list(map(str, row)) for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        rest = (f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))
        print("  ".join((f"{row[0]:{widths[0]}}", *rest)))


def yes(same: bool) -> str:
    return "yes" if same else "NO"


def named(budget: int) -> str:
    if budget == CHOSEN:
        return f"chosen, to {MOST}"
    return f"trees of {budget}" if budget else "no tree"


def print_budgets(costs: Mapping[int, Cost], best: int) -> None:
    """What every budget costs and brings, `best` marked as recommended."""
    plain = costs[0].rate
    rows = [
        (
            named(budget) + (" <- recommended" if budget == best else ""),
            f"{each.per_step:.2f}", f"{each.step_ms:.2f}", f"{each.rate:.0f}", f"{each.rate / plain:.2f}",
            yes(each.same),
        )
        for budget, each in costs.items()
    ]  # fmt: skip
    print_table(("", "tokens/step", "ms/step", "tok/s", "x plain", "same tokens as plain decoding"), rows)


def print_prompts(names: Sequence[str], answers: Answers, budget: int) -> None:
    """Every prompt with trees of one budget against plain decoding, out of the same runs."""
    rows = []
    for name, trees, plain in zip(names, answers[budget], answers[0], strict=True):
        tree, without = cost([trees], [plain]), cost([plain], [plain])
        rows.append((
            name[:24], len(trees[0].tokens), tree.steps, f"{tree.per_step:.2f}", f"{tree.rate:.0f}",
            f"{without.rate:.0f}", f"{tree.rate / without.rate:.2f}", yes(tree.same),
        ))  # fmt: skip
    head = (
        f"trees of {budget}", "tokens", "steps", "tokens/step", "tok/s trees", "tok/s plain", "ratio",
        "same tokens as plain decoding",
    )  # fmt: skip
    print_table(head, rows)


def compare(client: Client, prompts: Sequence[dict[str, Any]], seconds: float) -> tuple[bool, Answers]:
    """Measures and prints both tables and the recommendation; whether every text was that of plain decoding."""
    budgets = (*BUDGETS, CHOSEN)
    answers = turns(
        lambda prompt, budget: measure(client, prompts[prompt], budget), len(prompts), ROUNDS, seconds, budgets
    )
    costs = {budget: cost(answers[budget], answers[0]) for budget in budgets}
    fixed = {budget: costs[budget] for budget in BUDGETS}
    print(f"demo: each ran {len(answers[0][0])} times; rates are of one stream, from medians\n")
    print_budgets(costs, recommend(fixed))
    print()
    print_prompts([prompt["id"] for prompt in prompts], answers, best_tree(fixed))
    same = all(each.same for each in costs.values())
    print(f"\ndemo: {why(fixed)}")
    print(f"demo: same tokens as plain decoding, every budget and round: {yes(same)}")
    return same, answers


def compare_kinds(config: StackConfig, prompts: Sequence[dict[str, Any]], conditional: Answers) -> bool:
    """Trees of the marginals once, at KIND_BUDGETS, in a stack of their own, beside the conditional ones."""
    print("\ndemo: the same prompts once with trees of the drafter's marginals, without its selector", flush=True)
    with tempfile.TemporaryDirectory(prefix="hedgerow-demo-") as data:
        other = replace(config, data=Path(data), settings={"drafter": {"TREES": "marginal"}})
        with Stack(other) as stack, Client(stack.address("gateway")) as client:
            marginal = {b: [[measure(client, prompt, b)] for prompt in prompts] for b in KIND_BUDGETS}
    return print_kinds({b: conditional[b] for b in KIND_BUDGETS}, {0: conditional[0], **marginal})


def print_kinds(conditional: Answers, marginal: Answers) -> bool:
    """Tokens a step of both kinds at the same budgets; whether all texts are the same, and plain decoding's."""
    rows, same = list[Sequence[object]](), True
    for budget, runs in conditional.items():
        other, mine = cost(marginal[budget], marginal[0]), cost(runs, marginal[0])
        both, gain = mine.same and other.same, mine.per_step / other.per_step - 1
        same = same and both
        rows.append((f"trees of {budget}", f"{other.per_step:.2f}", f"{mine.per_step:.2f}", f"{gain:+.1%}", yes(both)))
    print_table(("tokens/step", "marginal", "conditional", "gain", "same tokens as plain decoding"), rows)
    return same


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.demo", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", type=Path, default=Path("models/sapling"))
    parser.add_argument("--drafter", type=Path, default=Path("models/sapling-dflash"))
    parser.add_argument("--prompts", type=Path, default=Path("models/demo.json"))
    parser.add_argument("--budget", type=whole_from(0), default=8, help="of the texts that are streamed first")
    parser.add_argument(
        "--seconds", type=number(0), default=20.0, help="no further round of measuring begins after these"
    )
    args = parser.parse_args(argv)
    prompts = json.loads(args.prompts.read_text())
    with tempfile.TemporaryDirectory(prefix="hedgerow-demo-") as data:
        selects = (args.drafter / BESIDE).is_dir()
        config = StackConfig(
            find_checkout(), args.model.resolve(), Path(data), args.drafter.resolve(), budget=args.budget,
            settings={"verifier": {"AUTO_BUDGET": str(MOST)}, "drafter": {"TREES": "conditional"} if selects else {}},
        )  # fmt: skip
        stack = Stack(config)
        try:
            print("demo: starting redis, kvstore, drafter, verifier and gateway", flush=True)
            stack.start(lambda text: print(f"demo: {text}", flush=True))
            with Client(stack.address("gateway")) as client:
                how = "has its own colour" if sys.stdout.isatty() else "of several tokens is in brackets"
                print(f"demo: trees of {args.budget}; every step's run {how}")
                for prompt in prompts:
                    show(client, prompt, args.budget, sys.stdout.isatty())
                print("\ndemo: the same prompts in turns, without trees and with four sizes of them", flush=True)
                same, answers = compare(client, prompts, args.seconds)
            if selects:
                stack.stop()
                same = compare_kinds(config, prompts, answers) and same
        except HedgerowError as error:
            print(f"demo: {error}", file=sys.stderr)
            return 1
        finally:
            stack.stop()
            print("demo: stopped everything", flush=True)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
