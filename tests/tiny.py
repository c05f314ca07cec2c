"""Small random checkpoints in the genuine layouts: a K2.6 target, a DFlash drafter and a byte vocabulary.

    paths = write_tiny(folder)                 # folder/target, folder/drafter
    model = K2Model.load(paths.target, paths.feature_layers)

The router bias and every norm weight are random: at their initial values a fault in them would go unseen. The weights
are bfloat16 and INT4, as served; `seed` decides them all.
"""

from __future__ import annotations

import base64
import itertools
import json
import string
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

SPECIALS = 256
# offset from the first special id -> text, as in Kimi's vocabulary
NAMED_SPECIALS = {
    0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 3: "<|im_user|>", 4: "<|im_assistant|>", 6: "<|start_header_id|>",
    7: "<|end_header_id|>", 9: "[EOT]", 10: "<|im_system|>", 11: "<|tool_calls_section_begin|>",
    12: "<|tool_calls_section_end|>", 13: "<|tool_call_begin|>", 14: "<|tool_call_argument_begin|>",
    15: "<|tool_call_end|>", 17: "<|im_middle|>", 18: "<|media_begin|>", 19: "<|media_content|>", 20: "<|media_end|>",
    21: "<|media_pad|>", 22: "<think>", 23: "</think>", 254: "[UNK]", 255: "[PAD]",
}  # fmt: skip
NOT_SPECIAL = {11, 12, 13, 14, 15, 22, 23}  # atomic, yet kept by skip_special_tokens
QUANTIZATION: dict[str, Any] = {
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None, "block_structure": None, "dynamic": False, "group_size": 32, "num_bits": 4,
                "observer": "minmax", "observer_kwargs": {}, "strategy": "group", "symmetric": True, "type": "int",
            },
        }
    },
    "format": "pack-quantized",
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}  # fmt: skip


@dataclass(frozen=True)
class TinyTarget:
    """Sizes of a target; the defaults make a step of about a millisecond."""

    vocab: int = 512
    hidden: int = 64
    layers: int = 3
    dense_layers: int = 1
    dense_width: int = 96
    experts: int = 8
    top_k: int = 2
    expert_width: int = 32
    shared_experts: int = 1
    heads: int = 4
    q_rank: int = 32
    kv_rank: int = 32
    nope: int = 16
    rope: int = 16
    value: int = 16
    eps: float = 1e-5
    routed_scale: float = 2.827
    norm_topk: bool = True
    positions: int = 4096
    theta: float = 50000.0
    yarn_factor: float = 64.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    yarn_original: int = 64
    nested: bool = True  # K2.5/K2.6: text_config and `language_model.`; False: K2/K2-Thinking
    shape_dtype: torch.dtype = torch.int32  # of weight_shape; current compressed-tensors writes int64
    shards: int = 2

    @property
    def first_special(self) -> int:
        return self.vocab - SPECIALS


@dataclass(frozen=True)
class TinyDrafter:
    """Sizes of a drafter; hidden and vocabulary are its target's."""

    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    width: int = 96
    block: int = 8
    window: int = 32
    layer_types: tuple[str, ...] = ("sliding_attention", "full_attention")
    feature_layers: tuple[int, ...] = (0, 1)
    eps: float = 1e-5
    theta: float = 50000.0
    rope_scaling: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class TinyPaths:
    """Where `write_tiny` put things. The vocabulary lies in the target's folder, as in Kimi's."""

    target: Path
    drafter: Path
    shape: TinyTarget = field(default_factory=TinyTarget)
    drafter_shape: TinyDrafter = field(default_factory=TinyDrafter)

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return self.drafter_shape.feature_layers


def write_tiny(
    folder: Path, target: TinyTarget | None = None, drafter: TinyDrafter | None = None, seed: int = 0
) -> TinyPaths:
    """Writes target (with vocabulary) and drafter below `folder`."""
    paths = TinyPaths(folder / "target", folder / "drafter", target or TinyTarget(), drafter or TinyDrafter())
    write_target(paths.target, paths.shape, seed)
    write_vocabulary(paths.target, paths.shape.vocab)
    write_drafter(paths.drafter, paths.shape, paths.drafter_shape, seed + 1)
    return paths


def write_target(folder: Path, shape: TinyTarget, seed: int = 0) -> None:
    """config.json, generation_config.json, safetensors shards and their index."""
    tensors = list(target_tensors(shape, torch.Generator().manual_seed(seed)))
    folder.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    for i in range(shape.shards):
        name = f"model-{i + 1:05d}-of-{shape.shards:05d}.safetensors"
        part = dict(tensors[i :: shape.shards])  # a layer's tensors lie in several files: the index must be believed
        save_file(part, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    size = sum(t.nbytes for _, t in tensors)
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": weight_map})
    write_json(folder / "config.json", target_config(shape))
    stop = [shape.first_special + 2, shape.first_special + 1]
    write_json(folder / "generation_config.json", {"eos_token_id": stop, "max_length": shape.positions})


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def matrix(g: torch.Generator, rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
    values: torch.Tensor = torch.randn(rows, columns, generator=g) * gain * columns**-0.5
    return values.bfloat16()


def norm(g: torch.Generator, size: int) -> torch.Tensor:
    return (1 + 0.1 * torch.randn(size, generator=g)).bfloat16()


def pack_int4(weight: torch.Tensor, shape_dtype: torch.dtype = torch.int32) -> dict[str, torch.Tensor]:
    """`pack-quantized` tensors of [N, K]: word w of a row holds k = 8w .. 8w+7 as q + 8, lowest nibble first."""
    rows, columns = weight.shape
    groups = weight.float().view(rows, columns // 32, 32)
    scale = (groups.abs().amax(-1) / 7).bfloat16()
    q = (groups / scale.float().unsqueeze(-1)).round().clamp(-8, 7).long().view(rows, columns // 8, 8)
    words = ((q + 8) << torch.arange(0, 32, 4)).sum(-1)
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).int()
    size = torch.tensor([rows, columns], dtype=shape_dtype)
    return {"weight_packed": words, "weight_scale": scale, "weight_shape": size}


def target_tensors(s: TinyTarget, g: torch.Generator) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor under its checkpoint name."""
    prefix = "language_model." if s.nested else ""
    yield f"{prefix}model.embed_tokens.weight", torch.randn(s.vocab, s.hidden, generator=g).bfloat16()
    for i in range(s.layers):
        base = f"{prefix}model.layers.{i}."
        yield base + "input_layernorm.weight", norm(g, s.hidden)
        yield base + "post_attention_layernorm.weight", norm(g, s.hidden)
        for name, tensor in attention_tensors(s, g):
            yield f"{base}self_attn.{name}.weight", tensor
        yield from (moe_tensors(base, s, g) if i >= s.dense_layers else mlp_tensors(f"{base}mlp.", s.dense_width, s, g))
    yield f"{prefix}model.norm.weight", norm(g, s.hidden)
    yield f"{prefix}lm_head.weight", matrix(g, s.vocab, s.hidden, gain=2.0)


def attention_tensors(s: TinyTarget, g: torch.Generator) -> Iterator[tuple[str, torch.Tensor]]:
    yield "q_a_proj", matrix(g, s.q_rank, s.hidden)
    yield "q_a_layernorm", norm(g, s.q_rank)
    yield "q_b_proj", matrix(g, s.heads * (s.nope + s.rope), s.q_rank)
    yield "kv_a_proj_with_mqa", matrix(g, s.kv_rank + s.rope, s.hidden)
    yield "kv_a_layernorm", norm(g, s.kv_rank)
    yield "kv_b_proj", matrix(g, s.heads * (s.nope + s.value), s.kv_rank)
    yield "o_proj", matrix(g, s.hidden, s.heads * s.value)


def mlp_tensors(base: str, width: int, s: TinyTarget, g: torch.Generator) -> Iterator[tuple[str, torch.Tensor]]:
    for name, rows, columns in mlp_matrices(width, s.hidden):
        yield f"{base}{name}.weight", matrix(g, rows, columns)


def mlp_matrices(width: int, hidden: int) -> list[tuple[str, int, int]]:
    return [("gate_proj", width, hidden), ("up_proj", width, hidden), ("down_proj", hidden, width)]


def moe_tensors(base: str, s: TinyTarget, g: torch.Generator) -> Iterator[tuple[str, torch.Tensor]]:
    yield base + "mlp.gate.weight", matrix(g, s.experts, s.hidden)
    yield base + "mlp.gate.e_score_correction_bias", torch.randn(s.experts, generator=g) * 0.3
    for e in range(s.experts):
        for name, rows, columns in mlp_matrices(s.expert_width, s.hidden):
            for kind, tensor in pack_int4(matrix(g, rows, columns), s.shape_dtype).items():
                yield f"{base}mlp.experts.{e}.{name}.{kind}", tensor
    yield from mlp_tensors(f"{base}mlp.shared_experts.", s.expert_width * s.shared_experts, s, g)


def special_ids(s: TinyTarget) -> dict[str, int]:
    first = s.first_special
    return {"bos_token_id": first, "eos_token_id": first + 2, "pad_token_id": first + 255}


def target_config(s: TinyTarget) -> dict[str, Any]:
    """config.json: K2.5/K2.6's nested form, or K2's flat one."""
    text = {**text_config(s), "quantization_config": QUANTIZATION}
    if not s.nested:
        return text
    vision = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
    # peers apply the INT4 scheme to the vision tower unless it is ignored by name
    ignore = [*QUANTIZATION["ignore"], "re:.*vision_tower.*", "re:.*mm_projector.*"]
    text = {**text, "model_type": "kimi_k2", "quantization_config": {**QUANTIZATION, "ignore": ignore}}
    return {
        "architectures": ["KimiK25ForConditionalGeneration"], **special_ids(s), "dtype": "bfloat16",
        "media_placeholder_token_id": s.first_special + 21, "model_type": "kimi_k25", "text_config": text,
        "tie_word_embeddings": False, "vision_config": vision,
    }  # fmt: skip


def text_config(s: TinyTarget) -> dict[str, Any]:
    return {
        "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        **special_ids(s), "dtype": "bfloat16", "first_k_dense_replace": s.dense_layers, "hidden_act": "silu",
        "hidden_size": s.hidden, "initializer_range": 0.02, "intermediate_size": s.dense_width,
        "kv_lora_rank": s.kv_rank, "max_position_embeddings": s.positions, "model_type": "deepseek_v3",
        "moe_intermediate_size": s.expert_width, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": s.experts,
        "n_shared_experts": s.shared_experts, "norm_topk_prob": s.norm_topk, "num_attention_heads": s.heads,
        "num_experts_per_tok": s.top_k, "num_hidden_layers": s.layers, "num_key_value_heads": s.heads,
        "num_nextn_predict_layers": 0, "q_lora_rank": s.q_rank, "qk_nope_head_dim": s.nope,
        "qk_rope_head_dim": s.rope, "rms_norm_eps": s.eps,
        "rope_scaling": {
            "beta_fast": s.beta_fast, "beta_slow": s.beta_slow, "factor": s.yarn_factor, "mscale": 1.0,
            "mscale_all_dim": 1.0, "original_max_position_embeddings": s.yarn_original, "type": "yarn",
        },
        "rope_theta": s.theta, "routed_scaling_factor": s.routed_scale, "scoring_func": "sigmoid",
        "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc", "v_head_dim": s.value,
        "vocab_size": s.vocab,
    }  # fmt: skip


def write_vocabulary(folder: Path, vocab: int) -> None:
    """tiktoken.model: the 256 bytes, then letter strings up to `vocab` - 256 ranks; 256 special ids on top."""
    ranks = vocab - SPECIALS
    strings = ("".join(t) for n in itertools.count(2) for t in itertools.product(string.ascii_lowercase, repeat=n))
    tokens = [bytes([i]) for i in range(256)]
    tokens += [text.encode() for text in itertools.islice(strings, ranks - 256)]
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens[:ranks])]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tiktoken.model").write_text("".join(lines))
    added = {
        str(ranks + offset): {
            "content": content, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False,
            "special": offset not in NOT_SPECIAL,
        }
        for offset, content in NAMED_SPECIALS.items()
    }  # fmt: skip
    write_json(
        folder / "tokenizer_config.json",
        {
            "added_tokens_decoder": added, "bos_token": "[BOS]", "eos_token": "[EOS]", "pad_token": "[PAD]",
            "unk_token": "[UNK]", "clean_up_tokenization_spaces": False, "tokenizer_class": "TikTokenTokenizer",
        },
    )  # fmt: skip


def write_drafter(folder: Path, target: TinyTarget, s: TinyDrafter, seed: int = 1) -> None:
    """A DFlash drafter for `target`: config.json and one safetensors file."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = dict(drafter_tensors(target, s, torch.Generator().manual_seed(seed)))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", drafter_config(target, s))


def drafter_tensors(t: TinyTarget, s: TinyDrafter, g: torch.Generator) -> Iterator[tuple[str, torch.Tensor]]:
    q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
    yield "fc.weight", matrix(g, t.hidden, len(s.feature_layers) * t.hidden)
    for name in ("hidden_norm", "norm"):
        yield f"{name}.weight", norm(g, t.hidden)
    for i in range(s.layers):
        base = f"layers.{i}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{base}{name}.weight", norm(g, t.hidden)
        for name, rows in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
            yield f"{base}self_attn.{name}.weight", matrix(g, rows, t.hidden, gain=2.0)
        yield f"{base}self_attn.o_proj.weight", matrix(g, t.hidden, q)
        for name in ("q_norm", "k_norm"):
            yield f"{base}self_attn.{name}.weight", norm(g, s.head_dim)
        yield from mlp_tensors(f"{base}mlp.", s.width, t, g)


def drafter_config(t: TinyTarget, s: TinyDrafter) -> dict[str, Any]:
    return {
        "architectures": ["DFlashDraftModel"], "attention_bias": False, "attention_dropout": 0.0,
        "block_size": s.block, **special_ids(t),
        "dflash_config": {
            "block_size": s.block, "mask_token_id": t.vocab - 2, "num_target_layers": t.layers,
            "target_layer_ids": list(s.feature_layers),
        },
        "dtype": "bfloat16", "head_dim": s.head_dim, "hidden_act": "silu", "hidden_size": t.hidden,
        "initializer_range": 0.02, "intermediate_size": s.width, "layer_types": list(s.layer_types),
        "max_position_embeddings": t.positions, "max_window_layers": 0, "model_type": "qwen3",
        "num_attention_heads": s.heads, "num_hidden_layers": s.layers, "num_key_value_heads": s.kv_heads,
        "num_target_layers": t.layers, "rms_norm_eps": s.eps, "rope_scaling": s.rope_scaling, "rope_theta": s.theta,
        "sliding_window": s.window, "tie_word_embeddings": False, "use_cache": True, "use_sliding_window": True,
        "vocab_size": t.vocab,
    }  # fmt: skip
