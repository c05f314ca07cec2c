"""The published layouts of the K2 family: config.json of each member at any sizes, and what lies in which shard.

Fields, names, shapes, types and the division into shards are those of moonshotai's K2-Instruct (FP8), K2-Thinking,
K2.5 and K2.6 as they are public: layer L in shard L + 1, then embedding, norm and head, then the projector and the
vision tower of the last two. Sizes can be made smaller; then the same names have smaller shapes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from hedgerow.weights.writing import Shape

Member = Literal["k2-instruct", "k2-thinking", "k2.5", "k2.6"]
MEMBERS: tuple[Member, ...] = ("k2-instruct", "k2-thinking", "k2.5", "k2.6")
SPECIALS = 256  # at the end of the vocabulary
END, IM_END, MEDIA_PAD, PAD = 1, 2, 21, 255  # offsets among them


class Traits(NamedTuple):
    """In what the members' configurations differ."""

    nested: bool
    fp8: bool
    positions: int
    factor: float
    beta_fast: float
    eps: float
    end: int


TRAITS: dict[Member, Traits] = {
    "k2-instruct": Traits(False, True, 131072, 32.0, 1.0, 1e-6, IM_END),
    "k2-thinking": Traits(False, False, 262144, 64.0, 1.0, 1e-5, IM_END),
    "k2.5": Traits(True, False, 262144, 64.0, 32.0, 1e-5, END),
    "k2.6": Traits(True, False, 262144, 64.0, 32.0, 1e-5, IM_END),
}


@dataclass(frozen=True)
class Sizes:
    """The defaults are the true ones."""

    vocab: int = 163840
    hidden: int = 7168
    layers: int = 61
    dense_layers: int = 1
    dense_width: int = 18432
    width: int = 2048
    experts: int = 384
    top_k: int = 8
    shared_experts: int = 1
    heads: int = 64
    q_rank: int = 1536
    kv_rank: int = 512
    nope: int = 128
    rope: int = 64
    value: int = 128
    vision_hidden: int = 1152
    vision_width: int = 4304
    vision_layers: int = 27
    vision_heads: int = 16
    vision_grid: int = 64  # positions a side


TRUE = Sizes()
ONE_LAYER = replace(TRUE, layers=1, dense_layers=0, vision_layers=1)
# All 61 layers; eight ranks can share it, and GPUs have code for it. FP8 of blocks of 128 needs wider heads and experts
# to be shared, and whole blocks of latents for Hugging Face to load it: GPUs have no code for those.
MINI = Sizes(
    hidden=128, dense_width=512, width=256, experts=16, top_k=4, heads=8, q_rank=64, kv_rank=128, nope=32, rope=32,
    value=32, vision_hidden=32, vision_width=64, vision_layers=1, vision_heads=2, vision_grid=4,
)  # fmt: skip
MINI_FP8 = replace(
    MINI, hidden=256, dense_width=1024, width=1024, experts=4, top_k=2, heads=16, q_rank=128, kv_rank=64, nope=128,
    rope=64, value=128,
)  # fmt: skip


def config(member: Member, s: Sizes) -> dict[str, Any]:
    """config.json."""
    t, first = TRAITS[member], s.vocab - SPECIALS
    ids = {"bos_token_id": first, "eos_token_id": first + t.end, "pad_token_id": first + PAD}
    text = {**text_config(s, t), **ids, "quantization_config": FP8 if t.fp8 else INT4}
    if not t.nested:
        return text
    return {
        "architectures": ["KimiK25ForConditionalGeneration"], **ids, "dtype": "bfloat16", "ignore_index": -100,
        "media_placeholder_token_id": first + MEDIA_PAD, "model_type": "kimi_k25", "text_config": text,
        "tie_word_embeddings": False, "use_unified_vision_chunk": True,
        "video_placeholder": "<|kimi_k25_video_placeholder|>", "vision_config": vision_config(s),
    }  # fmt: skip


def text_config(s: Sizes, t: Traits) -> dict[str, Any]:
    return {
        "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "aux_loss_alpha": 0.001, "dtype": "bfloat16", "ep_size": 1, "first_k_dense_replace": s.dense_layers,
        "hidden_act": "silu", "hidden_size": s.hidden, "initializer_range": 0.02, "intermediate_size": s.dense_width,
        "kv_lora_rank": s.kv_rank, "max_position_embeddings": t.positions, "model_type": "kimi_k2",
        "moe_intermediate_size": s.width, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": s.experts,
        "n_shared_experts": s.shared_experts, "norm_topk_prob": True, "num_attention_heads": s.heads,
        "num_experts_per_tok": s.top_k, "num_hidden_layers": s.layers, "num_key_value_heads": s.heads,
        "num_nextn_predict_layers": 0, "pretraining_tp": 1, "q_lora_rank": s.q_rank, "qk_nope_head_dim": s.nope,
        "qk_rope_head_dim": s.rope, "rms_norm_eps": t.eps,
        "rope_scaling": {
            "beta_fast": t.beta_fast, "beta_slow": 1.0, "factor": t.factor, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "type": "yarn",
        },
        "rope_theta": 50000.0, "routed_scaling_factor": 2.827, "scoring_func": "sigmoid", "seq_aux": True,
        "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc", "use_cache": True,
        "v_head_dim": s.value, "vocab_size": s.vocab,
    }  # fmt: skip


def vision_config(s: Sizes) -> dict[str, Any]:
    return {
        "init_pos_emb_height": s.vision_grid, "init_pos_emb_time": 4, "init_pos_emb_width": s.vision_grid,
        "merge_kernel_size": [2, 2], "merge_type": "sd2_tpool", "mm_hidden_size": s.vision_hidden,
        "mm_projector_type": "patchmerger", "patch_size": 14, "pos_emb_type": "divided_fixed",
        "projector_hidden_act": "gelu", "projector_ln_eps": 1e-05, "text_hidden_size": s.hidden,
        "video_attn_type": "spatial_temporal", "vt_hidden_size": s.vision_hidden,
        "vt_intermediate_size": s.vision_width, "vt_num_attention_heads": s.vision_heads,
        "vt_num_hidden_layers": s.vision_layers,
    }  # fmt: skip


INT4: dict[str, Any] = {
    "config_groups": {
        "group_0": {
            "input_activations": None, "output_activations": None, "targets": ["Linear"],
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
FP8: dict[str, Any] = {
    "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
}  # fmt: skip


def projector(s: Sizes) -> Iterator[Shape]:
    """What brings images into the text model: never read here."""
    merged = 4 * s.vision_hidden
    for name, shape in {
        "pre_norm.bias": (s.vision_hidden,), "pre_norm.weight": (s.vision_hidden,), "proj.0.bias": (merged,),
        "proj.0.weight": (merged, merged), "proj.2.bias": (s.hidden,), "proj.2.weight": (s.hidden, merged),
    }.items():  # fmt: skip
        yield Shape(f"mm_projector.{name}", "BF16", shape)


def vision(s: Sizes) -> Iterator[Shape]:
    """The vision tower: never read here."""
    hidden, width = s.vision_hidden, s.vision_width
    block = {
        "mlp.fc0.bias": (width,), "mlp.fc0.weight": (width, hidden), "mlp.fc1.bias": (hidden,),
        "mlp.fc1.weight": (hidden, width), "norm0.bias": (hidden,), "norm0.weight": (hidden,), "norm1.bias": (hidden,),
        "norm1.weight": (hidden,), "wo.bias": (hidden,), "wo.weight": (hidden, hidden), "wqkv.bias": (3 * hidden,),
        "wqkv.weight": (3 * hidden, hidden),
    }  # fmt: skip
    for number in range(s.vision_layers):
        for name, shape in block.items():
            yield Shape(f"vision_tower.encoder.blocks.{number}.{name}", "BF16", shape)
    for name, shape in (("bias", (hidden,)), ("weight", (hidden,))):
        yield Shape(f"vision_tower.encoder.final_layernorm.{name}", "BF16", shape)
    yield Shape("vision_tower.patch_embed.pos_emb.weight", "BF16", (s.vision_grid, s.vision_grid, hidden))
    yield Shape("vision_tower.patch_embed.proj.bias", "BF16", (hidden,))
    yield Shape("vision_tower.patch_embed.proj.weight", "BF16", (hidden, 3, 14, 14))
