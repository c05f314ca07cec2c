"""Our target against Hugging Face's DeepseekV3ForCausalLM and compressed-tensors, which we did not write.

The peer runs in float32 with experts as q * scale, unpacked by compressed-tensors. Its norms of the latents use epsilon
1e-6 whatever the config says, hence `latent_eps`.
"""

from __future__ import annotations

import dataclasses
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
from compressed_tensors.quantization.lifecycle.forward import dequantize
from safetensors.torch import load_file

from hedgerow.model.batch import SequenceRows
from hedgerow.model.k2 import K2Model
from kernels.int4 import TEST_SHAPES, int4_unpack
from tests.tiny import TinyTarget, pack_int4, write_target

with warnings.catch_warnings():  # the peer's own imports are not ours to fix
    warnings.simplefilter("ignore")
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, DeepseekV3Config, DeepseekV3ForCausalLM

PEER_LATENT_EPS = 1e-6
TOLERANCE = 1e-4
INT4 = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy=QuantizationStrategy.GROUP, group_size=32)
SHAPES = [
    TinyTarget(beta_fast=1.0, layers=4),
    TinyTarget(beta_fast=32.0, hidden=128, experts=16, top_k=4, q_rank=96, kv_rank=64, expert_width=64, heads=8),
    TinyTarget(layers=5, dense_layers=2, top_k=3, shared_experts=2, nope=32, value=32, rope=32, nested=False, eps=1e-6),
    TinyTarget(beta_fast=1.0, norm_topk=False, yarn_factor=32.0, vocab=1024, routed_scale=1.5, yarn_original=128),
]


def plain_name(name: str) -> str:
    return name.removeprefix("language_model.")


def checkpoint_tensors(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return {plain_name(name): tensor for name, tensor in found.items()}


def peer_expert(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """compressed-tensors' own unpacking and product, float32."""
    size = torch.Size(tensors[name + ".weight_shape"].tolist())
    codes = unpack_from_int32(tensors[name + ".weight_packed"], 4, size)
    product: torch.Tensor = dequantize(codes.float(), tensors[name + ".weight_scale"].float(), args=INT4)
    return product


def peer_state(tensors: dict[str, torch.Tensor], experts: int) -> dict[str, torch.Tensor]:
    """Checkpoint tensors under the peer's names: a layer's experts are one tensor there, gate first."""
    state = {name: t.float() for name, t in tensors.items() if ".experts." not in name}
    for base in {name.split(".experts.")[0] for name in tensors if ".mlp.experts." in name}:
        every = [f"{base}.experts.{e}." for e in range(experts)]
        pairs = [torch.cat([peer_expert(tensors, n + "gate_proj"), peer_expert(tensors, n + "up_proj")]) for n in every]
        state[base + ".experts.gate_up_proj"] = torch.stack(pairs)
        state[base + ".experts.down_proj"] = torch.stack([peer_expert(tensors, n + "down_proj") for n in every])
    return state


def peer_model(folder: Path, shape: TinyTarget) -> Any:
    config = json.loads((folder / "config.json").read_text())
    config = dict(config.get("text_config", config))
    config.pop("quantization_config")
    config.pop("model_type")
    peer_config = DeepseekV3Config(**config, num_mtp_layers=0)
    peer_config._attn_implementation = "eager"
    peer: Any = DeepseekV3ForCausalLM(peer_config)
    peer = peer.eval().float()
    peer.load_state_dict(peer_state(checkpoint_tensors(folder), shape.experts), strict=True)
    return peer


def chain(tokens: list[int], start: int, end: int, pages: list[int]) -> SequenceRows:
    rows = end - start
    return SequenceRows(start, pages, tokens[start:end], range(-1, rows - 1), range(rows))


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("shape", SHAPES, ids=range(len(SHAPES)))
def test_logits_equal_those_of_hugging_face(tmp_path: Path, shape: TinyTarget, seed: int) -> None:
    """Two sequences of 150 tokens, in ragged chunks: past YaRN's original length and over two page borders."""
    write_target(tmp_path, shape, seed)
    model = K2Model.load(tmp_path, (), latent_eps=PEER_LATENT_EPS)
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(shape.vocab, (2, 150), generator=g)
    with torch.no_grad():
        expected = peer_model(tmp_path, shape)(tokens).logits
    cache = model.new_cache(6)
    got: list[list[torch.Tensor]] = [[], []]
    for start, end in [(0, 1), (1, 60), (60, 133), (133, 134), (134, 150)]:
        batch = [
            chain(row, start, end, pages) for row, pages in zip(tokens.tolist(), ([3, 0, 5], [1, 4, 2]), strict=True)
        ]
        for out, part in zip(got, model.forward(batch, cache).logits.chunk(2), strict=True):
            out.append(part)
    ours = torch.stack([torch.cat(parts) for parts in got])
    assert expected.std() > 0.5, "logits that hardly vary would prove nothing"
    assert (ours - expected).abs().max() <= TOLERANCE


@pytest.mark.parametrize("nested", [True, False], ids=["k2.6", "k2"])
def test_hugging_face_loads_what_tiny_writes(tmp_path: Path, nested: bool) -> None:
    """Its parameters are our float32 weights rounded to bfloat16, bit for bit: the layout is genuine."""
    shape = TinyTarget(nested=nested, layers=2, shape_dtype=torch.int32 if nested else torch.int64)
    write_target(tmp_path, shape)
    auto = AutoModelForImageTextToText if nested else AutoModelForCausalLM
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peer = auto.from_pretrained(tmp_path, dtype=torch.bfloat16, attn_implementation="eager")
    loaded = {name.replace("model.language_model.", "model."): t for name, t in peer.state_dict().items()}
    expected = peer_state(checkpoint_tensors(tmp_path), shape.experts)
    assert expected.keys() <= loaded.keys()
    for name, tensor in expected.items():
        assert torch.equal(loaded[name].bfloat16(), tensor.bfloat16()), name


@pytest.mark.parametrize(("rows", "columns"), TEST_SHAPES)
@pytest.mark.parametrize("shape_dtype", [torch.int32, torch.int64])
def test_int4_words_unpack_as_compressed_tensors_does(rows: int, columns: int, shape_dtype: torch.dtype) -> None:
    """Codes, scales and their float32 product, bit for bit, over all sixteen codes."""
    g = torch.Generator().manual_seed(rows)
    stored = pack_int4(torch.randn(rows, columns, generator=g), shape_dtype)
    stored["weight_packed"] = torch.randint(-(2**31), 2**31, (rows, columns // 8), generator=g).int()
    codes = unpack_from_int32(stored["weight_packed"], 4, torch.Size(stored["weight_shape"].tolist()))
    ones = torch.ones(rows, columns // 32)
    assert torch.equal(int4_unpack(stored["weight_packed"], ones), codes.float())
    product = dequantize(codes.float(), stored["weight_scale"].float(), args=INT4)
    assert torch.equal(int4_unpack(stored["weight_packed"], stored["weight_scale"]), product)


def test_the_known_word_of_eight_codes() -> None:
    """kimi-k2 packs [-8, -7, -1, 0, 1, 2, 3, 7] as 0xFBA98710: the lowest nibble is the lowest k, stored as q + 8."""
    word = torch.tensor([[0xFBA98710 - 2**32, 0, 0, 0]], dtype=torch.int32)
    values = int4_unpack(word, torch.tensor([[0.5]]))[0, :8]
    assert values.tolist() == [-4.0, -3.5, -0.5, 0.0, 0.5, 1.0, 1.5, 3.5]


def test_default_epsilon_is_the_configs(tmp_path: Path) -> None:
    shape = dataclasses.replace(SHAPES[0], eps=1e-3)
    write_target(tmp_path, shape)
    assert K2Model.load(tmp_path, ()).latent_eps == 1e-3
