"""Our target against Hugging Face's DeepseekV3ForCausalLM and compressed-tensors, which we did not write."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from compressed_tensors.quantization.lifecycle.forward import dequantize

from hedgerow.model.k2 import K2Model
from kernels.int4 import TEST_SHAPES, int4_unpack
from tests.peers import INT4, PEER_LATENT_EPS, TOLERANCE, chain, checkpoint_tensors, peer_model, peer_state
from tests.tiny import TinyTarget, pack_int4, write_target

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

SHAPES = [
    TinyTarget(beta_fast=1.0, layers=4),
    TinyTarget(beta_fast=32.0, hidden=128, experts=16, top_k=4, q_rank=96, kv_rank=64, expert_width=64, heads=8),
    TinyTarget(layers=5, dense_layers=2, top_k=3, shared_experts=2, nope=32, value=32, rope=32, nested=False, eps=1e-6),
    TinyTarget(beta_fast=1.0, norm_topk=False, yarn_factor=32.0, vocab=1024, routed_scale=1.5, yarn_original=128),
]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("shape", SHAPES, ids=range(len(SHAPES)))
def test_logits_equal_those_of_hugging_face(tmp_path: Path, shape: TinyTarget, seed: int) -> None:
    """Two sequences of 150 tokens, in ragged chunks: past YaRN's original length and over two page borders."""
    write_target(tmp_path, shape, seed)
    model = K2Model.load(tmp_path, (), latent_eps=PEER_LATENT_EPS)
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(shape.vocab, (2, 150), generator=g)
    with torch.no_grad():
        expected = peer_model(tmp_path, shape.experts)(tokens).logits
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
