"""From measured steps to a budget: the numbers on the way, and the plots."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from bench.chart import HEIGHT, WIDTH, Line, chart, ticks
from bench.step_costs import between, curves, fitted, main, rates
from hedgerow.engine.costs import CostModel, Load, distinct

TRUTH = CostModel(fixed=2.5, expert=0.05, row=0.03, key=9e-6, score=2e-7)
ACCEPTANCE = {"tokens_per_step": {"T=0": {"chain 7": 3.7, "tree 4": 3.0, "tree 8": 4.0}, "T=1": {"tree 4": 2.0}}}


def steps() -> dict[str, object]:
    cells = [
        {"batch": batch, "rows": rows, "context": keys, "distinct": distinct(384, 8, batch, rows)}
        for batch in (1, 8)
        for rows in (1, 8, 32)
        for keys in (8192, 32768)
    ]
    for cell in cells:
        load = Load(
            [int(cell["rows"])] * int(cell["batch"]), [int(cell["context"])] * int(cell["batch"]), cell["distinct"]
        )
        cell["ms"] = TRUTH.milliseconds(load)
    return {"device": "a card", "law": "g2", "layers": 61, "cells": cells}


def test_sums_between_ranks_are_part_of_every_step() -> None:
    found = fitted(steps(), 10.0)
    assert found.fixed == pytest.approx(TRUTH.fixed + 122 * 0.01)
    assert found.expert == pytest.approx(TRUTH.expert)
    assert (found.machine, found.law, found.ranks) == ("a card", "g2", 8)


def test_a_curve_begins_with_plain_decoding_and_knows_no_chains() -> None:
    found = curves(ACCEPTANCE)
    assert found["T=0"] == {0: 1.0, 1: 1.5, 2: 2.0, 3: 2.5, 4: 3.0, 6: 3.5, 8: 4.0}
    assert max(found["T=1"]) == 4
    assert between({0: 1.0, 4: 3.0}, 4) == 3.0


def test_rates_are_tokens_over_the_predicted_step() -> None:
    load = Load([5] * 8, [8192] * 8, distinct(384, 8, 8, 5))
    assert rates(TRUTH, {4: 3.0}, 8, 0.0) == {4: pytest.approx(3000 / TRUTH.milliseconds(load))}


def test_the_command_writes_the_model_and_its_plots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, content in (("steps", steps()), ("acceptance", ACCEPTANCE)):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    out = ["--steps", "steps.json", "--acceptance", "acceptance.json", "--costs", "costs.json", "--plots", "plots"]
    assert main([str(tmp_path / part) if not part.startswith("--") else part for part in out]) == 0
    assert CostModel.read(tmp_path / "costs.json").expert == pytest.approx(TRUTH.expert)
    assert "best budget  4" in capsys.readouterr().out
    for plot in ("step-ms", "budget-greedy", "budget-sampled"):
        root = ElementTree.fromstring((tmp_path / "plots" / f"{plot}.svg").read_text())
        assert len(root.findall("{*}path[@fill='none']")) == 5, plot


def test_a_chart_keeps_inside_and_its_numbers_are_round() -> None:
    assert ticks(4.6) == [0, 1, 2, 3, 4, 5]
    assert ticks(32) == [0, 10, 20, 30, 40]
    drawn = chart("a < b", "x", "y", [Line("one", [(0, 0), (32, 4.6)], 1), Line("two", [(3, 2)])])
    root = ElementTree.fromstring(drawn)
    (dot,) = root.findall("{*}circle")
    assert 0 < float(dot.get("cx", "")) < WIDTH
    assert 0 < float(dot.get("cy", "")) < HEIGHT
    assert "a &lt; b" in drawn
