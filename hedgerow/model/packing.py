"""A checkpoint's matrices in the layouts of the compiled engine (kernels/cpu/engine.h)."""

from __future__ import annotations

from pathlib import Path

import torch

from hedgerow.model.config import K2Config
from hedgerow.model.fields import ConfigError
from hedgerow.model.loader import Checkpoint, PackedWeight
from kernels.cpu.library import BF16, F32, Q4, Layer, Matrix

PANEL = 16  # columns that lie side by side


class Packer:
    """Packs weights and keeps the memory that the engine's structures point into."""

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        self.kept: list[torch.Tensor] = []

    def keep(self, tensor: torch.Tensor) -> int:
        """Its address, valid as long as this lives."""
        self.kept.append(tensor.contiguous())
        return self.kept[-1].data_ptr()

    def matrix(self, weight: torch.Tensor, part: int | None = None) -> Matrix:
        """weight [N, K] float32, as bfloat16 where that loses nothing. Products take multiples of `part` columns."""
        n, k = weight.shape
        if (part or n) % (2 * self.lanes) == 0 and n % (2 * self.lanes) == 0:
            narrow = weight.bfloat16()
            if torch.equal(narrow.float(), weight):
                return Matrix(BF16, k, n, 0, self.keep(paired(narrow, self.lanes)), None)
        return Matrix(F32, k, n, 0, self.keep(panels(weight)), None)

    def int4(self, weights: list[PackedWeight]) -> Matrix:
        """The matrices [N, K] under one another."""
        words = torch.cat([panels(w.words) for w in weights])
        scales = torch.cat([panels(w.scales) for w in weights])
        n, k = len(words) * PANEL, words.shape[1] * 8
        return Matrix(Q4, k, n, 0, self.keep(words), self.keep(scales))


def panels(weight: torch.Tensor) -> torch.Tensor:
    """[N, K] -> [N/16, K, 16]"""
    parts: torch.Tensor = weight.unflatten(0, (-1, PANEL))
    return parts.mT.contiguous()


def paired(weight: torch.Tensor, lanes: int) -> torch.Tensor:
    """bfloat16 [N, K] -> [N / 2 lanes, K, lanes, 2]: columns n and n + lanes share a word"""
    parts: torch.Tensor = weight.unflatten(0, (-1, 2, lanes))
    return parts.permute(0, 3, 2, 1).contiguous()


def in_turn(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """[N, K] twice -> [2 N, K]: 16 rows of each in turn"""
    return torch.stack([gate.unflatten(0, (-1, PANEL)), up.unflatten(0, (-1, PANEL))], 1).flatten(0, 2)


def check_sizes(c: K2Config, file: Path) -> None:
    """Raises ConfigError for a size that the engine does not take."""
    multiples = {
        "hidden_size": 32 if c.int4_experts else PANEL, "vocab_size": PANEL, "q_lora_rank": PANEL,
        "kv_lora_rank": PANEL, "qk_rope_head_dim": PANEL, "v_head_dim": PANEL, "intermediate_size": PANEL,
        "moe_intermediate_size": 32 if c.int4_experts else PANEL,
    }  # fmt: skip
    for name, unit in multiples.items():
        if getattr(c, name) % unit:
            raise ConfigError(file, name, getattr(c, name), f"a multiple of {unit}, for the compiled engine")
    if (c.qk_nope_head_dim + c.qk_rope_head_dim) % PANEL:
        limit = f"a multiple of {PANEL} together with qk_rope_head_dim, for the compiled engine"
        raise ConfigError(file, "qk_nope_head_dim", c.qk_nope_head_dim, limit)


def pack_layer(p: Packer, checkpoint: Checkpoint, number: int, c: K2Config) -> Layer:
    base = f"model.layers.{number}."
    layer = Layer(
        attention_norm=p.keep(checkpoint.weight(base + "input_layernorm.weight", c.hidden_size)),
        mlp_norm=p.keep(checkpoint.weight(base + "post_attention_layernorm.weight", c.hidden_size)),
    )
    pack_attention(layer, p, checkpoint, base + "self_attn.", c)
    if number < c.first_k_dense_replace:
        pack_dense(layer, p, checkpoint, base + "mlp.", c.intermediate_size, c.hidden_size)
    else:
        width = c.moe_intermediate_size * c.n_shared_experts
        pack_dense(layer, p, checkpoint, base + "mlp.shared_experts.", width, c.hidden_size)
        pack_experts(layer, p, checkpoint, base + "mlp.", c)
    return layer


def pack_attention(layer: Layer, p: Packer, checkpoint: Checkpoint, base: str, c: K2Config) -> None:
    heads, nope, rope, value = c.num_attention_heads, c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim
    q_a = checkpoint.weight(base + "q_a_proj.weight", c.q_lora_rank, c.hidden_size)
    kv_a = checkpoint.weight(base + "kv_a_proj_with_mqa.weight", c.latent_width, c.hidden_size)
    kv_b = checkpoint.weight(base + "kv_b_proj.weight", heads * (nope + value), c.kv_lora_rank)
    uk, uv = kv_b.view(heads // checkpoint.share.ranks, nope + value, c.kv_lora_rank).split([nope, value], 1)
    layer.q_norm = p.keep(checkpoint.weight(base + "q_a_layernorm.weight", c.q_lora_rank))
    layer.kv_norm = p.keep(checkpoint.weight(base + "kv_a_layernorm.weight", c.kv_lora_rank))
    layer.qkv_a = p.matrix(torch.cat([q_a, kv_a]))
    q_b = checkpoint.weight(base + "q_b_proj.weight", heads * (nope + rope), c.q_lora_rank)
    layer.q_b = p.matrix(q_b, nope + rope)
    layer.uk = p.matrix(uk.mT.flatten(0, 1), c.kv_lora_rank)
    layer.uv = p.matrix(uv.flatten(0, 1), value)
    layer.o = p.matrix(checkpoint.weight(base + "o_proj.weight", c.hidden_size, heads * value))


def pack_dense(layer: Layer, p: Packer, checkpoint: Checkpoint, base: str, width: int, hidden: int) -> None:
    gate, up = (checkpoint.weight(f"{base}{name}.weight", width, hidden) for name in ("gate_proj", "up_proj"))
    layer.gate_up = p.matrix(in_turn(gate, up))
    layer.down = p.matrix(checkpoint.weight(f"{base}down_proj.weight", hidden, width))


def pack_experts(layer: Layer, p: Packer, checkpoint: Checkpoint, base: str, c: K2Config) -> None:
    hidden, width, count = c.hidden_size, c.moe_intermediate_size, c.n_routed_experts
    padding = -count % PANEL
    router = checkpoint.weight(base + "gate.weight", count, hidden)
    layer.router = p.matrix(torch.cat([router, router.new_zeros(padding, hidden)]))
    bias = checkpoint.weight(base + "gate.e_score_correction_bias", count)
    layer.bias = p.keep(torch.cat([bias, bias.new_zeros(padding)]))
    sizes = {"gate_proj": (width, hidden), "up_proj": (width, hidden), "down_proj": (hidden, width)}
    if c.int4_experts:
        gate_up, down = [], []
        for e in range(count):
            gate, up, out = (checkpoint.packed(f"{base}experts.{e}.{name}", *size) for name, size in sizes.items())
            gate_up.append(PackedWeight(in_turn(gate.words, up.words), in_turn(gate.scales, up.scales)))
            down.append(out)
        layer.experts_gate_up, layer.experts_down = p.int4(gate_up), p.int4(down)
        return
    plain = [
        [checkpoint.weight(f"{base}experts.{e}.{name}.weight", *size) for name, size in sizes.items()]
        for e in range(count)
    ]
    layer.experts_gate_up = p.matrix(
        torch.cat([in_turn(gate, up) for gate, up, _ in plain]), 2 * width // checkpoint.share.ranks
    )
    layer.experts_down = p.matrix(torch.cat([out for _, _, out in plain]), hidden)
