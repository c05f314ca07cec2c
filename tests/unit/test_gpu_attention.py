"""Attention for GPUs, on a machine without one: references, refusals, and machine code for Hopper.

The kernels are Gluon, which Triton's interpreter does not run: their values are tested on a device, in tests/gpu.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from kernels.gpu.mla_device import real_column
from kernels.gpu.mla_reference import cached
from kernels.gpu.mla_tree_attention import (
    LONG,
    MOST_ROWS,
    Workspace,
    mla_tree_attention,
    most_splits,
    plan,
    split_width,
)

ROOT = Path(__file__).resolve().parents[2]
HEADS, LATENT, ROPE = 2, 128, 32


@pytest.mark.timeout(300)  # fifteen seconds of work, on cores that others use too
@pytest.mark.parametrize(
    "capability", ["90", *(pytest.param(card, marks=pytest.mark.long) for card in ("100", "103", "120"))]
)
def test_compiled_without_spills(capability: str) -> None:
    """In a process of its own: other tests set Triton to interpret."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.gpu_compile_attention", capability]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "builds" in done.stdout


def arguments(**changed: Any) -> dict[str, Any]:
    """A sequence with a prefix of 70 and a fork of three rows, one with two rows and no prefix, two rows of padding."""
    random = torch.Generator().manual_seed(1)
    given = {
        "q": torch.randn(7, HEADS, LATENT + ROPE, generator=random).bfloat16() / 8,
        "cache": torch.randn(5, 64, LATENT + ROPE, generator=random).bfloat16(),
        "page_table": torch.tensor([[4, 1], [2, 0]], dtype=torch.int32),
        "prefix_lens": torch.tensor([70, 0], dtype=torch.int32),
        "row_start": torch.tensor([0, 3, 5], dtype=torch.int32),
        "ancestors": torch.tensor([1, 3, 5, 1, 3, -1, -1]),
        "widths": torch.tensor([64, 64], dtype=torch.int32),
        "out": torch.full((7, HEADS, LATENT), torch.nan, dtype=torch.bfloat16),
        "workspace": Workspace(7, HEADS, LATENT, 64, device="cpu"),
    }
    return given | changed


def test_the_reference_is_softmax_over_what_a_row_sees() -> None:
    given = arguments()
    mla_tree_attention(**given)
    keys = cached(given["cache"], given["page_table"][0], 73).double()
    for row, slots in enumerate([[*range(71)], [*range(72)], [*range(71), 72]]):
        scores = given["q"][row].double() @ keys[slots].T
        expected = scores.softmax(-1) @ keys[slots, :LATENT]
        assert (given["out"][row].double() - expected).abs().max() < 2e-2
    assert not given["out"][5:].any()


def test_what_no_row_sees_may_hold_anything() -> None:
    given = arguments()
    mla_tree_attention(**given)
    poisoned = arguments()
    for slot in (73, 127):
        poisoned["cache"][1, slot - 64] = torch.nan
    poisoned["cache"][[0, 3]] = torch.nan
    mla_tree_attention(**poisoned)
    assert torch.equal(given["out"], poisoned["out"])


def test_a_row_that_sees_nothing_is_zero() -> None:
    given = arguments(ancestors=torch.tensor([1, 3, 5, 0, 2, 0, 0]))
    mla_tree_attention(**given)
    assert not given["out"][3].any()
    assert given["out"][4].any()


@pytest.mark.parametrize("name", ["q", "cache", "page_table", "out"])
def test_strided_tensors_are_refused_by_name(name: str) -> None:
    tensor = arguments()[name]
    strided = torch.stack([tensor, tensor], -1)[..., 0]
    with pytest.raises(ValueError, match=f"^{name} must be contiguous"):
        mla_tree_attention(**arguments(**{name: strided}))
    del strided, tensor


@pytest.mark.parametrize("name", ["q", "cache", "page_table", "row_start", "prefix_lens", "ancestors", "widths", "out"])
def test_other_types_are_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be"):
        mla_tree_attention(**arguments(**{name: arguments()[name].double()}))


@pytest.mark.parametrize("name", ["row_start", "ancestors", "widths"])
def test_other_lengths_are_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be"):
        mla_tree_attention(**arguments(**{name: arguments()[name][1:].clone()}))


def test_a_workspace_for_less_is_refused() -> None:
    with pytest.raises(ValueError, match="workspace is for \\(6, 2, 128\\)"):
        mla_tree_attention(**arguments(workspace=Workspace(6, HEADS, LATENT, 64, device="cpu")))


def test_other_widths_of_the_model_are_refused() -> None:
    given = arguments(out=torch.zeros(7, HEADS, 96, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="must have one of the widths"):
        mla_tree_attention(**given)


@pytest.mark.parametrize("limit", [1, 63, 64, 65, 2048, 4095, 4096, 33792, 65471])
def test_a_session_has_at_most_as_many_splits_as_the_workspace_holds(limit: int) -> None:
    width = split_width(limit)
    assert width % 64 == 0
    assert -(-(limit + MOST_ROWS) // width) <= most_splits(limit) == 64
    assert width == 64 or limit // width >= 31


@pytest.mark.parametrize("limit", [65472, 65536, 100_000, 131_008, 131_009, 132_096, 262_080, 262_144, 1 << 22])
def test_a_long_session_has_twice_as_many(limit: int) -> None:
    """On both sides of every power of two; a workspace holds them for every shorter session of the same model too."""
    width = split_width(limit)
    assert width & (width - 1) == 0
    assert 64 < -(-(limit + MOST_ROWS) // width) <= most_splits(limit) == 128
    assert limit + MOST_ROWS >= LONG > 65471 + MOST_ROWS


@pytest.mark.parametrize("columns", [64, 128, 512])
def test_the_merge_knows_where_the_prefix_kernels_put_a_column(columns: int) -> None:
    kept = torch.arange(columns).view(-1, 4, 4, 2).permute(0, 2, 1, 3).flatten()  # as by_lane
    assert [real_column.fn(c) for c in range(columns)] == kept.tolist()


def test_a_limit_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="limit must be at least 1, not 0"):
        split_width(0)


@pytest.mark.parametrize("rows", [1, 2, 16, 64, 512])
@pytest.mark.parametrize("batch", [1, 8, 64])
@pytest.mark.parametrize("pages", [1, 16, 600, 2049, 4097])
def test_a_plan_is_one_of_the_compiled_forms(rows: int, batch: int, pages: int) -> None:
    made = plan(rows * batch, 8, batch, 512, pages, 132)
    assert (made.lines, made.stages) in {(16, 1), (16, 2), (64, 2)}
    assert made.columns in (64, 512)
    elsewhere = plan(rows * batch, 8, batch, 512, pages, 188, wgmma=False)
    assert (elsewhere.lines, elsewhere.stages, elsewhere.programs) == (16, 0, 188)
    assert elsewhere.columns in (64, 512)


@pytest.mark.parametrize(
    ("rows", "pages", "lines"), [(1, 2049, 16), (4, 2049, 16), (8, 2049, 64), (8, 129, 16), (16, 129, 64)]
)
def test_tiles_are_wide_where_narrow_ones_take_more_turns(rows: int, pages: int, lines: int) -> None:
    """One session: of 65 splits, four tiles of 16 lines are more than 132 programs; of 33, they are not."""
    assert plan(rows, 8, 1, 512, pages, 132).lines == lines


def test_a_steps_products_are_our_own() -> None:
    """Libraries search for an algorithm while a graph is captured, choose by the row count, and some read too far."""
    sources = sorted((ROOT / "hedgerow/model").glob("cuda*.py"))
    assert sources
    for path in sources:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            assert not isinstance(node, ast.MatMult), path.name
            called = node.attr if isinstance(node, ast.Attribute) else ""
            assert called not in {"mm", "bmm", "matmul", "einsum", "addmm", "baddbmm"}, f"{path.name}: {called}"
