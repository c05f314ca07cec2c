"""Conditional trees for GPUs, on a machine without one: interpreted, and compiled for cards."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from tests.unit.test_gpu_tree_ops import run


@pytest.mark.parametrize("what", ["pairs_on_device", "pair_scores"])
def test_in_the_interpreter(what: str) -> None:
    out = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "-x", f"tests/gpu/test_{what}.py", TRITON_INTERPRET="1")
    assert " passed" in out
    assert "needs a CUDA device" not in out


@pytest.mark.parametrize(
    "capability", ["90", *(pytest.param(card, marks=pytest.mark.long) for card in ("100", "103", "120"))]
)
def test_compiled_for_a_card(capability: str) -> None:
    """No spills on sm_90, next to none elsewhere."""
    assert "4 kernels" in run("-m", "tests.gpu_compile_pairs", capability)
