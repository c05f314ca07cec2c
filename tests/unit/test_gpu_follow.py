"""Which launches may begin before their turn. Without a GPU: what the launchers ask Triton for."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from kernels.gpu import checks
from kernels.gpu.follow import followed, one_after_another


def test_a_launch_waits_in_the_kernel_unless_it_is_told_not_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "INTERPRETED", False)
    assert followed() == {"PDL": True, "launch_pdl": True}
    assert followed(first=True) == {"PDL": True, "launch_pdl": False}, "it follows a copy, and lets the next one in"
    with one_after_another():
        assert followed() == followed(first=True) == {"PDL": False, "launch_pdl": False}
    assert followed()["PDL"]


def test_an_interpreter_launches_nothing_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "INTERPRETED", True)
    assert followed() == {"PDL": False, "launch_pdl": False}
