"""Sums over inboxes that ranks write to: three processes under Triton's interpreter, and the machine code's order."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from kernels.gpu.peer_norm import peer_norm, two_shots
from kernels.gpu.peers import empty
from tests.peer_rank import SIZES, create, lines, peers
from tests.peer_sums import check_sums
from tests.unit.test_gpu_tree_ops import OTHERS, run

RANKS = 3
HIDDEN, MOST = SIZES["cpu"].hidden, SIZES["cpu"].most


@pytest.mark.timeout(300)
def test_processes_that_write_to_each_other_have_the_sum_in_rank_order(tmp_path: Path) -> None:
    """Steps of changing numbers of rows, hence of one shot and two, behind each other without a pause; values of -0.0
    among the parts."""
    create(tmp_path, RANKS)
    check_sums(tmp_path, RANKS, "cpu")
    for turn in range(2):
        made = empty(RANKS, SIZES["cpu"].most, SIZES["cpu"].hidden, "cpu")
        assert all(torch.equal(box, made) for box in lines(tmp_path, turn, RANKS)), "not emptied"


@pytest.mark.timeout(300)  # seconds of work, on cores that others use too
@pytest.mark.parametrize("capability", ["90", *OTHERS])
def test_a_part_is_sent_before_others_are_waited_for(capability: str) -> None:
    out = run("-m", "tests.gpu_compile_ranks", capability, seconds=280)
    assert "8 kernels" in out, out


@pytest.mark.parametrize("fault", ["x", "part", "inbox", "w", "out", "tap"])
def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, fault: str) -> None:
    create(tmp_path, 2)
    given, w = peers(tmp_path, 0, 0, 2), torch.ones(HIDDEN).bfloat16()
    good = {"x": torch.zeros(MOST, HIDDEN), "w": w, "out": given.part.clone(), "tap": None}
    bad = {"x": good["x"].half(), "w": w[1:], "out": good["out"][:2], "tap": torch.zeros(MOST, 32)}
    if fault in bad:
        good[fault] = bad[fault]
    else:
        setattr(given, fault, getattr(given, fault).float())
    with pytest.raises(ValueError, match=f"^{fault} "):
        peer_norm(peers=given, eps=1e-5, **good)  # type: ignore[arg-type]


def test_more_rows_than_there_is_room_for_are_refused(tmp_path: Path) -> None:
    create(tmp_path, 2)
    x = torch.zeros(MOST + 1, HIDDEN)
    with pytest.raises(ValueError, match="x has 6 rows, the ranks have room for 5"):
        peer_norm(x, peers(tmp_path, 0, 0, 2), torch.ones(HIDDEN).bfloat16(), x.bfloat16(), 1e-5)


@pytest.mark.parametrize(
    ("ranks", "rows", "twice"), [(2, 8192, False), (4, 48, False), (4, 98, True), (8, 8, False), (8, 28, True)]
)
def test_second_shots_are_for_what_they_bring(ranks: int, rows: int, twice: bool) -> None:
    """Of K2.6's hidden size. Two ranks send as much either way."""
    assert two_shots(rows, 7168, ranks) is twice
