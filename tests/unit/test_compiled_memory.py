"""What the compiled engine needs beside its weights while it loads them, and that it packs them as it did at once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from hedgerow.model.packing import Packer
from kernels.cpu.library import BF16, F32
from tests.compiled_builds import missing_compiler
from tests.load_memory import loaded, needs_proc

pytestmark = pytest.mark.skipif(bool(missing_compiler()), reason=missing_compiler())
IMPORTS = """
from hedgerow.model.compiled import CompiledK2
from hedgerow.model.tensors import Share
from kernels.collectives import Ranks
class One(Ranks):
    def __init__(self, rank, count):
        super().__init__(count)
        self.mine = range(rank, rank + 1)
"""


@pytest.mark.long
@pytest.mark.timeout(300)
@needs_proc
def test_a_rank_loads_a_true_layer_in_one_and_a_half_times_its_share() -> None:
    """One MoE layer at K2.6's widths, 96 of its experts, one rank of two. The peak counts PyTorch and tables too."""
    load = "model, checkpoint = CompiledK2.load(folder, (0,), ranks=One(1, 2)), Checkpoint(folder, Share(1, 2))"
    found = loaded(IMPORTS, load, experts=96, seconds=250)
    assert found.share > 1_600_000_000
    assert found.peak <= 1.5 * found.share, found


@pytest.mark.parametrize(("kind", "rows"), [("narrow", 64), ("wide", 64), ("mixed", 64), ("odd", 48)])
def test_one_at_a_time_is_packed_as_all_at_once(kind: str, rows: int) -> None:
    """bfloat16; numbers that are none; one of several that is none; rows that two columns cannot share words in."""
    g = torch.Generator().manual_seed(1)
    weights = [torch.randn(rows, 32, generator=g).bfloat16() for _ in range(3)]
    if kind == "wide":
        weights = [weight.float() * 1.001 for weight in weights]
    if kind == "mixed":
        weights[1] = weights[1].float() * 1.001

    def one_by_one() -> Iterator[torch.Tensor]:
        yield from weights

    piece, whole = Packer(8), Packer(8)
    got, expected = piece.stacked(one_by_one, 3 * rows, rows), whole.matrix(torch.cat(weights), rows)
    assert (got.type, got.n, got.k) == (expected.type, expected.n, expected.k)
    assert got.type == (BF16 if kind in ("narrow", "odd") else F32)
    assert torch.equal(piece.kept[0].flatten(), whole.kept[0].flatten())
