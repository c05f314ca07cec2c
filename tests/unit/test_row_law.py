"""The self-check that chooses a row law: it sees faults, and its choice holds in a process without pinned libraries."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hedgerow.model import invariance
from hedgerow.model.blas import PINNED, pin_blas
from hedgerow.model.config import K2Config
from hedgerow.model.invariance import Choice, Product, choose_row_law, model_products
from hedgerow.model.k2 import KERNEL_LAW, K2Model, row_widths
from kernels.linear import MIN_4, TILE_16, RowLaw, linear
from tests.tiny import TinyTarget, write_target

PRODUCTS = [Product(64, 80)]


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def plant(monkeypatch: pytest.MonkeyPatch, wrong: object) -> None:
    """Products come out a little wrong where `wrong(rows)` says so."""

    def product(x: torch.Tensor, w: torch.Tensor, law: RowLaw) -> torch.Tensor:
        y = linear(x, w, law)
        return y * (1 + 1e-6) if wrong(len(x)) else y  # type: ignore[operator]

    monkeypatch.setattr(invariance, "linear", product)


def test_this_machine_has_a_law_that_holds(tmp_path: Path) -> None:
    write_target(tmp_path, TinyTarget())
    config = K2Config.from_folder(tmp_path)
    choice = choose_row_law(model_products(config), row_widths(config))
    assert choice.proven
    assert choice.name in ("min-4", "tile-16")


def test_a_library_that_tells_row_counts_apart_gets_tiles(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plant(monkeypatch, lambda rows: rows % 16 != 0)
    assert choose_row_law(PRODUCTS, []) == Choice(TILE_16, True)
    assert "refused min-4 with 1 threads: products 1 x [rows, 64] x [64, 80]" in caplog.text


def test_where_no_law_holds_the_name_says_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []

    def wrong(rows: int) -> bool:
        calls.append(rows)
        return len(calls) % 2 == 0

    plant(monkeypatch, wrong)
    assert choose_row_law(PRODUCTS, []).name == "tile-16-unproven"
    assert caplog.records[-1].levelname == "ERROR"


def test_a_thread_count_that_changes_bits_is_lowered(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torch.set_num_threads(4)
    plant(monkeypatch, lambda rows: torch.get_num_threads() > 2)
    assert choose_row_law(PRODUCTS, []) == Choice(MIN_4, True)
    assert torch.get_num_threads() == 2
    assert "row law min-4, 2 of 4 threads" in caplog.text


def test_the_law_is_part_of_the_fingerprint(tmp_path: Path) -> None:
    write_target(tmp_path, TinyTarget(layers=2))
    names = {K2Model.load(tmp_path, (), law=law).kernel_law for law in (MIN_4, TILE_16)}
    assert names == {f"torch-{KERNEL_LAW}-min-4", f"torch-{KERNEL_LAW}-tile-16"}


UNPINNED = """
import sys, torch
from pathlib import Path
from hedgerow.model.batch import SequenceRows
from hedgerow.model.k2 import K2Model

torch.set_num_threads(1)
model, tokens = K2Model.load(Path(sys.argv[1]), (0,)), [7 * i % 512 for i in range(70)]
cache = model.new_cache(4)
whole = model.forward([SequenceRows(0, [0, 1], tokens, range(-1, 69), range(70))], cache)
steps = [model.forward([SequenceRows(i, [2, 3], tokens[i : i + 1], [-1], [0])], cache) for i in range(70)]
print(model.kernel_law, torch.equal(torch.cat([step.logits for step in steps]), whole.logits))
"""


def test_the_chosen_law_holds_in_a_process_without_pinned_libraries(tmp_path: Path) -> None:
    """MKL's COMPATIBLE mode tells row counts apart on every processor; elsewhere the variable means nothing."""
    write_target(tmp_path, TinyTarget())
    environ = {**os.environ, "MKL_CBWR": "COMPATIBLE", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", UNPINNED, str(tmp_path)],
        env=environ,
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    law, equal = done.stdout.split()
    assert equal == "True"
    assert not law.endswith("unproven")


def test_pinning_sets_what_is_missing_and_keeps_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    environ = {"MKL_CBWR": "AVX512,STRICT", "HOME": "/root"}
    pin_blas(environ)
    assert environ == {**PINNED, "MKL_CBWR": "AVX512,STRICT", "HOME": "/root"}


def test_pinning_after_torch_was_loaded_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="before torch is imported"):
        pin_blas({"MKL_CBWR": PINNED["MKL_CBWR"]})
    pin_blas(dict(PINNED))
