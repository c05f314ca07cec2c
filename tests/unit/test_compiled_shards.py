"""The compiled engine divided among ranks: their parts, added in rank order, are the model; true processes agree."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from hedgerow.model.batch import SequenceRows
from hedgerow.model.compiled import CompiledK2
from hedgerow.model.k2 import K2Model
from hedgerow.model.selfcheck import check_rows, compare
from kernels.collectives import Ranks
from tests.thread_ranks import Together, prompt_and_tree
from tests.tiny import TinyTarget, write_target

TARGET = TinyTarget(expert_width=128, dense_width=256, heads=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    write_target(folder, TARGET)
    return folder


@pytest.mark.parametrize("count", [2, 4])
def test_ranks_compute_the_model(folder: Path, count: int) -> None:
    """As PyTorch does with as many shards, up to rounding; and on every rank the same."""
    together, reference = Together(folder, count), K2Model.load(folder, (1, 2), ranks=Ranks(count))
    whole = CompiledK2.load(folder, (1, 2))
    for divided, other, alone in zip(
        prompt_and_tree(together), prompt_and_tree(reference), prompt_and_tree(whole), strict=True
    ):
        compare(divided, other)
        compare(divided, alone)
        assert not torch.equal(divided, alone)
    assert together.kernel_law == f"{whole.kernel_law}-shards-{count}"
    check_rows(together)  # type: ignore[arg-type]


def test_threads_change_no_bit(folder: Path) -> None:
    for one, two in zip(
        prompt_and_tree(Together(folder, 2)), prompt_and_tree(Together(folder, 2, threads=2)), strict=True
    ):
        assert torch.equal(one, two)


def test_a_rank_that_does_not_come_is_told_of(folder: Path) -> None:
    """Nothing hangs, and nothing is raised inside the engine."""

    class Gone(Ranks):
        def __init__(self) -> None:
            super().__init__(2)
            self.mine = range(1)

        def sum(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
            raise RuntimeError("connection closed by peer")

    model = CompiledK2.load(folder, (), ranks=Gone())
    for _ in range(2):
        with pytest.raises(RuntimeError, match="closed by peer"):
            model.forward([SequenceRows(0, (0,), [1], (-1,), [0])], model.new_cache(1))
