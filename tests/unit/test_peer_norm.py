"""Sums over inboxes that ranks write to: three processes under Triton's interpreter, and the machine code's order."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from kernels.gpu.peer_norm import ABSENT, peer_norm
from kernels.gpu.rank_norm import reference
from tests.peer_rank import HIDDEN, MOST, ROWS, create, inboxes, part, peers
from tests.unit.test_gpu_tree_ops import run

ROOT, RANKS = Path(__file__).resolve().parents[2], 3


@pytest.mark.timeout(300)
def test_processes_that_write_to_each_other_have_the_sum_in_rank_order(tmp_path: Path) -> None:
    """Steps of changing numbers of rows behind each other, without a pause; values of -0.0 among the parts."""
    create(tmp_path, RANKS)
    command = [sys.executable, "-m", "tests.peer_rank", str(tmp_path)]
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    ranks = [subprocess.Popen([*command, str(n), str(RANKS)], cwd=ROOT, env=env) for n in range(RANKS)]
    try:
        assert [rank.wait(280) for rank in ranks] == [0] * RANKS
    finally:
        for rank in ranks:
            rank.kill()
    found = [torch.load(tmp_path / f"found-{n}", weights_only=True) for n in range(RANKS)]
    x, w = torch.full((MOST, HIDDEN), 0.5), torch.linspace(0.5, 2, HIDDEN).bfloat16()
    for call in range(2 * len(ROWS)):
        rows = ROWS[call // 2]
        x[:rows], normed = reference(x[:rows], torch.stack([part(n, call, rows) for n in range(RANKS)]), w, 1e-5)
        for rank, (got, out) in enumerate(lines[2 * call : 2 * call + 2] for lines in found):
            assert torch.equal(got, x[:rows]), f"rank {rank}, call {call}"
            assert torch.allclose(out.float(), normed, rtol=2**-7), f"rank {rank}, call {call}"
    for turn in range(2):
        assert all((inbox == ABSENT.value).all() for inbox in inboxes(tmp_path, turn, RANKS)), "not emptied"


@pytest.mark.timeout(300)  # seconds of work, on cores that others use too
@pytest.mark.parametrize("capability", ["90", "120"])
def test_a_part_is_sent_before_others_are_waited_for(capability: str) -> None:
    out = run("-m", "tests.gpu_compile_ranks", capability, seconds=280)
    assert "6 kernels" in out, out


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
