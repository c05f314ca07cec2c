"""Made-up folders have the published names, types, shapes and shards, and are loaded and served like real ones."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hedgerow.errors import InvalidRequest
from hedgerow.model.config import K2Config
from hedgerow.model.k2 import K2Model
from hedgerow.model.loader import INDEX, Checkpoint
from hedgerow.weights.published import MEMBERS, MINI, MINI_FP8, TRUE, Member, Sizes, config
from hedgerow.weights.rehearse import in_shards, write
from hedgerow.weights.writing import Shape
from kernels.linear import MIN_4
from services.gateway.members import member_of
from services.gateway.tokenizer import Tokenizer
from tests.kimi import KIMI, NEEDS_KIMI
from tests.peers import chain

SMALL = dataclasses.replace(MINI, experts=4, vocab=1024)


def shards(folder: Path, member: Member, s: Sizes) -> list[dict[str, Shape]]:
    (folder / "config.json").write_text(json.dumps(config(member, s)))
    return [{shape.name: shape for _, shape in shard} for shard in in_shards(K2Config.from_folder(folder), member, s)]


def test_k26_has_every_published_name_and_byte(tmp_path: Path) -> None:
    """Counts and sizes as a public dump of K2.5's files has them: 208,550 tensors, 335 of them of images."""
    files = shards(tmp_path, "k2.6", TRUE)
    every = {name: shape for file in files for name, shape in file.items()}
    images = [name for name in every if name.startswith(("vision_tower.", "mm_projector."))]
    assert (len(files), len(every), len(images)) == (64, 208_550, 335)
    assert sum(shape.bytes for name, shape in every.items() if name not in images) == 594_205_904_896
    assert sum(shape.bytes for shape in every.values()) / 2**30 == pytest.approx(554.27, abs=0.005)
    base = "language_model.model.layers.60.mlp.experts.383."
    assert files[60][base + "up_proj.weight_packed"] == (base + "up_proj.weight_packed", "I32", (2048, 896))
    assert files[60][base + "down_proj.weight_scale"] == (base + "down_proj.weight_scale", "BF16", (7168, 64))
    assert files[0]["language_model.model.layers.0.mlp.down_proj.weight"].shape == (7168, 18432)
    assert files[61]["language_model.lm_head.weight"].shape == (163840, 7168)
    assert "vision_tower.encoder.blocks.26.wqkv.weight" in files[63]


@NEEDS_KIMI
def test_our_k26_says_what_the_published_config_says() -> None:
    ours, published = config("k2.6", TRUE), json.loads((KIMI / "config.json").read_text())

    def compare(mine: dict[str, Any], theirs: dict[str, Any], where: str) -> None:
        for name, value in mine.items():
            if isinstance(value, dict):
                compare(value, theirs[name], f"{where}{name}.")
            else:
                assert theirs[name] == value, where + name

    compare(ours, published, "")


@pytest.mark.parametrize("member", MEMBERS)
def test_all_61_layers_load_and_say_something_finite(tmp_path: Path, member: Member) -> None:
    small = dataclasses.replace(MINI_FP8, vocab=1024, experts=2, width=128, dense_width=128, heads=2)
    s = small if member == "k2-instruct" else SMALL
    write(tmp_path, member, s)
    model = K2Model.load(tmp_path, (1, 59), law=MIN_4)
    logits = model.forward([chain([5, 6, 7, 8], 0, 4, [0])], model.new_cache(1)).logits
    assert len(model.layers) == 61
    assert logits.isfinite().all()
    assert logits.std() > 0.1
    names = {path.name for path in tmp_path.iterdir()}
    last = "model-00064-of-000064.safetensors" if member in ("k2.5", "k2.6") else "model-00062-of-000062.safetensors"
    assert {"config.json", INDEX, "tiktoken.model", "tokenizer_config.json", last} <= names


def test_the_formats_own_library_reads_the_same_bytes(tmp_path: Path) -> None:
    write(tmp_path, "k2-instruct", dataclasses.replace(MINI_FP8, layers=2, vocab=512, experts=2))
    ours = Checkpoint(tmp_path)
    seen = 0
    for file in tmp_path.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            got = ours.raw(name, tensor.shape, (tensor.dtype,))
            assert torch.equal(got.view(torch.uint8), tensor.view(torch.uint8)), name
            seen += 1
    assert seen == len(ours.stored.entries)


def test_the_same_seed_writes_the_same_folder(tmp_path: Path) -> None:
    s = dataclasses.replace(SMALL, layers=2)
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write(tmp_path / name, "k2.6", s, seed)
    a, b, c = ([p.read_bytes() for p in sorted((tmp_path / name).glob("*.safetensors"))] for name in ("a", "b", "c"))
    assert a == b
    assert a != c


def test_the_made_up_vocabulary_is_of_the_true_size_and_names(tmp_path: Path) -> None:
    write(tmp_path, "k2.6", dataclasses.replace(SMALL, layers=1, vocab=TRUE.vocab, experts=1, top_k=1, hidden=32))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.vocab_size == 163840
    assert tokenizer.special("<|im_end|>") == 163586
    assert tokenizer.special("<think>") == 163606
    text = "def f(x):\n    return 你好 🙂"
    assert b"".join(tokenizer.pieces[token] for token in tokenizer.encode(text)).decode() == text


@pytest.mark.parametrize("member", MEMBERS)
def test_the_gateway_takes_it_for_the_member_that_it_is(tmp_path: Path, member: Member) -> None:
    s = MINI_FP8 if member == "k2-instruct" else MINI
    write(tmp_path, member, dataclasses.replace(s, layers=1, experts=1, top_k=1, vocab=1024))
    assert member_of(tmp_path).name == member
    tokenizer = Tokenizer.from_folder(tmp_path)
    if member == "k2-instruct":  # the published one has no names for these
        with pytest.raises(KeyError):
            tokenizer.special("<think>")
    else:
        assert tokenizer.special("<think>") == 1024 - 256 + 22


def test_another_folders_tokenizer_is_taken_where_it_fits(tmp_path: Path) -> None:
    write(tmp_path / "a", "k2.6", dataclasses.replace(SMALL, layers=1))
    (tmp_path / "a" / "modeling_deepseek.py").write_text("raise SystemExit")
    write(tmp_path / "b", "k2.6", dataclasses.replace(SMALL, layers=1), tokenizer=tmp_path / "a")
    model = "tiktoken.model"
    assert (tmp_path / "a" / model).read_bytes() == (tmp_path / "b" / model).read_bytes()
    assert not (tmp_path / "b" / "modeling_deepseek.py").exists()
    with pytest.raises(InvalidRequest, match=r"--tokenizer: 1024 is not allowed: the vocabulary of 2048"):
        write(tmp_path / "c", "k2.6", dataclasses.replace(SMALL, layers=1, vocab=2048), tokenizer=tmp_path / "a")


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    with pytest.raises(InvalidRequest, match="a new or an empty folder"):
        write(tmp_path, "k2.6", SMALL)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_refusal_leaves_nothing_in_the_way_of_the_next_try(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The small files stayed, and the same command was then refused for them."""
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage)
        with pytest.raises(InvalidRequest, match=r"'0\.0 GB free' is not allowed: a disk with"):
            write(tmp_path, "k2.6", SMALL)
    with pytest.raises(InvalidRequest, match="--tokenizer"):
        write(tmp_path, "k2.6", SMALL, tokenizer=tmp_path / "absent")
    assert list(tmp_path.iterdir()) == []
    write(tmp_path, "k2.6", SMALL)
