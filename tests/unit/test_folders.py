"""What `hedgerow up` finds on disk, and what it says where that will not do."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from hedgerow.cli.folders import check_drafter, check_target, feature_layers, make_data_folder, secret
from hedgerow.errors import InvalidRequest
from hedgerow.model.draft_config import DraftConfig
from tests.stack import Models


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A folder with the files of a target in two shards."""
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    for name, text in (
        ("config.json", "{}"), ("tiktoken.model", ""), ("tokenizer_config.json", "{}"), ("one.safetensors", ""),
        ("two.safetensors", ""), ("model.safetensors.index.json", json.dumps(index)),
    ):  # fmt: skip
        (tmp_path / name).write_text(text)
    return tmp_path


def test_real_checkpoints_pass(models: Models, tiny: Models) -> None:
    for pair in (models, tiny):
        check_target(pair.target)
        check_drafter(pair.drafter)


@pytest.mark.parametrize(
    "missing", ["config.json", "tiktoken.model", "tokenizer_config.json", "two.safetensors", "one.safetensors"]
)
def test_a_missing_file_of_a_checkpoint_is_named(checkpoint: Path, missing: str) -> None:
    """An empty model folder gave no error for 25 s."""
    check_target(checkpoint)
    (checkpoint / missing).unlink()
    with pytest.raises(InvalidRequest, match=f"--model: .*{missing} is missing there"):
        check_target(checkpoint)


def test_files_of_images_need_not_be_there(checkpoint: Path) -> None:
    """K2.5 and K2.6 have 0.9 GB of them, in files of their own."""
    index = {
        "weight_map": {"a": "one.safetensors", "vision_tower.x": "x.safetensors", "mm_projector.y": "y.safetensors"}
    }
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    check_target(checkpoint)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("text", ["", "[1]", "{", "\xff"])
def test_a_file_that_is_no_json_object_is_named(checkpoint: Path, name: str, text: str) -> None:
    (checkpoint / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(InvalidRequest, match=f"--model: .*{name} (cannot be read|holds no JSON object)"):
        check_target(checkpoint)


@pytest.mark.parametrize("weight_map", ["abc", [1], 7])
def test_a_map_that_is_none_is_named(checkpoint: Path, weight_map: object) -> None:
    """It was a traceback of ValueError or TypeError."""
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(InvalidRequest, match=r"weight_map of model\.safetensors\.index\.json is no JSON object"):
        check_target(checkpoint)


@pytest.mark.parametrize(
    "changed",
    [{}, {"target_layer_ids": None, "num_target_layers": 61}, {"target_layer_ids": None, "num_target_layers": 36}],
)
@pytest.mark.parametrize("layers", [1, 2, 6])
def test_feature_layers_are_those_of_the_drafters_process(
    tiny: Models, tmp_path: Path, changed: dict[str, object], layers: int
) -> None:
    """A drafter that does not name them was refused, although the drafter's process serves it."""
    config = json.loads((tiny.drafter / "config.json").read_text()) | {"num_hidden_layers": layers, "layer_types": None}
    config["dflash_config"] |= changed
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert feature_layers(tmp_path) == list(DraftConfig.from_folder(tmp_path).target_layer_ids)


def test_a_checkpoint_without_weights_says_so(checkpoint: Path) -> None:
    for path in (*checkpoint.glob("*.safetensors"), checkpoint / "model.safetensors.index.json"):
        path.unlink()
    with pytest.raises(InvalidRequest, match=r"its weights \(\*\.safetensors\) are missing there"):
        check_target(checkpoint)
    with pytest.raises(InvalidRequest, match=r"--drafter: .* there is no such folder"):
        check_drafter(checkpoint / "nothing")


def test_a_target_is_no_drafter(checkpoint: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"dflash_config\.target_layer_ids"):
        check_drafter(checkpoint)


def test_a_data_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    """A file of this name gave a traceback of FileExistsError."""
    (tmp_path / "file").touch()
    make_data_folder(tmp_path / "new" / "er")
    for path in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/nothing/here")):
        with pytest.raises(InvalidRequest, match="is not allowed: a folder that can be written to") as refused:
            make_data_folder(path)
        assert (refused.value.field, refused.value.value) == ("data", str(path))


def test_the_secret_is_made_once_and_kept_to_its_owner(tmp_path: Path) -> None:
    made = secret(tmp_path / "s")
    assert len(made) == 64
    assert secret(tmp_path / "s") == made
    assert (tmp_path / "s").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_a_full_disk_leaves_no_empty_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It left an empty one, and every later start took it: anybody could have made its session ids."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(OSError, match="No space left"):
            secret(tmp_path / "s")
    assert not (tmp_path / "s").exists()
    assert len(secret(tmp_path / "s")) == 64


def test_an_empty_secret_is_refused(tmp_path: Path) -> None:
    (tmp_path / "s").write_text("\n")
    with pytest.raises(InvalidRequest, match="not empty; without the file a new secret is made"):
        secret(tmp_path / "s")
