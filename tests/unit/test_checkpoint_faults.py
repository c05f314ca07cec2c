"""A damaged or foreign checkpoint is refused with file, tensor or field, expected and actual."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hedgerow.model.config import K2Config
from hedgerow.model.dflash import DFlashModel
from hedgerow.model.draft_config import DraftConfig
from hedgerow.model.fields import ConfigError
from hedgerow.model.k2 import K2Model
from hedgerow.model.loader import (
    INDEX,
    Checkpoint,
    CheckpointError,
    checkpoint_hash,
    embedding_and_head_hash,
    load_embedding_and_head,
)
from kernels.linear import MIN_4
from tests.tiny import TinyPaths, TinyTarget, write_target, write_tiny

EXPERT = "language_model.model.layers.1.mlp.experts.3.up_proj"


@pytest.fixture
def paths(tmp_path: Path) -> TinyPaths:
    return write_tiny(tmp_path)


def load(folder: Path) -> K2Model:
    return K2Model.load(folder, (0,), law=MIN_4)


def file_of(folder: Path, tensor: str) -> Path:
    name: str = json.loads((folder / INDEX).read_text())["weight_map"][tensor]
    return folder / name


def change_tensors(file: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def change_config(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def test_a_missing_tensor_is_named(paths: TinyPaths) -> None:
    name = f"{EXPERT}.weight_packed"
    index = json.loads((paths.target / INDEX).read_text())
    del index["weight_map"][name]
    (paths.target / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError) as error:
        load(paths.target)
    assert (error.value.tensor, error.value.expected, error.value.actual) == (
        name,
        "a tensor of shape [32, 8]",
        "missing",
    )


def test_a_tensor_that_the_index_promises_and_the_file_lacks_is_named(paths: TinyPaths) -> None:
    name = "language_model.model.norm.weight"
    file = file_of(paths.target, name)
    change_tensors(file, lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError) as error:
        load(paths.target)
    assert (error.value.file, error.value.tensor) == (file, name)


def test_a_wrong_shape_is_named(paths: TinyPaths) -> None:
    name = "language_model.model.layers.2.self_attn.o_proj.weight"
    file = file_of(paths.target, name)
    change_tensors(file, lambda tensors: tensors.update({name: tensors[name][:, :-1].contiguous()}))
    with pytest.raises(CheckpointError) as error:
        load(paths.target)
    assert (error.value.file, error.value.tensor) == (file, name)
    assert (error.value.expected, error.value.actual) == ("shape [64, 64]", [64, 63])


def test_a_wrong_dtype_is_named(paths: TinyPaths) -> None:
    name = f"{EXPERT}.weight_packed"
    change_tensors(file_of(paths.target, name), lambda tensors: tensors.update({name: tensors[name].long()}))
    with pytest.raises(CheckpointError, match=r"weight_packed: 'I64' is not allowed: one of \['I32'\]"):
        load(paths.target)


def test_a_stored_weight_shape_that_lies_is_named(paths: TinyPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a weight is read: with a large model that was after minutes, and conversion did not look at all."""

    def never(*arguments: object, **named: object) -> None:
        raise AssertionError("loading began")

    monkeypatch.setattr(Checkpoint, "raw", never)
    name = f"{EXPERT}.weight_shape"
    change_tensors(file_of(paths.target, name), lambda tensors: tensors.update({name: torch.tensor([64, 32])}))
    with pytest.raises(CheckpointError) as error:
        load(paths.target)
    assert (error.value.tensor, error.value.expected, error.value.actual) == (name, "[32, 64]", [64, 32])


@pytest.mark.parametrize("kind", ["zero_point", "g_idx"])
def test_weights_packed_in_another_way_than_the_configuration_says_are_refused(paths: TinyPaths, kind: str) -> None:
    """They were read as if the tensor were not there: other weights."""
    near, name = f"{EXPERT}.weight_packed", f"{EXPERT}.weight_{kind}"
    file, index = file_of(paths.target, near), paths.target / INDEX
    change_tensors(file, lambda tensors: tensors.update({name: torch.zeros(32, dtype=torch.int32)}))
    names = json.loads(index.read_text())
    names["weight_map"][name] = file.name
    index.write_text(json.dumps(names))
    with pytest.raises(CheckpointError, match="no such tensor: INT4 groups are symmetric") as error:
        load(paths.target)
    assert (error.value.file, error.value.tensor, error.value.actual) == (file, name, [32])


def test_a_git_lfs_pointer_is_called_one(paths: TinyPaths) -> None:
    file = paths.target / "model-00002-of-00002.safetensors"
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 9\n")
    with pytest.raises(CheckpointError, match="a Git LFS pointer") as error:
        load(paths.target)
    assert error.value.file == file


@pytest.mark.parametrize("cut", [1, 1000])
def test_a_truncated_file_is_named_with_its_lengths(paths: TinyPaths, cut: int) -> None:
    file = paths.target / "model-00002-of-00002.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-cut])
    with pytest.raises(CheckpointError) as error:
        load(paths.target)
    assert error.value.file == file
    assert (error.value.expected, error.value.actual) == (f"{len(whole)} bytes", f"{len(whole) - cut} bytes")


@pytest.mark.parametrize(
    "content", [b"", b"\x10", b"\xff" * 64, (8).to_bytes(8, "little") + b"not json", b"\x02" + b"\0" * 7 + b"{}"]
)
def test_a_file_that_is_no_safetensors_is_refused(paths: TinyPaths, content: bytes) -> None:
    file = paths.drafter / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(CheckpointError) as error:
        DFlashModel.load(paths.drafter, paths.target)
    assert error.value.file in (file, paths.drafter)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F99", "shape": [4], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [5], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [3], "data_offsets": [4, 16]},
        {"dtype": "F32", "shape": [1 << 62, 1 << 62], "data_offsets": [0, 16]},
        {"dtype": "F32", "data_offsets": [0, 16]},
    ],
)
def test_a_header_that_contradicts_itself_is_refused_with_its_file(paths: TinyPaths, entry: dict[str, Any]) -> None:
    """Its length was right, so the service failed with the traceback of another library."""
    file, header = paths.drafter / "model.safetensors", json.dumps({"norm.weight": entry}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    with pytest.raises(CheckpointError) as error:
        DFlashModel.load(paths.drafter, paths.target)
    assert error.value.file == file


def test_a_file_that_cannot_be_read_is_named(paths: TinyPaths) -> None:
    """A folder of its name; a file of somebody else's is the same."""
    file = paths.drafter / "model.safetensors"
    file.unlink()
    file.mkdir()
    with pytest.raises(CheckpointError, match="a file that can be read") as error:
        DFlashModel.load(paths.drafter, paths.target)
    assert error.value.file == file


def test_a_missing_file_of_the_index_is_named(paths: TinyPaths) -> None:
    file = paths.target / "model-00001-of-00002.safetensors"
    file.unlink()
    with pytest.raises(CheckpointError) as error:
        load(paths.target)
    assert (error.value.file, error.value.actual) == (file, "missing")


def test_an_index_that_points_out_of_the_folder_is_refused(paths: TinyPaths) -> None:
    index = json.loads((paths.target / INDEX).read_text())
    index["weight_map"]["language_model.model.norm.weight"] = "../drafter/model.safetensors"
    (paths.target / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="a file of this folder"):
        load(paths.target)


def test_the_vision_towers_files_need_not_be_there(paths: TinyPaths) -> None:
    index = json.loads((paths.target / INDEX).read_text())
    index["weight_map"]["vision_tower.patch_embed.weight"] = "model-00064-of-000064.safetensors"
    (paths.target / INDEX).write_text(json.dumps(index))
    assert load(paths.target).config.vocab_size == paths.shape.vocab


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("quant_method", "awq"),
        ("format", "float-quantized"),
        ("num_bits", 8),
        ("group_size", 128),
        ("symmetric", False),
    ],
)
def test_an_unsupported_quantisation_is_named(paths: TinyPaths, field: str, value: object) -> None:
    def change(config: dict[str, Any]) -> None:
        quantization = config["text_config"]["quantization_config"]
        inner = quantization["config_groups"]["group_0"]["weights"]
        (quantization if field in quantization else inner)[field] = value

    change_config(paths.target, change)
    with pytest.raises(ConfigError) as error:
        load(paths.target)
    assert error.value.file == paths.target / "config.json"
    assert error.value.name.startswith("text_config.quantization_config.")
    assert error.value.name.endswith(field)
    assert error.value.value == value


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [
        ("hidden_size", None, "must be int"),
        ("hidden_size", "64", "must be int"),
        ("num_hidden_layers", 0, "must be at least 1"),
        ("n_group", 8, "only 1 is supported"),
        ("q_lora_rank", None, "must be int"),
        ("scoring_func", "softmax", "only 'sigmoid' is supported"),
        ("num_experts_per_tok", 9, "at most n_routed_experts, 8"),
        ("norm_topk_prob", 1, "must be bool"),
        ("rms_norm_eps", -1e-5, "must be greater than 0"),
        ("rope_theta", 0.0, "must be greater than 1"),
        ("rope_scaling.factor", 0.0, "must be at least 1"),
        ("rope_scaling.mscale_all_dim", -0.5, "must be at least 0"),
        ("rope_scaling.beta_fast", 0.0, "must be greater than 0"),
        ("rope_scaling.beta_slow", -3.0, "must be greater than 0"),
        ("first_k_dense_replace", -1, "must be at least 0"),
        ("num_hidden_layers", 10**9, "must be at most 1000"),
        ("n_routed_experts", 10**9, "must be at most 4096"),
        ("hidden_size", 10**30, "must be at most 16777216"),
        ("max_position_embeddings", 10**7, "must be at most 4194304"),
        ("eos_token_id", -1, "within the vocabulary of 512"),
        ("eos_token_id", [511, 512], "within the vocabulary of 512"),
    ],
)
def test_a_bad_field_of_the_target_is_named(paths: TinyPaths, field: str, value: object, limit: str) -> None:
    def change(config: dict[str, Any]) -> None:
        *path, last = field.split(".")
        inside = config["text_config"]
        for name in path:
            inside = inside[name]
        inside[last] = value

    change_config(paths.target, change)
    with pytest.raises(ConfigError) as error:
        K2Config.from_folder(paths.target)
    assert (error.value.name, error.value.limit) == (f"text_config.{field}", limit)


def test_more_experts_in_all_layers_than_can_be_looked_for_are_refused(paths: TinyPaths) -> None:
    """1,000 layers of 4,096 were allowed: inspection took more than a minute, and would have taken 37 M names."""
    change_config(
        paths.target, lambda config: config["text_config"].update(num_hidden_layers=64, n_routed_experts=4096)
    )
    with pytest.raises(ConfigError, match="n_routed_experts: 4096 is not allowed: at most 2048 in each of 64 layers"):
        K2Config.from_folder(paths.target)


@pytest.mark.parametrize(
    ("value", "why"),
    [(float("nan"), "NaN is no JSON number"), (10**400, "is beyond the largest number")],
    ids=["NaN", "400 digits"],
)
def test_a_number_that_is_none_is_refused_with_its_file(paths: TinyPaths, value: float, why: str) -> None:
    change_config(paths.target, lambda config: config["text_config"].update(rms_norm_eps=value))
    with pytest.raises(ConfigError, match=why) as error:
        K2Config.from_folder(paths.target)
    assert error.value.file == paths.target / "config.json"


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [
        ("mask_token_id", 512, "within the vocabulary of 512"),
        ("mask_token_id", None, "must be int"),
        ("block_size", 1, "at least 2: the anchor and one mask"),
        ("final_logit_softcapping", 30.0, "only None is supported"),
    ],
)
def test_a_bad_field_of_the_drafter_is_named(paths: TinyPaths, field: str, value: object, limit: str) -> None:
    change_config(paths.drafter, lambda config: config["dflash_config"].update({field: value}))
    with pytest.raises(ConfigError) as error:
        DraftConfig.from_folder(paths.drafter)
    assert (error.value.name, error.value.limit) == (f"dflash_config.{field}", limit)


def test_a_drafter_of_another_vocabulary_is_refused(paths: TinyPaths, tmp_path: Path) -> None:
    write_target(tmp_path / "other", TinyTarget(vocab=1024))
    with pytest.raises(ConfigError, match=r"the target's vocabulary and hidden size, \(1024, 64\)"):
        DFlashModel.load(paths.drafter, tmp_path / "other")


def test_broken_json_is_named(paths: TinyPaths) -> None:
    (paths.target / "config.json").write_text("{")
    with pytest.raises(ConfigError) as error:
        load(paths.target)
    assert error.value.file == paths.target / "config.json"


def test_the_hash_changes_with_any_byte_of_config_or_weights(paths: TinyPaths) -> None:
    first = checkpoint_hash(paths.target)
    assert first == checkpoint_hash(paths.target)
    change_config(paths.target, lambda config: config["text_config"].update(rms_norm_eps=1e-6))
    second = checkpoint_hash(paths.target)
    file = paths.target / "model-00002-of-00002.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert len({first, second, checkpoint_hash(paths.target)}) == 3


def test_the_heads_hash_does_not_change_with_other_tensors(paths: TinyPaths) -> None:
    before = load_embedding_and_head(paths.target)
    norm, head = "language_model.model.norm.weight", "language_model.lm_head.weight"
    change_tensors(file_of(paths.target, norm), lambda tensors: tensors[norm].mul_(2))
    same = load_embedding_and_head(paths.target)
    assert embedding_and_head_hash(paths.target) == before.hash
    assert same.hash == before.hash
    assert torch.equal(same.head, before.head)
    change_tensors(file_of(paths.target, head), lambda tensors: tensors[head].mul_(2))
    assert load_embedding_and_head(paths.target).hash != before.hash


def test_both_layouts_and_both_shape_types_give_the_same_model(tmp_path: Path) -> None:
    """K2.5's nested config with `language_model.` and int32 shapes; K2's flat one with int64, in a single file."""
    write_target(tmp_path / "a", TinyTarget())
    write_target(tmp_path / "b", TinyTarget(nested=False, shape_dtype=torch.int64, shards=1))
    (tmp_path / "b" / "model-00001-of-00001.safetensors").rename(tmp_path / "b" / "model.safetensors")
    (tmp_path / "b" / INDEX).unlink()
    a, b = load(tmp_path / "a"), load(tmp_path / "b")
    assert a.config == b.config
    assert torch.equal(a.head, b.head)
    for one, other in zip(a.layers[1:], b.layers[1:], strict=True):
        assert torch.equal(one.mlp.experts.gate_up, other.mlp.experts.gate_up)  # type: ignore[union-attr]
        assert torch.equal(one.mlp.experts.down, other.mlp.experts.down)  # type: ignore[union-attr]


def test_a_checkpoint_without_quantisation_has_plain_experts(tmp_path: Path) -> None:
    write_target(tmp_path, TinyTarget(layers=2, shards=1))
    file = tmp_path / "model-00001-of-00001.safetensors"
    packed = load(tmp_path)
    experts = packed.layers[1].mlp.experts  # type: ignore[union-attr]
    weights = {n: t for n, t in load_file(file).items() if ".weight_" not in n}
    for e in range(8):
        base = f"language_model.model.layers.1.mlp.experts.{e}."
        gate, up = experts.gate_up[e].T.contiguous().chunk(2)
        weights |= {base + "gate_proj.weight": gate.clone(), base + "up_proj.weight": up.clone()}
        weights[base + "down_proj.weight"] = experts.down[e].T.contiguous()
    save_file(weights, file, metadata={"format": "pt"})
    (tmp_path / INDEX).unlink()
    file.rename(tmp_path / "model.safetensors")
    change_config(tmp_path, lambda config: config["text_config"].pop("quantization_config"))
    plain = load(tmp_path)
    assert torch.equal(plain.layers[1].mlp.experts.gate_up, experts.gate_up)  # type: ignore[union-attr]


def test_every_end_token_that_the_checkpoint_names_ends_a_text(paths: TinyPaths) -> None:
    """K2.5's config.json names another end token than its chat template uses."""
    first = paths.shape.first_special
    assert K2Config.from_folder(paths.target).eos_token_ids == (first + 1, first + 2)


def test_a_feature_layer_that_the_target_lacks_is_refused(paths: TinyPaths) -> None:
    with pytest.raises(Exception, match="within the target's 3 layers"):
        K2Model.load(paths.target, (3,), law=MIN_4)
