"""DFlash 2's convolution for GPUs, on a machine without one: interpreted, and compiled for cards."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from tests.unit.test_gpu_tree_ops import run

CARDS = [pytest.param(card, marks=pytest.mark.long) for card in ("100", "103", "120")]


def test_in_the_interpreter() -> None:
    command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-x", "tests/gpu/test_grouped_convolution.py")
    out = run(*command, TRITON_INTERPRET="1")
    assert " passed" in out
    assert "needs a CUDA device" not in out


@pytest.mark.parametrize("capability", ["90", *CARDS])
def test_compiled_for_a_card(capability: str) -> None:
    """No spills, and no more shared memory than there is: `gpu_compile` asserts both."""
    assert "9 kernels" in run("-m", "tests.gpu_compile_convolution", capability)
