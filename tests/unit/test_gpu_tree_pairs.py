"""Conditional trees for GPUs, on a machine without one: interpreted, and compiled for cards."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from tests.unit.test_gpu_tree_ops import run


def test_in_the_interpreter() -> None:
    out = run(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", "-x", "tests/gpu/test_pairs_on_device.py", TRITON_INTERPRET="1"
    )
    assert " passed" in out
    assert "needs a CUDA device" not in out


@pytest.mark.parametrize("capability", ["90", pytest.param("120", marks=pytest.mark.long)])
def test_compiled_for_a_card(capability: str) -> None:
    """No spills on sm_90, next to none elsewhere."""
    assert "2 kernels" in run("-m", "tests.gpu_compile_pairs", capability)
