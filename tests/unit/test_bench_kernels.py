"""What bench.kernels makes of its times; the times need a GPU."""

from __future__ import annotations

import ast
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import bench.kernels as kernels
from bench.device_rates import Rates
from bench.kernel_cells import Cell, Work


def ready(replays: int, calls: int) -> Any:
    replayed = itertools.count()
    cell = Cell("op", "T=1", Work(4_000_000), lambda: pytest.fail("made"), 1)
    graph = SimpleNamespace(replay=lambda: next(replayed), replayed=replayed)
    return kernels.Ready(cell, graph, calls, True, replays, [])  # type: ignore[arg-type]


def test_a_sample_is_of_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "milliseconds", lambda run: run() or 2.0)
    one = ready(replays=4, calls=50)
    assert kernels.sample(one) == 10.0
    assert next(one.graph.replayed) == 4


def test_what_is_sustained_is_the_last_two_fifths(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, slower = itertools.count(), itertools.count(1)
    monkeypatch.setattr(kernels, "milliseconds", lambda run: next(slower) * 1e-3)
    monkeypatch.setattr(kernels.time, "monotonic", lambda: next(clock))
    assert kernels.sustained(ready(1, 1), 11) == 8.5  # of 1 .. 10: 7, 8, 9, 10
    assert kernels.sustained(ready(1, 1), 0) is None


def test_a_row_says_both() -> None:
    rates = Rates(read=4e12, copy=4e12, matmul=1e15, sustained=1e15, node=1e-6)
    found = kernels.row(ready(1, 1), [1.9, 2.0, 2.1], 2.5, rates)
    assert (found["us"], found["ratio"], found["sustained_us"]) == (2.0, 2.0, 2.5)
    assert "sustained 2.50 us" in kernels.line(found)
    assert "sustained" not in kernels.line(kernels.row(ready(1, 1), [2.0], None, rates))


ROOT = Path(__file__).resolve().parents[2]
ELSEWHERE = {  # ops whose shapes are another's, or that no step of a card launches
    "draft_block": "measured beside block_attention at its shapes",
    "int4_moe": "experts of widths without tiles",
    "linear": "its cuts are its shapes",
    "moe_many_tiles": "measured as moe_tiles is",
    "moe_tiles": "measured as expert_tiles at the rows of int4_moe_gemm",
    "row_attention": "the interpreter's stand-in",
}


def named(path: Path) -> set[str]:
    """What a file assigns at its top, or imports."""
    out = set[str]()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign):
            out |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.ImportFrom):
            out |= {f"{node.module}.{alias.name}" for alias in node.names} | {alias.name for alias in node.names}
    return out


def test_every_op_is_measured_at_its_shapes() -> None:
    """What has shapes to be tested at has shapes to be measured at, and a file of cells reads them."""
    measured = set[str]().union(*(named(path) for path in (ROOT / "bench/kernel_cells").glob("*.py")))
    ops = {path.stem: named(path) for path in (ROOT / "kernels/gpu").glob("*.py")}
    tested = {name for name, names in ops.items() if "TEST_SHAPES" in names}
    assert len(tested) > 20
    without = {name for name in tested if "BENCH_SHAPES" not in ops[name]}
    assert without - ELSEWHERE.keys() == set()
    for name in tested - ELSEWHERE.keys():
        assert measured & {f"kernels.gpu.{name}", f"kernels.gpu.{name}.BENCH_SHAPES"}, f"{name} has no cells"


def test_what_an_op_allocates_is_poisoned() -> None:
    with kernels.poisoned_memory():
        assert torch.empty(3).isnan().all()
        assert (torch.empty(3, dtype=torch.int32) == torch.iinfo(torch.int32).max).all()
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--rounds", "0"], "argument --rounds: must be at least 1, not 0"),
        (["--rounds", "-3"], "argument --rounds: must be at least 1, not -3"),
        (["--rounds", "two"], "argument --rounds: must be a whole number, not 'two'"),
        (["--sustained", "-1"], "argument --sustained: must be in [0, 600], not -1"),
        (["--sustained", "nan"], "argument --sustained: must be in [0, 600], not nan"),
        (["--sustained", "1s"], "argument --sustained: must be a number, not '1s'"),
        (["--out", "/nowhere/x.json"], "--out: /nowhere is no folder"),
        (["--ops"], "argument --ops: expected at least one argument"),
    ],
)
def test_arguments_that_make_no_sense_are_named(
    given: Sequence[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        kernels.main(given)
    assert end.value.code == 2
    assert told in capsys.readouterr().err


def cell_of(op: str, shape: str) -> Cell:
    return Cell(op, shape, Work(1), lambda: pytest.fail("made"), 1)


def test_an_op_without_cells_is_named_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(kernels, "found", lambda failures: iter([cell_of("silu_mul", "R=1")]))
    monkeypatch.setattr(kernels, "measure_rates", lambda: pytest.fail("measured"))
    assert kernels.main(["--ops", "silu_mul", "silumul"]) == 2
    assert "--ops: no cell is of silumul; there are silu_mul" in capsys.readouterr().err


def test_a_run_that_is_cut_short_leaves_what_it_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rates = Rates(read=4e12, copy=4e12, matmul=1e15, sustained=1e15, node=1e-6)

    def groups(*_: object) -> Any:
        yield [kernels.row(ready(1, 1), [2.0], None, rates)]
        raise KeyboardInterrupt

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    monkeypatch.setattr(kernels, "found", lambda failures: iter(()))
    monkeypatch.setattr(kernels, "measure_rates", lambda: rates)
    monkeypatch.setattr(kernels, "measured", groups)
    out = tmp_path / "out.json"
    with pytest.raises(KeyboardInterrupt):
        kernels.main(["--rounds", "3", "--out", str(out)])
    report = json.loads(out.read_text())
    assert report["command"] == f"python -m bench.kernels --rounds 3 --out {out}"
    assert [cell["us"] for cell in report["cells"]] == [2.0]
