"""Which tree budget pays on this machine: every budget on every prompt, in turns, through a running stack.

What a step costs and what it brings are both measured, so the budget with the highest rate is the one to run, and 0, no
tree, is among them. Rates count from a generation's first chunk to its last: decoding, not the prompt.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hedgerow.client import Client, Options, SyncStream

BUDGETS = (0, 4, 8, 12, 16)
CHOSEN = -1  # in place of a budget: none is named, and the verifier chooses in each step
NOISE = 0.03  # rates this close are called equal: the smaller budget is recommended


@dataclass(frozen=True)
class Measured:
    """One generation, timed by its client."""

    tokens: Sequence[int]
    decoded: int  # tokens after the first chunk, which the prompt's own step made
    steps: int  # that made them
    seconds: float  # that they took


@dataclass(frozen=True)
class Cost:
    """What one budget costs and brings, over some prompts; seconds are medians over rounds."""

    decoded: int
    steps: int
    seconds: float
    same: bool  # every generation had the tokens of plain decoding

    @property
    def per_step(self) -> float:
        return self.decoded / max(self.steps, 1)

    @property
    def step_ms(self) -> float:
        return 1000 * self.seconds / max(self.steps, 1)

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.decoded / max(self.seconds, 1e-9)


def open_stream(client: Client, prompt: Mapping[str, Any], budget: int) -> SyncStream:
    """Starts one generation; `prompt` is an entry of models/demo.json."""
    options: Options = {
        "return_steps": True,
        "max_tokens": prompt["max_tokens"],
        "temperature": prompt["temperature"],
    }
    if budget != CHOSEN:
        options["budget"] = budget
    if "messages" in prompt:
        return client.chat(prompt["messages"], **options)
    return client.generate(prompt["prompt"], **options)


def measure(client: Client, prompt: Mapping[str, Any], budget: int) -> Measured:
    chunks = [(time.perf_counter(), chunk) for chunk in open_stream(client, prompt, budget)]
    later = [chunk for _, chunk in chunks[1:]]
    return Measured(
        tokens=[token for _, chunk in chunks for token in chunk.tokens],
        decoded=sum(len(chunk.tokens) for chunk in later),
        steps=sum(len(chunk.steps) for chunk in later),
        seconds=chunks[-1][0] - chunks[0][0],
    )


def turns(
    generate: Callable[[int, int], Measured],
    prompts: int,
    rounds: tuple[int, int],
    seconds: float,
    budgets: Sequence[int] = BUDGETS,
) -> dict[int, list[list[Measured]]]:
    """`generate(prompt, budget)` for every budget of every prompt, once a round; answers[budget][prompt][round].

    At least `rounds[0]` rounds, and more while `seconds` are not over, up to `rounds[1]`.
    """
    answers: dict[int, list[list[Measured]]] = {budget: [[] for _ in range(prompts)] for budget in budgets}
    began = time.perf_counter()
    for done in range(rounds[1]):
        if done >= rounds[0] and time.perf_counter() - began > seconds:
            break
        for prompt in range(prompts):
            for budget in budgets:
                answers[budget][prompt].append(generate(prompt, budget))
    return answers


def cost(mine: Sequence[Sequence[Measured]], plain: Sequence[Sequence[Measured]]) -> Cost:
    """Of one budget: `mine[prompt][round]`, and `plain` the same of budget 0."""
    same = all(one.tokens == first[0].tokens for runs, first in zip(mine, plain, strict=True) for one in runs)
    return Cost(
        decoded=sum(runs[0].decoded for runs in mine),
        steps=sum(runs[0].steps for runs in mine),
        seconds=sum(statistics.median(run.seconds for run in runs) for runs in mine),
        same=same,
    )


def recommend(costs: Mapping[int, Cost]) -> int:
    """The smallest budget whose rate is within `NOISE` of the highest."""
    highest = max(each.rate for each in costs.values())
    return min(budget for budget, each in costs.items() if each.rate >= (1 - NOISE) * highest)


def best_tree(costs: Mapping[int, Cost]) -> int:
    """The budget of the fastest trees, whether or not they beat plain decoding."""
    return recommend({budget: each for budget, each in costs.items() if budget})


def why(costs: Mapping[int, Cost]) -> str:
    """One line: the recommended budget and the measured costs that recommend it."""
    chosen, tree, plain = recommend(costs), best_tree(costs), costs[0]
    named = f"recommended budget: {chosen}" if chosen else "recommended budget: 0, no tree"
    mine = costs[tree]
    trade = (
        f"a step with trees of {tree} takes {mine.step_ms / plain.step_ms:.2f} x a plain one "
        f"({mine.step_ms:.1f} against {plain.step_ms:.1f} ms) and brings {mine.per_step / plain.per_step:.2f} x the "
        f"tokens, so {mine.rate / plain.rate:.2f} x plain"
    )
    fastest = max(costs, key=lambda budget: costs[budget].rate)
    gain = costs[fastest].rate / costs[chosen].rate - 1
    near = f"; {fastest} measured {gain:.1%} more, within noise ({NOISE:.0%})" if fastest != chosen else ""
    return f"{named}, {costs[chosen].rate:.0f} tok/s: {trade}{near}"
