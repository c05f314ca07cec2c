"""Numbers on the command lines of what measures and proves: a run of nothing is refused, not passed."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import bench
import bench.exactness as exactness
from bench.arguments import number, whole_from

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / "bench"
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
        (["slice", "--seconds", "-5"], "argument --seconds: must be in [0, 86400], not -5"),
        (["slice", "--seconds", "inf"], "argument --seconds: must be in [0, 86400], not inf"),
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


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is built for CUDA")
def test_what_a_machine_lacks_is_one_line() -> None:
    command = [sys.executable, "-m", "bench.step", "--device", "cuda"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: device: 'cuda' is not allowed: needs a torch built for CUDA")
    assert done.stderr.count("\n") == 1


def test_without_triton_it_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    bench.tell(ModuleNotFoundError, ModuleNotFoundError("No module named 'triton'", name="triton"), None)
    assert capsys.readouterr().err.startswith("error: needs the package triton")
    bench.tell(ModuleNotFoundError, ModuleNotFoundError("No module named 'other'", name="other"), None)
    assert "ModuleNotFoundError: No module named 'other'" in capsys.readouterr().err
