"""The cost model: what it is fitted to comes back, its file is checked, and the best budget follows from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench.rank_floor import distinct as counted
from bench.rank_floor import routing
from hedgerow.engine.costs import CostModel, Load, best_budget, distinct
from hedgerow.errors import InvalidRequest
from hedgerow.model.config import K2Config
from hedgerow.model.fields import ConfigError
from hedgerow.weights.published import TRUE, config

TRUTH = CostModel(fixed=2.5, expert=0.05, row=0.03, key=9e-6, score=2e-7)
ACCEPTED = {0: 1.0, 4: 3.4, 8: 4.1, 16: 4.4, 32: 4.6}


def measured(truth: CostModel) -> list[tuple[Load, float]]:
    loads = [
        Load([rows] * trees, [keys] * trees, distinct(384, 8, trees, rows))
        for trees in (1, 8)
        for rows in (1, 8, 16, 64)
        for keys in (8192, 32768)
    ]
    return [(load, truth.milliseconds(load)) for load in loads]


def test_a_fit_finds_the_terms_that_made_the_steps() -> None:
    found = CostModel.fit(measured(TRUTH), machine="m", law="g2", ranks=8)
    for name in ("fixed", "expert", "row", "key", "score"):
        assert getattr(found, name) == pytest.approx(getattr(TRUTH, name), rel=1e-6), name
    assert found.worst < 1e-9
    assert (found.machine, found.law, found.ranks) == ("m", "g2", 8)


def test_no_term_is_negative_and_the_worst_error_is_told() -> None:
    """Steps that got faster with their length: that is noise, and not a reward for long contexts."""
    steps = [
        (load, ms * (0.95 if load.keys[0] > 9000 else 1.05)) for load, ms in measured(CostModel(5.0, 0.05, 0, 0, 0))
    ]
    found = CostModel.fit(steps)
    assert min(found.fixed, found.expert, found.row, found.key, found.score) >= 0
    assert found.key == found.score == 0
    assert found.worst == pytest.approx(max(abs(found.milliseconds(load) / ms - 1) for load, ms in steps))
    assert 0.03 < found.worst < 0.07


def test_a_ragged_step_is_the_sum_of_its_sequences() -> None:
    load = Load([3, 9], [100, 4000], 50.0)
    expected = 2.5 + 0.05 * 50 + 0.03 * 12 + 9e-6 * 4100 + 2e-7 * (300 + 36000)
    assert TRUTH.milliseconds(load) == pytest.approx(expected)


def test_a_file_keeps_it(tmp_path: Path) -> None:
    found = CostModel.fit(measured(TRUTH), machine="NVIDIA H200", law="g2-x", ranks=8)
    found.write(tmp_path / "costs.json")
    assert CostModel.read(tmp_path / "costs.json") == found


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("form", 2, "only 1 is supported"),
        ("row", -0.1, "at least 0"),
        ("key", None, "must be float"),
        ("expert", "much", "must be float"),
        ("ranks", 0, "at least 1"),
    ],
)
def test_a_file_that_is_wrong_is_refused_by_name(tmp_path: Path, name: str, value: object, why: str) -> None:
    TRUTH.write(tmp_path / "costs.json")
    values = json.loads((tmp_path / "costs.json").read_text())
    (tmp_path / "costs.json").write_text(json.dumps(values | {name: value}))
    with pytest.raises(ConfigError, match=rf"costs\.json: {name}.*{why}"):
        CostModel.read(tmp_path / "costs.json")


def test_steps_that_cost_nothing_are_refused(tmp_path: Path) -> None:
    CostModel(0, 0, 0, 0, 0).write(tmp_path / "costs.json")
    with pytest.raises(ConfigError, match="fixed"):
        CostModel.read(tmp_path / "costs.json")
    with pytest.raises(InvalidRequest, match=r"steps.*4.*at least 5"):
        CostModel.fit(measured(TRUTH)[:4])


@pytest.mark.parametrize("overlap", [0.0, 0.5, 0.9])
def test_expected_experts_are_those_of_drawn_routing(tmp_path: Path, overlap: float) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config("k2.6", TRUE)))
    c, draw = K2Config.from_folder(tmp_path), torch.Generator().manual_seed(5)
    for trees, rows in ((1, 1), (1, 16), (8, 8)):
        drawn = counted(c, routing(c, trees, rows, overlap, draw, 100.0))
        assert distinct(384, 8, trees, rows, overlap) == pytest.approx(drawn, rel=0.03)


def test_the_best_budget_follows_the_costs() -> None:
    """Rows that cost nothing: the largest tree. Rows that cost a step each: none. Load and overlap move it between."""

    def best(costs: CostModel, trees: int = 1, overlap: float = 0.0) -> int:
        return best_budget(costs, ACCEPTED, 8192, trees, 384, 8, overlap).budget

    assert best(CostModel(9.0, 0, 0, 0, 0)) == 32
    assert best(CostModel(0, 0, 9.0, 0, 0)) == 0
    alone, loaded = best(TRUTH), best(TRUTH, trees=8)
    assert 0 < loaded <= alone < 32
    assert best(TRUTH, overlap=0.9) >= alone
    assert best_budget(TRUTH, {0: 1.0, 4: 1.0}, 8192, 1, 384, 8, 0.0).budget == 0


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="overlap"):
        distinct(384, 8, 1, 8, 1.5)
    with pytest.raises(InvalidRequest, match="accepted"):
        best_budget(TRUTH, {}, 8192, 1, 384, 8, 0.0)
