"""FP8 and plain experts, and a checkpoint's way onto a GPU, on a machine without one: interpreted, and compiled."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from tests.unit.test_gpu_tree_ops import OTHERS, run


@pytest.mark.timeout(300)
@pytest.mark.parametrize("what", ["plain_moe", pytest.param("cuda_loading", marks=pytest.mark.long)])
def test_in_the_interpreter(what: str) -> None:
    out = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "-x", f"tests/gpu/test_{what}.py", TRITON_INTERPRET="1")
    assert " passed" in out
    assert "needs a CUDA device" not in out


@pytest.mark.parametrize("capability", ["90", *OTHERS])
def test_compiled_for_a_card(capability: str) -> None:
    """At the published widths, without spills, on tensor cores."""
    out = run("-m", "tests.gpu_compile_experts", capability)
    assert out.count(" FP8: ") == out.count(" plain: ") == 2
