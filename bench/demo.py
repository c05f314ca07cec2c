"""`make demo`: start the stack, stream real text with its accepted runs marked, compare with plain decoding, stop.

Every prompt of models/demo.json is generated with trees first, streamed as it comes, and then again, with trees and
plainly in turns, for the table: token rates are medians of `ROUNDS` pairs and count from the first chunk to the last.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hedgerow.cli.supervisor import Stack, StackConfig, find_checkout
from hedgerow.client import Client, Options, Step, SyncStream
from hedgerow.errors import HedgerowError

ROUNDS = 3
COLOURS = ("\x1b[38;5;30m", "\x1b[38;5;130m")  # two that read on dark and on light
BONUS, DIM, RESET = "\x1b[1m", "\x1b[2m", "\x1b[0m"


@dataclass(frozen=True)
class Measured:
    """One generation, timed by its client."""

    tokens: Sequence[int]
    steps: int  # decode steps: the prompt's own step is not one
    seconds: float  # from the first chunk to the last

    @property
    def per_step(self) -> float:
        return (len(self.tokens) - 1) / max(self.steps, 1)

    @property
    def rate(self) -> float:
        return (len(self.tokens) - 1) / max(self.seconds, 1e-9)


def open_stream(client: Client, prompt: dict[str, Any], budget: int) -> SyncStream:
    """Starts one generation; `prompt` is an entry of models/demo.json."""
    options: Options = {
        "budget": budget,
        "return_steps": True,
        "max_tokens": prompt["max_tokens"],
        "temperature": prompt["temperature"],
    }
    if "messages" in prompt:
        return client.chat(prompt["messages"], **options)
    return client.generate(prompt["prompt"], **options)


def measure(client: Client, prompt: dict[str, Any], budget: int) -> Measured:
    tokens: list[int] = []
    moments: list[float] = []
    steps: list[Step] = []
    for chunk in open_stream(client, prompt, budget):
        moments.append(time.perf_counter())
        tokens += chunk.tokens
        steps += chunk.steps
    return Measured(tokens, len(steps) - 1, moments[-1] - moments[0])


def show(client: Client, prompt: dict[str, Any], budget: int, colour: bool) -> None:
    """Streams one generation. On a terminal each step's run has a colour of its own; elsewhere the text is bare."""
    asked = prompt["messages"][-1]["content"] if "messages" in prompt else prompt["prompt"]
    print(f"\n{DIM if colour else ''}{asked}{RESET if colour else ''}", end="\n" if "messages" in prompt else "")
    inks: Iterator[str] = itertools.cycle(COLOURS)
    for chunk in open_stream(client, prompt, budget):
        run = sum(step.accepted for step in chunk.steps)
        ink = next(inks) + (BONUS if run > 3 else "") if colour else ""
        print(f"{ink}{chunk.text}{RESET if colour else ''}", end="", flush=True)
    print()


def compare(client: Client, prompt: dict[str, Any], budget: int) -> tuple[Measured, Measured, float, float]:
    """With trees and plainly in turns: the last of each, and both median rates."""
    pairs = [(measure(client, prompt, budget), measure(client, prompt, 0)) for _ in range(ROUNDS)]
    tree_rate = statistics.median(tree.rate for tree, _ in pairs)
    plain_rate = statistics.median(plain.rate for _, plain in pairs)
    return *pairs[-1], tree_rate, plain_rate


def table(client: Client, prompts: Sequence[dict[str, Any]], budget: int) -> bool:
    """Prints the comparison; returns whether every text was the same both ways."""
    head = (
        "",
        "tokens",
        "steps",
        "tokens/step",
        "tok/s trees",
        "tok/s plain",
        "ratio",
        "same tokens as plain decoding",
    )
    widths = [24, 6, 5, 11, 11, 11, 5, 29]
    line = "  ".join(f"{{:>{width}}}" if i else f"{{:{width}}}" for i, width in enumerate(widths))
    print(line.format(*head))
    all_same = True
    for prompt in prompts:
        tree, plain, tree_rate, plain_rate = compare(client, prompt, budget)
        same = tree.tokens == plain.tokens
        all_same &= same
        cells = [
            prompt["id"][:24], len(tree.tokens), tree.steps, f"{tree.per_step:.2f}", f"{tree_rate:.0f}",
            f"{plain_rate:.0f}", f"{tree_rate / plain_rate:.2f}", "yes" if same else "NO",
        ]  # fmt: skip
        print(line.format(*map(str, cells)), flush=True)
    return all_same


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.demo", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", type=Path, default=Path("models/sapling"))
    parser.add_argument("--drafter", type=Path, default=Path("models/sapling-dflash"))
    parser.add_argument("--prompts", type=Path, default=Path("models/demo.json"))
    parser.add_argument("--budget", type=int, default=8)
    args = parser.parse_args(argv)
    prompts = json.loads(args.prompts.read_text())
    with tempfile.TemporaryDirectory(prefix="hedgerow-demo-") as data:
        config = StackConfig(
            find_checkout(), args.model.resolve(), Path(data), args.drafter.resolve(), budget=args.budget
        )
        stack = Stack(config)
        try:
            print("demo: starting redis, kvstore, drafter, verifier and gateway", flush=True)
            stack.start(lambda text: print(f"demo: {text}", flush=True))
            with Client(stack.address("gateway")) as client:
                print(f"demo: trees of {args.budget}; on a terminal every step's run of tokens has its own colour")
                for prompt in prompts:
                    show(client, prompt, args.budget, sys.stdout.isatty())
                print(f"\ndemo: the same prompts with trees and plainly, {ROUNDS} times in turns", flush=True)
                same = table(client, prompts, args.budget)
        except HedgerowError as error:
            print(f"demo: {error}", file=sys.stderr)
            return 1
        finally:
            stack.stop()
            print("demo: stopped everything", flush=True)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
