"""A made-up drafter beside a made-up target: the published layout, and both fit and draft."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch

from hedgerow.model import memory
from hedgerow.model.config import K2Config
from hedgerow.model.dflash import DFlashModel
from hedgerow.model.draft_config import DraftConfig
from hedgerow.model.fits import check_fit
from hedgerow.model.selector import FromPairs, drafts
from hedgerow.model.tensors import WHOLE
from hedgerow.weights.__main__ import main
from hedgerow.weights.published import MEMBERS, MINI, TRUE, Member
from hedgerow.weights.published import config as target_config
from hedgerow.weights.rehearse import write_json
from hedgerow.weights.rehearse_drafter import DraftKind, config, layer_ids, wanted, write_drafter
from hedgerow.weights.report import inspect

SMALL = dataclasses.replace(MINI, layers=5, vocab=512)


def test_at_the_true_sizes_it_is_as_large_as_the_published_ones(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", config("k2.6", TRUE, "dflash"))
    c = DraftConfig.from_folder(tmp_path)
    assert (c.target_layer_ids, c.mask_token_id, c.block_size) == ((1, 12, 24, 35, 47, 58), 163838, 8)
    assert (c.windows, c.causal) == ((2048,) * 5 + (None,), (True,) * 5 + (False,))
    shapes = {one.name: one.part(WHOLE.ranks) for one in wanted(c)}
    assert shapes["fc.weight"] == (7168, 43008)
    assert shapes["layers.5.self_attn.k_proj.weight"] == (1024, 7168)
    total = sum(2 * math.prod(shape) for shape in shapes.values())
    assert total / 2**30 == pytest.approx(6.48, abs=0.005)
    assert total == memory.DRAFTER, "what the tables of memory take one for"
    write_json(tmp_path / "config.json", target_config("k2.6", TRUE))
    target = K2Config.from_folder(tmp_path)
    key_rows = sum(2 * math.prod(shape) for name, shape in shapes.items() if ".k_proj." in name or ".v_proj." in name)
    assert memory.drafter(target) == total + key_rows + 2 * 163840 * 7168 * 2, "again, and the target's two tables"


def test_layers_of_a_target_that_is_cut_short() -> None:
    assert [layer_ids(depth) for depth in (1, 5, 8)] == [[0], [1, 2], [1, 2, 3, 4, 5]]


@pytest.mark.parametrize("member", MEMBERS)
def test_its_rotation_is_its_targets(tmp_path: Path, member: Member) -> None:
    write_json(tmp_path / "config.json", config(member, SMALL, "dflash"))
    assert DraftConfig.from_folder(tmp_path).rope.yarn is not None
    rope = json.loads((tmp_path / "config.json").read_text())["rope_scaling"]
    assert rope["factor"] == (32 if member == "k2-instruct" else 64)


@pytest.mark.parametrize("kind", ["dflash", "dflash2"])
def test_the_command_writes_both_and_they_fit(
    tmp_path: Path, kind: DraftKind, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--layers", "5", "--vocab", "512", "--experts", "2"]
    target, beside = tmp_path / "kimi", tmp_path / "kimi-dflash"
    assert main(["rehearse", str(target), "--drafter", kind, *small]) == 0
    assert f"{beside}: {kind}, for it" in capsys.readouterr().out
    for folder in (target, beside):
        report = inspect(folder)
        assert not report.fault_count, report.faults
    check_fit(beside, target)
    model = DFlashModel.load(beside, target)
    state = model.new_state()
    model.append(state, torch.randn(9, model.feature_width, generator=torch.manual_seed(0)), 0)
    assert model.draft([state], [3], [9]).isfinite().all()
    assert isinstance(drafts(model, beside, "conditional"), FromPairs) == (kind == "dflash2")


def test_a_drafter_that_is_there_already_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_drafter(tmp_path / "kimi-dflash", "k2.6", SMALL, "dflash")
    assert main(["rehearse", str(tmp_path / "kimi"), "--drafter", "dflash", "--vocab", "512"]) == 2
    assert "is not allowed: a new or an empty folder, for the drafter" in capsys.readouterr().err
    assert not (tmp_path / "kimi").exists(), "nothing was begun"
