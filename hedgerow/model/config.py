"""config.json of a target (K2 family), read into frozen dataclasses.

Sources: the published config.json of Kimi-K2, K2-Thinking, K2.5 and K2.6 (nested in `text_config` from K2.5 on). A
field that changes the arithmetic and has no default there has none here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from hedgerow.model.fields import Fields
from hedgerow.model.quantization import scheme

# Every tensor of every layer and expert is looked for, by name: more than this is a mistake, and would take for ever.
MOST_LAYERS, MOST_EXPERTS, MOST_OF_ALL_LAYERS = 1000, 4096, 1 << 17  # K2.6 has 61 layers of 384, 23,424 of them
MOST_POSITIONS = 1 << 22  # the rotary tables have a row for each; K2.6 has 262,144


@dataclass(frozen=True)
class Yarn:
    """YaRN scaling of the rotary frequencies (arXiv 2309.00071), in DeepSeek's form where `mscale_all_dim` is set."""

    factor: float
    beta_fast: float
    beta_slow: float
    original: int  # positions the model was trained on before scaling
    mscale: float
    mscale_all_dim: float
    attention_factor: float | None  # explicit amplitude of cos and sin

    @property
    def amplitude(self) -> float:
        """What multiplies cos and sin: m(mscale) / m(mscale_all_dim) where both are set, m(1) otherwise."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self.m(self.mscale) / self.m(self.mscale_all_dim)
        return self.m(1.0)

    def m(self, scale: float) -> float:
        """0.1 * scale * ln(factor) + 1: how much longer contexts flatten the attention."""
        return 0.1 * scale * math.log(self.factor) + 1 if self.factor > 1 else 1.0


@dataclass(frozen=True)
class Rope:
    """Rotary embedding: base and, where the config scales it, YaRN."""

    theta: float
    yarn: Yarn | None

    @classmethod
    def from_fields(cls, fields: Fields) -> Rope:
        """Reads `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (before)."""
        inner = fields.inner("rope_parameters") or fields.inner("rope_scaling")
        if inner is None:
            return cls(fields.above(1, "rope_theta"), None)
        theta = (inner if "rope_theta" in inner.values else fields).above(1, "rope_theta")
        key = "rope_type" if "rope_type" in inner.values else "type"
        kind = inner.get(key, str)
        if kind == "default":
            return cls(theta, None)
        if kind != "yarn":
            raise inner.fail(key, "only 'default' and 'yarn' are supported")
        explicit = inner.get("attention_factor", float) if inner.values.get("attention_factor") is not None else None
        for name, least in (("factor", 1.0), ("mscale", 0.0), ("mscale_all_dim", 0.0)):
            if not inner.get(name, float, least) >= least:
                raise inner.fail(name, f"must be at least {least:g}")
        return cls(
            theta,
            Yarn(
                factor=inner.get("factor", float),
                beta_fast=inner.above(0, "beta_fast", 32.0),
                beta_slow=inner.above(0, "beta_slow", 1.0),
                original=inner.size("original_max_position_embeddings"),
                mscale=inner.get("mscale", float, 0.0),
                mscale_all_dim=inner.get("mscale_all_dim", float, 0.0),
                attention_factor=explicit,
            ),
        )


@dataclass(frozen=True)
class K2Config:
    """A K2-family text model. Names are those of the published config.json."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    first_k_dense_replace: int
    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: Rope
    eos_token_ids: tuple[int, ...]  # config.json's and generation_config.json's together
    int4_experts: bool  # routed experts as compressed-tensors words; False: plain weights
    fp8: bool  # matrices may be FP8, with a scale for each block of 128 x 128
    num_nextn_predict_layers: int = 0  # layers behind the others, which predict a token more: never read here

    @classmethod
    def from_folder(cls, folder: Path) -> K2Config:
        """Raises ConfigError with file and field."""
        top = Fields.read(folder / "config.json")
        f = top.inner("text_config") or top
        check_supported(f)
        stored = scheme(f.inner("quantization_config") or top.inner("quantization_config"))
        config = cls(
            vocab_size=f.size("vocab_size"),
            hidden_size=f.size("hidden_size"),
            num_hidden_layers=f.size("num_hidden_layers", most=MOST_LAYERS),
            first_k_dense_replace=f.get("first_k_dense_replace", int),
            intermediate_size=f.size("intermediate_size"),
            moe_intermediate_size=f.size("moe_intermediate_size"),
            n_routed_experts=f.size("n_routed_experts", most=MOST_EXPERTS),
            n_shared_experts=f.size("n_shared_experts"),
            num_experts_per_tok=f.size("num_experts_per_tok"),
            norm_topk_prob=f.get("norm_topk_prob", bool),
            routed_scaling_factor=f.get("routed_scaling_factor", float),
            num_attention_heads=f.size("num_attention_heads"),
            q_lora_rank=f.size("q_lora_rank"),
            kv_lora_rank=f.size("kv_lora_rank"),
            qk_nope_head_dim=f.size("qk_nope_head_dim"),
            qk_rope_head_dim=f.size("qk_rope_head_dim"),
            v_head_dim=f.size("v_head_dim"),
            rms_norm_eps=f.above(0, "rms_norm_eps"),
            max_position_embeddings=f.size("max_position_embeddings", most=MOST_POSITIONS),
            rope=Rope.from_fields(f),
            eos_token_ids=end_tokens(folder, top, f, f.size("vocab_size")),
            int4_experts=stored == "int4",
            fp8=stored == "fp8",
            num_nextn_predict_layers=f.get("num_nextn_predict_layers", int, 0),
        )
        if config.first_k_dense_replace < 0:
            raise f.fail("first_k_dense_replace", "must be at least 0")
        if config.num_experts_per_tok > config.n_routed_experts:
            raise f.fail("num_experts_per_tok", f"at most n_routed_experts, {config.n_routed_experts}")
        if config.n_routed_experts * config.num_hidden_layers > MOST_OF_ALL_LAYERS:
            most = MOST_OF_ALL_LAYERS // config.num_hidden_layers
            raise f.fail("n_routed_experts", f"at most {most} in each of {config.num_hidden_layers} layers")
        if config.qk_rope_head_dim % 2:
            raise f.fail("qk_rope_head_dim", "must be even")
        return config

    @property
    def latent_width(self) -> int:
        """Values cached for a token and layer: the normed latent and the rotated key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """(nope + rope)^-1/2 * m^2 with m = 0.1 * mscale_all_dim * ln(factor) + 1."""
        yarn = self.rope.yarn
        m = yarn.m(yarn.mscale_all_dim) if yarn is not None and yarn.mscale_all_dim else 1.0
        return float((self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5 * m * m)


def check_supported(f: Fields) -> None:
    """Refuses variants of the architecture for which there is no code here."""
    f.must_be("hidden_act", "silu", "silu")
    f.must_be("scoring_func", "sigmoid", "sigmoid")
    f.must_be("topk_method", "noaux_tc", "noaux_tc")
    f.must_be("n_group", 1, 1)
    f.must_be("topk_group", 1, 1)
    f.must_be("moe_layer_freq", 1, 1)
    f.must_be("attention_bias", False, False)
    f.must_be("tie_word_embeddings", False, False)
    f.must_be("rope_interleave", True, True)


def end_tokens(folder: Path, top: Fields, text: Fields, vocab: int) -> tuple[int, ...]:
    """Every end token that the checkpoint names: K2.5's config.json has another one than its chat template."""
    generation, found = folder / "generation_config.json", set[int]()
    for f in (top, text, *([Fields.read(generation)] if generation.exists() else ())):
        ids = f.integers("eos_token_id")
        if any(not 0 <= token < vocab for token in ids):
            raise f.fail("eos_token_id", f"within the vocabulary of {vocab}")
        found |= set(ids)
    return tuple(sorted(found))
