"""How dense products are divided: by the layer's shape and the row count, within a card's memory."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from kernels.gpu.linear import CUTS, MOST_APART, apart, cut_of, parts_of, room_of_parts
from tests.unit.test_gpu_tree_ops import run


@pytest.mark.parametrize(("n", "k"), CUTS)
@pytest.mark.parametrize("shared", [1 << 20, 227 * 1024, 99 * 1024])
def test_a_cut_fits(n: int, k: int, shared: int) -> None:
    for rows in (1, 16, 17, 64, 512):
        cut = cut_of(rows, n, k, shared)
        assert k // parts_of(n, k) % cut.bk == 0
        assert 0 <= cut.ahead <= k // parts_of(n, k)
        assert (cut.bm + cut.bn) * cut.bk * 2 * cut.stages <= shared
        assert cut.stages >= 2


def test_parts_are_a_matter_of_the_shape() -> None:
    """Not of the row count, on which only depends who adds them."""
    assert parts_of(2112, 7168) == parts_of(896, 7168) == 8
    assert parts_of(20480, 7168) == parts_of(1536, 1536) == parts_of(384, 384) == 1
    assert apart(MOST_APART, 896, 7168) == 8
    assert apart(MOST_APART + 1, 896, 7168) == 1
    assert room_of_parts(1, 896, 7168) == 8 * 896
    assert room_of_parts(1000, 896, 7168) == 1000 * 896


@pytest.mark.timeout(300)  # thirty seconds of work, on cores that others use too
@pytest.mark.long
@pytest.mark.parametrize("capability", ["90", "100", "103", "120"])
def test_cuts_compile_without_spills(capability: str) -> None:
    out = run("-m", "tests.gpu_compile_linear", capability, seconds=280)
    assert f"{2 * len(CUTS)} products" in out, out
