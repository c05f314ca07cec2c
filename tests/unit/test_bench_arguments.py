"""Numbers on the command lines of what measures and proves: a run of nothing is refused, not passed."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import bench.exactness as exactness
from bench.arguments import number, whole_from

BENCH = Path(__file__).resolve().parents[2] / "bench"
ANY = {"--seed", "--amplitude", "--replay", "--rank", "--until"}  # every number makes sense, or a parent gives it


def test_every_number_has_a_least() -> None:
    loose = []
    for path in sorted(BENCH.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
                kinds = [word.value.id for word in node.keywords if isinstance(word.value, ast.Name)]
                name = ast.unparse(node.args[0]).strip("'")
                if {"int", "float"} & {*kinds} and name not in ANY:
                    loose.append(f"{path.name} {name}")
    assert not loose


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["run", "--prompts", "0"], "argument --prompts: must be at least 1, not 0"),
        (["run", "--block", "0"], "argument --block: must be at least 1, not 0"),
        (["run", "--tokens", "0"], "argument --tokens: must be at least 1, not 0"),
        (["run", "--budgets", "0", "-1"], "argument --budgets: must be at least 0, not -1"),
        (["run", "--batches", "1", "x"], "argument --batches: must be a whole number, not 'x'"),
        (["run", "--batches", "1", "32"], "--batches: 32 is more than the 8 prompts of a --block"),
        (["slice", "--seconds", "-5"], "argument --seconds: must be in [0, inf], not -5"),
    ],
)
def test_an_exactness_run_of_nothing_is_refused(
    given: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        exactness.main(given)
    assert end.value.code == 2
    assert told in capsys.readouterr().err


def test_a_slice_compares_something_however_short(capsys: pytest.CaptureFixture[str]) -> None:
    assert exactness.main(["slice", "--tiny", "--engine", "torch", "--tokens", "4", "--seconds", "0"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert int(last.split()[0]) >= 1, last


def test_numbers_in_their_bounds_are_taken() -> None:
    assert (whole_from(0)("0"), number(0, 1)("1"), number(0)("inf")) == (0, 1.0, float("inf"))
