"""From measured steps to a cost model, and from that and an acceptance curve to the best fixed budget, with plots.

    python -m bench.step_costs [--steps bench/results/rank-step.json] [--acceptance bench/results/acceptance.json]
        [--costs bench/results/step-costs.json] [--plots docs/plots]

The steps are a rank's (bench/rank_step.py) and know no communication; `--sum-us` adds what the end of a block costs
between the ranks (bench/rank_sums.py), twice a layer. Acceptance is a curve of some drafter and target: here those of
the bundled model, on its own text, which stand for any.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.arguments import number
from bench.chart import Line, chart
from hedgerow.engine.costs import CostModel, Load, best_budget, distinct
from hedgerow.engine.tree import TreeConfig

EXPERTS, TOP_K, RANKS = 384, 8, 8
BUDGETS = (0, 1, 2, 3, 4, 6, 8, 10, 12, 16, 24, 32)
KEYS = 8192


def fitted(report: Mapping[str, Any], sum_us: float) -> CostModel:
    """Of all cells; `sum_us` goes into what every step takes."""
    steps = [
        (Load([cell["rows"]] * cell["batch"], [cell["context"]] * cell["batch"], cell["distinct"]), cell["ms"])
        for cell in report["cells"]
    ]
    of = {"machine": report["device"], "law": report["law"], "ranks": RANKS, "experts": EXPERTS, "top_k": TOP_K}
    found = CostModel.fit(steps, **of)
    return replace(found, fixed=found.fixed + 2 * report["layers"] * sum_us / 1000)


def curves(report: Mapping[str, Any]) -> dict[str, dict[int, float]]:
    """Tokens a step by budget, for each setting: measured at some, straight lines between them; 1 without a tree."""
    found = {}
    for setting, line in report["tokens_per_step"].items():
        known = {0: 1.0} | {int(name.removeprefix("tree ")): value for name, value in line.items() if "tree" in name}
        most = max(known)
        found[setting] = {budget: between(known, budget) for budget in BUDGETS if budget <= most}
    return found


def between(known: Mapping[int, float], budget: int) -> float:
    below = max(place for place in known if place <= budget)
    above = min(place for place in known if place >= budget)
    share = (budget - below) / (above - below) if above > below else 0.0
    return known[below] + share * (known[above] - known[below])


def rates(costs: CostModel, accepted: Mapping[int, float], trees: int, overlap: float) -> dict[int, float]:
    """Tokens a second of one sequence, by budget."""
    found = {}
    for budget, tokens in accepted.items():
        rows = TreeConfig(budget).q_len
        load = Load([rows] * trees, [KEYS] * trees, distinct(EXPERTS, TOP_K, trees, rows, overlap))
        found[budget] = 1000 * tokens / costs.milliseconds(load)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=Path, default=Path("bench/results/rank-step.json"))
    parser.add_argument("--acceptance", type=Path, default=Path("bench/results/acceptance.json"))
    parser.add_argument("--costs", type=Path, default=Path("bench/results/step-costs.json"))
    parser.add_argument("--plots", type=Path, default=Path("docs/plots"))
    parser.add_argument("--sum-us", type=number(0), default=0.0)
    asked = parser.parse_args(arguments)
    costs = fitted(json.loads(asked.steps.read_text()), asked.sum_us)
    costs.write(asked.costs)
    print(costs)
    accepted = curves(json.loads(asked.acceptance.read_text()))
    asked.plots.mkdir(exist_ok=True)
    times = [
        Line(
            f"{trees} sequences" if trees > 1 else "1 sequence",
            [(b, costs.milliseconds(_load(trees, b))) for b in BUDGETS],
        )
        for trees in (1, 2, 4, 8, 16)
    ]
    (asked.plots / "step-ms.svg").write_text(
        chart("What a step takes: one rank of eight, 8,192 tokens", "nodes of each tree", "ms", times)
    )
    for name, (setting, line) in zip(("greedy", "sampled"), accepted.items(), strict=False):
        lines = []
        for trees in (1, 2, 4, 8, 16):
            found, plain = rates(costs, line, trees, 0.0), rates(costs, {0: 1.0}, trees, 0.0)[0]
            best = best_budget(costs, line, KEYS, trees, EXPERTS, TOP_K, 0.0)
            shared = best_budget(costs, line, KEYS, trees, EXPERTS, TOP_K, 0.5)
            budgets = list(found)
            lines.append(Line(f"{trees} at once", [(b, found[b] / plain) for b in budgets], budgets.index(best.budget)))
            print(
                f"{setting} {trees:3} sequences: plain {plain:6.1f} tok/s each, best budget {best.budget:2} "
                f"{found[best.budget]:6.1f} ({found[best.budget] / plain:.2f}x); with an overlap of 0.5 {shared.budget}"
            )
        (asked.plots / f"budget-{name}.svg").write_text(
            chart(f"What a budget brings ({setting})", "nodes of each tree", "speed, plain decoding = 1", lines)
        )
    return 0


def _load(trees: int, budget: int) -> Load:
    rows = TreeConfig(budget).q_len
    return Load([rows] * trees, [KEYS] * trees, distinct(EXPERTS, TOP_K, trees, rows))


if __name__ == "__main__":
    sys.exit(main())
