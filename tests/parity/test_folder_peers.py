"""Folders in the published layouts, loaded by us and by Hugging Face's own loading: the same logits.

Hugging Face rounds an expert's code * scale to bfloat16. The folders' scales have five significant bits, so that the
product is a bfloat16 number and both have the same weights; both then compute in float32.
"""

from __future__ import annotations

import dataclasses
import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hedgerow.model.k2 import K2Model
from hedgerow.model.loader import INDEX, Checkpoint
from hedgerow.weights.published import MINI, MINI_FP8, Member, Sizes
from hedgerow.weights.rehearse import write
from kernels.fp8 import TEST_SHAPES, fp8_unpack
from tests.peers import PEER_LATENT_EPS, TOLERANCE, chain

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, FineGrainedFP8Config

SHAPES = [
    dataclasses.replace(MINI, layers=4, vocab=1024),
    dataclasses.replace(MINI, layers=3, vocab=2048, hidden=192, heads=4, experts=24, top_k=6, dense_layers=2, nope=64),
    dataclasses.replace(MINI, layers=3, vocab=768, width=64, kv_rank=96, q_rank=160, rope=64, shared_experts=2),
]


def peer_logits(folder: Path, s: Sizes, tokens: torch.Tensor, **options: Any) -> torch.Tensor:
    """Of `from_pretrained`, after what it is known to need: its own names for model and vision tower."""
    config = json.loads((folder / "config.json").read_text())
    nested = "text_config" in config
    if nested:
        # the scheme is meant for the text model alone; the peer applies it wherever it is not told to ignore
        config["text_config"]["quantization_config"]["ignore"] += ["re:.*vision_tower.*", "re:.*mm_projector.*"]
        config["vision_config"] |= {
            "hidden_size": s.vision_hidden, "intermediate_size": s.vision_width, "pos_emb_height": s.vision_grid,
            "pos_emb_width": s.vision_grid, "num_attention_heads": s.vision_heads, "num_hidden_layers": s.vision_layers,
        }  # fmt: skip
        config["projection_hidden_size"] = s.vision_hidden
    else:
        config["model_type"] = "deepseek_v3"
    (folder / "config.json").write_text(json.dumps(config))
    auto: Any = AutoModelForImageTextToText if nested else AutoModelForCausalLM
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peer, told = auto.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True, **options
        )
    assert not any(told.values()), "every tensor of the folder is one of the peer's, and none of the peer's is missing"
    with torch.no_grad():
        logits: torch.Tensor = torch.nn.Module.float(peer)(tokens).logits  # experts are loaded as bfloat16
    return logits


def our_logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    """In ragged chunks over two page borders."""
    model = K2Model.load(folder, (), latent_eps=PEER_LATENT_EPS)
    cache, line = model.new_cache(3), tokens[0].tolist()
    chunks = [chain(line, a, b, [2, 0, 1]) for a, b in [(0, 1), (1, 60), (60, 133), (133, 150)]]
    return torch.cat([model.forward([rows], cache).logits for rows in chunks])


def compare(folder: Path, s: Sizes, seed: int, peer_folder: Path | None = None, **options: Any) -> None:
    tokens = torch.randint(s.vocab, (1, 150), generator=torch.Generator().manual_seed(seed))
    ours = our_logits(folder, tokens)
    expected = peer_logits(peer_folder or folder, s, tokens, **options)[0]
    assert expected.std() > 0.5, "logits that hardly vary would prove nothing"
    assert (ours - expected).abs().max() <= TOLERANCE


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("member", ["k2-thinking", "k2.5", "k2.6"])
@pytest.mark.parametrize("s", SHAPES, ids=range(len(SHAPES)))
def test_logits_equal_those_of_hugging_faces_own_loading(tmp_path: Path, member: Member, s: Sizes, seed: int) -> None:
    write(tmp_path, member, s, seed, short_scales=True)
    compare(tmp_path, s, seed)


@pytest.mark.parametrize("seed", [0, 1])
def test_fp8_logits_equal_those_of_hugging_faces_own_loading(tmp_path: Path, seed: int) -> None:
    """Its loading takes rows in whole blocks only: 128 of kv_a here, where the published model has 576."""
    s = dataclasses.replace(MINI_FP8, layers=3, vocab=1024, width=256)
    write(tmp_path, "k2-instruct", s, seed)
    compare(tmp_path, s, seed, quantization_config=FineGrainedFP8Config(dequantize=True))


def multiplied_out(folder: Path, other: Path) -> None:
    """The same folder in float32, each FP8 matrix multiplied by its scales in the words of its definition."""
    other.mkdir()
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    plain = {}
    for name, tensor in tensors.items():
        if name.endswith("_scale_inv"):
            continue
        plain[name] = tensor.float()
        if tensor.dtype == torch.float8_e4m3fn:
            scale = tensors[name + "_scale_inv"]
            row, column = torch.arange(tensor.shape[0]) // 128, torch.arange(tensor.shape[1]) // 128
            plain[name] = tensor.float() * scale[row][:, column]
    save_file(plain, other / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config")
    (other / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(("rows", "columns"), TEST_SHAPES)
def test_every_fp8_code_is_multiplied_by_its_blocks_scale(rows: int, columns: int) -> None:
    """Element by element in the words of the definition, one float32 product; NaN codes included."""
    g = torch.Generator().manual_seed(rows)
    codes = torch.randint(256, (rows, columns), generator=g, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scales = torch.randn(math.ceil(rows / 128), math.ceil(columns / 128), generator=g)
    got, values = fp8_unpack(codes, scales), codes.float()
    for n in range(rows):
        for k in range(0, columns, 64 if rows > 1 else 1):
            expected = values[n, k] * scales[n // 128, k // 128]
            assert torch.equal(got[n, k].view(torch.int32), expected.view(torch.int32)), (n, k)


@pytest.mark.parametrize("seed", [0, 1])
def test_fp8_is_its_definition_bit_for_bit_and_gives_the_peers_logits(tmp_path: Path, seed: int) -> None:
    s = dataclasses.replace(MINI_FP8, layers=3, vocab=1024, kv_rank=512, width=256)  # kv_a: 576 rows, 4.5 blocks
    write(tmp_path / "fp8", "k2-instruct", s, seed)
    multiplied_out(tmp_path / "fp8", tmp_path / "plain")
    ours, plain = Checkpoint(tmp_path / "fp8"), Checkpoint(tmp_path / "plain")
    names = [name for name, entry in ours.stored.entries.items() if entry.dtype == "F8_E4M3"]
    assert any("kv_a_proj" in name and ours.stored.entries[name].shape[0] == 576 for name in names)
    for name in names:
        shape = ours.stored.entries[name].shape
        assert torch.equal(ours.weight(name, *shape), plain.weight(name, *shape)), name
    compare(tmp_path / "fp8", s, seed, tmp_path / "plain")


def test_bfloat16_folders_load_as_they_do_there(tmp_path: Path) -> None:
    """No quantisation at all, each expert's matrix as it is."""
    s = dataclasses.replace(MINI_FP8, layers=3, vocab=1024, width=256)
    write(tmp_path / "fp8", "k2-instruct", s)
    multiplied_out(tmp_path / "fp8", tmp_path / "plain")
    file = tmp_path / "plain" / "model.safetensors"
    narrow = {n: t if "correction_bias" in n else t.bfloat16() for n, t in load_file(file).items()}
    save_file(narrow, file, metadata={"format": "pt"})
    assert not (tmp_path / "plain" / INDEX).exists()
    compare(tmp_path / "plain", s, 0)
