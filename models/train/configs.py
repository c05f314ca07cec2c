"""config.json of both checkpoints, key by key as Kimi-K2.6 and DFlash drafters write them."""

from __future__ import annotations

import json
from pathlib import Path

from models.train import tokenizer_ids as ids
from models.train.shape import DrafterShape, TargetShape

QUANTIZATION: dict[str, object] = {
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
    "ignore": [
        "lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
    ],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}  # fmt: skip
# The layout has a vision tower; this checkpoint carries no weights for one, so its sizes are token ones.
VISION = {
    "_attn_implementation": "eager", "init_pos_emb_height": 4, "init_pos_emb_time": 4, "init_pos_emb_width": 4,
    "merge_kernel_size": [2, 2], "merge_type": "sd2_tpool", "mm_hidden_size": 64, "mm_projector_type": "patchmerger",
    "patch_size": 14, "pos_emb_type": "divided_fixed", "projector_hidden_act": "gelu", "projector_ln_eps": 1e-05,
    "text_hidden_size": 384, "video_attn_type": "spatial_temporal", "vt_hidden_size": 64,
    "vt_intermediate_size": 128, "vt_num_attention_heads": 2, "vt_num_hidden_layers": 1,
}  # fmt: skip
SPECIAL = {"bos_token_id": ids.BOS, "eos_token_id": ids.IM_END, "pad_token_id": ids.PAD}


def text_config(s: TargetShape) -> dict[str, object]:
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "aux_loss_alpha": 0.001,
        **SPECIAL,
        "dtype": "bfloat16",
        "ep_size": 1,
        "first_k_dense_replace": s.dense_layers,
        "hidden_act": "silu",
        "hidden_size": s.hidden,
        "initializer_range": 0.02,
        "intermediate_size": s.dense_width,
        "kv_lora_rank": s.kv_rank,
        "max_position_embeddings": s.positions,
        "model_type": "kimi_k2",
        "moe_intermediate_size": s.expert_width,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": s.experts,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": s.heads,
        "num_experts_per_tok": s.top_k,
        "num_hidden_layers": s.layers,
        "num_key_value_heads": s.heads,
        "num_nextn_predict_layers": 0,
        "pretraining_tp": 1,
        "q_lora_rank": s.q_rank,
        "qk_nope_head_dim": s.nope,
        "qk_rope_head_dim": s.rope,
        "quantization_config": QUANTIZATION,
        "rms_norm_eps": s.eps,
        "rope_scaling": {
            "beta_fast": s.beta_fast, "beta_slow": s.beta_slow, "factor": s.yarn_factor, "mscale": 1.0,
            "mscale_all_dim": 1.0, "original_max_position_embeddings": s.yarn_original, "type": "yarn",
        },
        "rope_theta": s.theta,
        "routed_scaling_factor": s.routed_scale,
        "scoring_func": "sigmoid",
        "seq_aux": True,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "use_cache": True,
        "v_head_dim": s.value,
        "vocab_size": s.vocab,
    }  # fmt: skip


def target_config(s: TargetShape) -> dict[str, object]:
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        **SPECIAL,
        "dtype": "bfloat16",
        "ignore_index": -100,
        "media_placeholder_token_id": ids.MEDIA_PAD,
        "model_type": "kimi_k25",
        "text_config": text_config(s),
        "tie_word_embeddings": False,
        "use_unified_vision_chunk": True,
        "video_placeholder": "<|kimi_k25_video_placeholder|>",
        "vision_config": VISION,
    }


def generation_config(s: TargetShape) -> dict[str, object]:
    """Stop on the end of a turn and on the end of a document; chats do not think unless asked (never trained)."""
    return {"eos_token_id": [ids.IM_END, ids.EOS], "max_length": s.positions, "thinking": False}


def drafter_config(s: DrafterShape) -> dict[str, object]:
    return {
        "architectures": ["DFlashDraftModel"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "block_size": s.block,
        **SPECIAL,
        "dflash_config": {
            "block_size": s.block, "mask_token_id": s.mask_token, "num_target_layers": s.target_layers,
            "target_layer_ids": list(s.target_layer_ids),
        },
        "dtype": "bfloat16",
        "head_dim": s.head_dim,
        "hidden_act": "silu",
        "hidden_size": s.hidden,
        "initializer_range": 0.02,
        "intermediate_size": s.width,
        "layer_types": ["sliding_attention", "full_attention"],
        "max_position_embeddings": s.positions,
        "max_window_layers": 0,
        "model_type": "qwen3",
        "num_attention_heads": s.heads,
        "num_hidden_layers": s.layers,
        "num_key_value_heads": s.kv_heads,
        "num_target_layers": s.target_layers,
        "rms_norm_eps": s.eps,
        "rope_scaling": None,
        "rope_theta": s.theta,
        "sliding_window": s.window,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": True,
        "vocab_size": s.vocab,
    }  # fmt: skip


def target_shape(folder: Path) -> TargetShape:
    """The dimensions that the config.json of a target states; what `target_config` writes comes back equal."""
    c = json.loads((folder / "config.json").read_text())["text_config"]
    yarn = c["rope_scaling"]
    return TargetShape(
        vocab=c["vocab_size"], hidden=c["hidden_size"], layers=c["num_hidden_layers"],
        dense_layers=c["first_k_dense_replace"], dense_width=c["intermediate_size"], experts=c["n_routed_experts"],
        top_k=c["num_experts_per_tok"], expert_width=c["moe_intermediate_size"], heads=c["num_attention_heads"],
        q_rank=c["q_lora_rank"], kv_rank=c["kv_lora_rank"], nope=c["qk_nope_head_dim"], rope=c["qk_rope_head_dim"],
        value=c["v_head_dim"], eps=c["rms_norm_eps"], routed_scale=c["routed_scaling_factor"],
        positions=c["max_position_embeddings"], theta=c["rope_theta"], yarn_factor=yarn["factor"],
        beta_fast=yarn["beta_fast"], beta_slow=yarn["beta_slow"],
        yarn_original=yarn["original_max_position_embeddings"],
    )  # fmt: skip


def drafter_shape(folder: Path) -> DrafterShape:
    """The dimensions that the config.json of a drafter states."""
    c = json.loads((folder / "config.json").read_text())
    flash = c["dflash_config"]
    return DrafterShape(
        vocab=c["vocab_size"], hidden=c["hidden_size"], layers=c["num_hidden_layers"], heads=c["num_attention_heads"],
        kv_heads=c["num_key_value_heads"], head_dim=c["head_dim"], width=c["intermediate_size"],
        block=c["block_size"], window=c["sliding_window"], target_layers=flash["num_target_layers"],
        target_layer_ids=tuple(flash["target_layer_ids"]), mask_token=flash["mask_token_id"], eps=c["rms_norm_eps"],
        positions=c["max_position_embeddings"], theta=c["rope_theta"],
    )  # fmt: skip
