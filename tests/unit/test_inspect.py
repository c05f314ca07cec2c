"""What `hedgerow inspect` says: of each layout, of memory and cache, of ranks, for a person and as JSON."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, load_file, save_file

from hedgerow.model.config import K2Config
from hedgerow.model.folder import faults
from hedgerow.model.loader import Checkpoint, checkpoint_hash, share_bytes
from hedgerow.model.tensors import Share
from hedgerow.weights.__main__ import main
from hedgerow.weights.convert import convert
from hedgerow.weights.published import MEMBERS, MINI, MINI_FP8, TRUE, Member, Sizes, config
from hedgerow.weights.rehearse import write
from hedgerow.weights.report import Report, facts, inspect, lines, shared, target
from tests.dflash2 import SHAPES, write_dflash2
from tests.tiny import TinyTarget, write_tiny
from tests.unit.test_selector import write_selector

ROOT = Path(__file__).resolve().parents[2]
SMALL = dataclasses.replace(MINI, layers=2, vocab=512, experts=2, top_k=1)
SMALL_FP8 = dataclasses.replace(MINI_FP8, layers=2, vocab=512, experts=2)
KINDS: dict[Member, str] = {
    "k2-instruct": "K2-Instruct's layout: matrices in FP8, a scale for each block of 128 x 128",
    "k2-thinking": "K2-Thinking's layout: INT4 experts in groups of 32",
    "k2.5": "K2.5's layout: INT4 experts in groups of 32, names under language_model",
    "k2.6": "K2.6's layout: INT4 experts in groups of 32, names under language_model",
}


def sizes(member: Member) -> Sizes:
    return SMALL_FP8 if member == "k2-instruct" else SMALL


@pytest.mark.parametrize("member", MEMBERS)
def test_each_layout_is_recognised_and_nothing_is_wrong_with_it(tmp_path: Path, member: Member) -> None:
    write(tmp_path, member, sizes(member))
    report = inspect(tmp_path, 8)
    assert report.kind == f"a target as published, {KINDS[member]}"
    assert (report.faults, report.fault_count, report.notes) == ([], 0, [])
    assert [need.ranks for need in report.needs] == [1, 2, 4, 8]
    for need in report.needs:
        assert need.weights == share_bytes(Checkpoint(tmp_path).stored, Share(0, need.ranks))
    assert list(lines(report))[-1] == "  nothing is wrong with it"


def test_the_true_k26_needs_what_the_published_shapes_say(tmp_path: Path) -> None:
    """Without its weights: the configuration alone, every tensor missing, and 8 ranks of 76.2 GB."""
    (tmp_path / "config.json").write_text(json.dumps(config("k2.6", TRUE)))
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    report = Report(str(tmp_path))
    target(tmp_path, report, None)
    assert report.fault_count == 208_215 + 2
    assert len(report.faults) == 1000
    assert report.bytes_per_token == 70_272
    assert "1026." in report.told["model"]
    text = list(lines(report))
    assert text[-1] == "  208217 faults"
    assert text[-2] == "  wrong   208197 more"


def test_cache_is_what_a_card_has_left(tmp_path: Path) -> None:
    write(tmp_path, "k2.6", SMALL)
    [one, *_] = inspect(tmp_path).needs
    token = (SMALL.kv_rank + SMALL.rope) * SMALL.layers * 2
    assert one.cache == {
        "H200": (138_000_000_000 - one.weights) // token,
        "B300": (264_960_000_000 - one.weights) // token,
        "RTX PRO 6000": (93_840_000_000 - one.weights) // token,
    }


def test_ranks_that_cannot_share_it_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "k2.6", SMALL)
    assert main(["inspect", str(tmp_path), "--ranks", "16"]) == 1
    said = capsys.readouterr().out
    assert "self_attn.q_b_proj.weight: found [512, 64], needed: rows that 16 ranks can share" in said
    assert main(["inspect", str(tmp_path), "--ranks", "8"]) == 0


def test_a_converted_folder_says_for_whom(tmp_path: Path) -> None:
    write(tmp_path / "a", "k2.6", SMALL)
    convert(tmp_path / "a", tmp_path / "b", 2, lambda text: None)
    report = inspect(tmp_path / "b")
    assert report.kind == f"a target converted for 2 ranks (order rows-1), {KINDS['k2.6']}"
    assert [need.ranks for need in report.needs] == [2]
    assert report.needs[0].weights == inspect(tmp_path / "a").needs[1].weights
    assert report.fault_count == 0
    assert [fault.needed for fault in inspect(tmp_path / "b", 4).faults] == ["files of 4 ranks"]


def test_everything_is_read_when_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "a", "k2.6", SMALL)
    convert(tmp_path / "a", tmp_path / "b", 2, lambda text: None)
    for name in ("a", "b"):
        assert main(["inspect", str(tmp_path / name), "--verify", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["facts"]["hash"] == checkpoint_hash(tmp_path / "a")
    content = bytearray((tmp_path / "b" / "rank-01-of-02.safetensors").read_bytes())
    content[-1] ^= 1
    (tmp_path / "b" / "rank-01-of-02.safetensors").write_bytes(content)
    assert main(["inspect", str(tmp_path / "b")]) == 0
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "b"), "--verify", "--json"]) == 1
    [fault] = json.loads(capsys.readouterr().out)["faults"]
    assert fault["file"].endswith("rank-01-of-02.safetensors")


def test_what_a_missing_file_held_is_not_missing_besides(tmp_path: Path) -> None:
    """One file of 64 was a thousand faults, and the last of them were all that stood on the screen."""
    write(tmp_path, "k2.6", SMALL)
    file = tmp_path / "model-00002-of-000005.safetensors"
    whole = file.read_bytes()
    file.unlink()
    (fault,) = inspect(tmp_path).faults
    assert fault == (str(file), "", "'missing'", "the file")
    file.write_bytes(whole[:-1])
    assert [fault.file for fault in inspect(tmp_path).faults] == [str(file)]
    names = ("self_attn.o_proj.weight", "input_layernorm.weight")
    save_file({name: tensor for name, tensor in load(whole).items() if not name.endswith(names)}, file)
    assert [Path(fault.what).name for fault in inspect(tmp_path).faults] == [
        f"language_model.model.layers.1.{name}" for name in names[::-1]
    ]  # fmt: skip


def test_a_wrong_stored_shape_is_found_by_reading(tmp_path: Path) -> None:
    write(tmp_path, "k2.6", SMALL)
    file = tmp_path / "model-00002-of-000005.safetensors"
    name = "language_model.model.layers.1.mlp.experts.0.gate_proj.weight_shape"
    found = load_file(file)
    found[name] = torch.tensor([1, 2], dtype=torch.int32)
    save_file(found, file)
    assert main(["inspect", str(tmp_path)]) == 0
    assert main(["inspect", str(tmp_path), "--verify"]) == 1


def test_what_is_missing_beside_the_weights_and_what_nobody_reads(tmp_path: Path) -> None:
    write(tmp_path, "k2.6", SMALL)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "modeling_deepseek.py").write_text("raise SystemExit")
    file = tmp_path / "model-00001-of-000005.safetensors"
    save_file(load_file(file) | {"language_model.model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, file)
    index = tmp_path / "model.safetensors.index.json"
    names = json.loads(index.read_text())
    names["weight_map"]["language_model.model.layers.0.self_attn.rotary_emb.inv_freq"] = file.name
    index.write_text(json.dumps(names))
    report = inspect(tmp_path)
    assert [(Path(fault.file).name, fault.found) for fault in report.faults] == [("tokenizer_config.json", "'missing'")]
    assert [note.split(":")[0] for note in report.notes] == [
        "1 tensors that nothing here reads", "1 files of code in the folder, which are never run",
    ]  # fmt: skip


def test_a_drafter_is_one(tmp_path: Path) -> None:
    paths = write_tiny(tmp_path)
    report = inspect(paths.drafter)
    assert report.kind == "a DFlash drafter"
    assert "layers 0, 1, vocabulary 512, mask token 510" in report.told["target"]
    assert report.fault_count == 0


def test_a_drafter_of_the_second_kind_is_one_too(tmp_path: Path) -> None:
    """It was taken for a target, and its missing router complained of."""
    write_dflash2(tmp_path, TinyTarget(), *SHAPES["causal in sliding layers"])
    report = inspect(tmp_path)
    assert (report.kind, report.fault_count) == ("a DFlash 2 drafter", 0), report.faults


def test_everything_wrong_with_a_drafter_is_listed(tmp_path: Path) -> None:
    """Tensors that are missing, of another size or type, unknown, and its masks' row in a pickle that stays shut."""
    write_dflash2(tmp_path, TinyTarget(), *SHAPES["causal in sliding layers"])
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["layers.1.mlp.down_proj.weight"]
    tensors["norm.weight"] = tensors["norm.weight"][:-1].contiguous()
    tensors["fc.weight"] = tensors["fc.weight"].int()
    tensors["lm_head.weight"] = torch.zeros(4, 4)
    tensors["layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    del tensors["candidate_selector.successor_codebook"]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "mask_embedding.pt").write_bytes(b"PK\x03\x04")
    report = inspect(tmp_path)
    assert sorted(fault.what for fault in report.faults) == [
        "", "candidate_selector.successor_codebook.weight", "fc.weight", "layers.1.mlp.down_proj.weight",
        "lm_head.weight", "norm.weight",
    ]  # fmt: skip
    (pickle,) = (fault for fault in report.faults if not fault.what)
    assert pickle.file.endswith("mask_embedding.pt")
    assert "the tensor mask_embedding [64] in mask_embedding.safetensors" in pickle.needed


def test_a_selector_beside_a_drafter_is_looked_at_too(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path).drafter
    write_selector(folder)
    assert not inspect(folder).fault_count
    tensors = load_file(folder / "selector/model.safetensors")
    tensors["candidate_selector.successor_codebook"] = torch.zeros(3, 8)
    save_file(tensors, folder / "selector/model.safetensors")
    assert [fault.what for fault in inspect(folder).faults] == ["candidate_selector.successor_codebook"]
    (folder / "selector/config.json").write_text('{"selector_rank": 8, "selector_top_k": 99}')
    (fault,) = inspect(folder).faults
    assert (fault.what, fault.found) == ("selector_top_k", "99")


def test_other_folders_are_told_from_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tmp_path)]) == 1
    assert "nothing that can be served" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "absent")]) == 2
    assert "an existing folder" in capsys.readouterr().err


@pytest.mark.parametrize("s", [MINI, SMALL, dataclasses.replace(SMALL, heads=6), dataclasses.replace(SMALL, width=96)])
def test_who_can_share_it_is_the_same_by_layer_and_by_tensor(tmp_path: Path, s: Sizes) -> None:
    write(tmp_path, "k2.6", dataclasses.replace(s, vocab=1024, layers=2, experts=2, top_k=1))
    checkpoint = Checkpoint(tmp_path)
    c = K2Config.from_folder(tmp_path)
    assert facts(c, checkpoint.stored, None)
    for ranks in (1, 2, 3, 4, 6, 8, 16):
        assert shared(c, ranks) == (not list(faults(checkpoint.stored, c, ranks))), ranks


def run(*arguments: str, cwd: Path) -> Any:
    command = [sys.executable, "-m", "hedgerow.cli", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=100)


def test_the_hedgerow_command_does_all_three_from_any_folder(tmp_path: Path) -> None:
    """It becomes another program; exit status and output are that one's."""
    made = run("rehearse", "a", "--layers", "2", "--experts", "2", "--vocab", "512", cwd=tmp_path)
    assert (made.returncode, made.stdout) == (0, "a: k2.6, mini\n"), made.stderr
    assert run("convert", "a", "b", "--ranks", "2", cwd=tmp_path).returncode == 0
    said = run("inspect", "b", "--json", cwd=tmp_path)
    assert said.returncode == 0
    assert json.loads(said.stdout)["needs"][0]["ranks"] == 2


def test_what_cannot_be_rehearsed_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for bad in (["--layers", "0"], ["--experts", "-1"], ["--vocab", "511"]):
        assert main(["rehearse", str(tmp_path / "c"), *bad]) == 2
        assert f"{bad[0]}: {bad[1]} is not allowed" in capsys.readouterr().err
    (tmp_path / "mine").write_text("x")
    assert main(["rehearse", str(tmp_path)]) == 2
    assert "a new or an empty folder" in capsys.readouterr().err
    for ranks in ("0", "65"):
        assert main(["convert", str(tmp_path), str(tmp_path / "d"), "--ranks", ranks]) == 2


def test_everything_that_is_wrong_with_a_converted_folder_is_listed(tmp_path: Path) -> None:
    """One fault hid the others, and the memory that it needs; of later ranks only the length was seen."""
    write(tmp_path / "a", "k2.6", SMALL)
    convert(tmp_path / "a", tmp_path / "b", 4, lambda text: None)
    first, second, third = (tmp_path / "b" / f"rank-0{rank}-of-04.safetensors" for rank in range(3))
    first.unlink()
    os.truncate(second, second.stat().st_size - 1)
    content = third.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + length].replace(b'"dtype":"F32"', b'"dtype":"I32"')
    third.write_bytes(content[:8] + header + content[8 + length :])
    (tmp_path / "b" / "tiktoken.model").unlink()
    report = inspect(tmp_path / "b")
    bias = "language_model.model.layers.1.mlp.gate.e_score_correction_bias"
    assert [(Path(fault.file).name, fault.what) for fault in report.faults] == [
        (first.name, ""), (second.name, ""), (third.name, bias), ("tiktoken.model", ""),
    ]  # fmt: skip
    assert [need.ranks for need in report.needs] == [4]
    assert report.needs[0].weights == inspect(tmp_path / "a").needs[2].weights
