"""What steps take is measured before the first one, kept in a file, and only where it starts from: steps decide."""

from __future__ import annotations

import itertools
import json
import logging
from pathlib import Path

import numpy as np
import pytest

from bench.drive import Job, drive_now
from hedgerow.engine import calibration
from hedgerow.engine.calibration import cost_model, measured
from hedgerow.engine.config import EngineConfig
from hedgerow.engine.costs import CostModel
from hedgerow.engine.nonnegative import nonnegative
from hedgerow.engine.step import NoDrafter
from hedgerow.engine.step_times import Load, StepTimes
from hedgerow.engine.types import Sampling
from tests.engine_rig import Rig, prompt

LIMITS = EngineConfig(max_sequences=4, pages=24)
PATIENT = 60.0  # seconds; the steps of the tiny model take a few


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return Rig(tmp_path_factory.mktemp("tiny"))


def found(rig: Rig, folder: Path, device: str = "a machine") -> CostModel | None:
    return cost_model(rig.model, rig.model.new_cache(24), LIMITS, PATIENT, device, folder)


def test_a_few_steps_are_measured_within_the_limits(rig: Rig) -> None:
    steps = measured(rig.model, rig.model.new_cache(24), LIMITS, PATIENT)
    assert {len(load.rows) for load, _ in steps} == {1, 4}
    assert {load.rows[0] for load, _ in steps} == {1, 5, 17}
    assert all(ms > 0 and load.distinct > 0 for load, ms in steps)
    assert len(measured(rig.model, rig.model.new_cache(24), LIMITS, 0.0)) <= 1


def test_tokens_are_the_same_behind_it(rig: Rig) -> None:
    engine, job = rig.engine(), Job("after", prompt(20), Sampling(max_tokens=12, ignore_eos=True))
    measured(rig.model, engine.cache, engine.config, PATIENT)
    assert drive_now(engine, NoDrafter(), [job]).tokens == rig.plain_all([job])


def test_the_next_start_reads_what_the_first_one_found(rig: Rig, tmp_path: Path) -> None:
    first = found(rig, tmp_path / "new")
    (file,) = (tmp_path / "new").iterdir()
    assert first is not None
    assert CostModel.read(file) == first
    assert (first.machine, first.law, first.experts) == ("a machine", rig.model.kernel_law, 8)
    changed = json.loads(file.read_text()) | {"fixed": 77.0}
    file.write_text(json.dumps(changed))
    again = found(rig, tmp_path / "new")
    assert again is not None
    assert again.fixed == 77.0


@pytest.mark.parametrize("wrong", ["{", '{"form": 1, "fixed": -1}', "", '{"form": 9}'])
def test_a_file_that_is_damaged_is_measured_again(
    rig: Rig, tmp_path: Path, caplog: pytest.LogCaptureFixture, wrong: str
) -> None:
    found(rig, tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text(wrong)
    with caplog.at_level(logging.WARNING):
        assert found(rig, tmp_path) == CostModel.read(file)
    assert str(file) in caplog.text


def test_one_of_another_machine_is_not_read(rig: Rig, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found(rig, tmp_path)
    found(rig, tmp_path, "another")
    mine, other = sorted(tmp_path.iterdir(), key=lambda file: "another" in file.read_text())
    other.write_text(mine.read_text())
    again = found(rig, tmp_path, "another")
    assert "is not used" in caplog.text
    assert again is not None
    assert again.machine == "another"


def test_no_folder_and_a_model_that_fails_stop_no_start(
    rig: Rig, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    assert found(rig, tmp_path / "file" / "below") is not None
    assert cost_model(rig.model, rig.model.new_cache(24), LIMITS, 0.0, "a machine", tmp_path) is None

    def fails(*_: object) -> None:
        raise RuntimeError("a device that is gone")

    monkeypatch.setattr(calibration, "_step", fails)
    assert found(rig, tmp_path) is None
    assert "a device that is gone" in caplog.text


def test_where_the_builds_cannot_be_written_it_is_a_folder_of_this_user_alone(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(calibration, "BUILDS", tmp_path / "builds")
    assert calibration._folder() == tmp_path / "builds"
    monkeypatch.setattr(calibration, "BUILDS", tmp_path / "file" / "below")
    monkeypatch.setattr(calibration.tempfile, "gettempdir", lambda: str(tmp_path))
    folder = calibration._folder()
    assert folder.parent == tmp_path
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o755)
    assert calibration._folder() == calibration.NOWHERE
    folder.rmdir()
    folder.symlink_to(tmp_path / "builds")
    assert calibration._folder() == calibration.NOWHERE
    assert cost_model(rig.model, rig.model.new_cache(24), LIMITS, PATIENT, "a machine") is not None


def test_a_folder_keeps_only_the_newest(rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "FILES", 2)
    for device in "abc":
        found(rig, tmp_path, device)
    assert len(list(tmp_path.iterdir())) == 2


COSTS = CostModel(fixed=2.0, expert=0.0, row=0.1, key=1e-4, score=1e-6)


def test_predictions_begin_with_the_model_and_follow_steps() -> None:
    """Steps here take three times what the model says, with one sequence: so do those of eight that never ran."""
    times, one, eight = StepTimes(), Load(1, 1, 200), Load(8, 40, 8000)
    times.expect(COSTS)
    assert times.milliseconds(one) == pytest.approx(2.12, rel=1e-3)
    assert times.milliseconds(eight) == pytest.approx(2 + 4 + 0.8 + 0.04)
    for n in range(200):
        load = Load(1, 1 + n % 9, 200 + n)
        times.took(load, 0.0, 3 * (2 + 0.1 * load.rows + 1e-4 * load.keys))
    assert times.milliseconds(one) == pytest.approx(3 * 2.12, rel=0.1)
    assert times.milliseconds(eight) == pytest.approx(3 * 6.8, rel=0.25)


def test_experts_that_rows_are_expected_to_choose_are_a_term() -> None:
    times = StepTimes()
    times.expect(CostModel(fixed=1.0, expert=0.5, row=0.0, key=0.0, score=0.0, experts=64, top_k=4))
    one, many = times.milliseconds(Load(1, 1, 0)), times.milliseconds(Load(8, 4096, 0))
    assert (one, many) == (pytest.approx(3.0), pytest.approx(33.0))


def test_no_term_is_negative_and_the_fit_is_the_best_of_such() -> None:
    draw = np.random.default_rng(0)
    for _ in range(60):
        table, goal = draw.normal(size=(12, 5)) + 0.5, draw.normal(size=12)
        best = np.inf
        for size in range(6):
            for some in itertools.combinations(range(5), size):
                part = np.zeros(5)
                part[list(some)] = np.linalg.lstsq(table[:, list(some)], goal, rcond=None)[0]
                if part.min() >= 0:
                    best = min(best, float(np.square(table @ part - goal).sum()))
        x = nonnegative(table, goal)
        assert x.min() >= 0
        assert float(np.square(table @ x - goal).sum()) == pytest.approx(best, rel=1e-4)
