"""A checkpoint's matrices in the layouts of the compiled engine (kernels/cpu/engine.h)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from hedgerow.model.config import K2Config
from hedgerow.model.fields import ConfigError
from hedgerow.model.loader import Checkpoint, PackedWeight
from kernels.cpu.library import BF16, F32, Q4, Layer, Matrix

PANEL = 16  # columns that lie side by side
HEAD_ROWS = 2048  # of the head that are packed at once


class Packer:
    """Packs weights and keeps the memory that the engine's structures point into."""

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        self.kept: list[torch.Tensor] = []

    def keep(self, tensor: torch.Tensor) -> int:
        """Its address, valid as long as this lives."""
        self.kept.append(tensor.contiguous())
        return self.kept[-1].data_ptr()

    def table(self, weight: torch.Tensor) -> tuple[int, bool]:
        """The address of rows that are looked up, and whether they are bfloat16, not float32."""
        narrow = weight.dtype == torch.bfloat16
        return self.keep(weight if narrow else weight.float()), narrow

    def matrix(self, weight: torch.Tensor, part: int | None = None) -> Matrix:
        """weight [N, K], as bfloat16 where that loses nothing. Products take multiples of `part` columns."""
        n, k = weight.shape
        if self.pairs(n, part):
            narrow = weight.bfloat16()
            if weight.dtype == torch.bfloat16 or torch.equal(narrow.float(), weight):
                return Matrix(BF16, k, n, 0, self.keep(paired(narrow, self.lanes)), None)
        return Matrix(F32, k, n, 0, self.keep(panels(weight.float())), None)

    def pairs(self, n: int, part: int | None) -> bool:
        """Whether columns of a matrix can share words, wherever it may be cut."""
        return (part or n) % (2 * self.lanes) == 0 and n % (2 * self.lanes) == 0

    def stacked(self, weights: Callable[[], Iterator[torch.Tensor]], rows: int, part: int | None = None) -> Matrix:
        """Matrices [n, K] of `rows` rows under one another, packed one at a time where they are bfloat16; else all at
        once."""
        whole, at = torch.empty(0), 0
        for weight in weights():
            n, k = weight.shape
            if weight.dtype != torch.bfloat16 or not self.pairs(n, part):
                return self.matrix(torch.cat(list(weights())), part)
            if not at:
                whole = torch.empty(rows // (2 * self.lanes), k, self.lanes, 2, dtype=weight.dtype)
            whole[at : at + n // (2 * self.lanes)] = paired(weight, self.lanes)
            at += n // (2 * self.lanes)
        assert at == len(whole), (at, rows)
        return Matrix(BF16, whole.shape[1], rows, 0, self.keep(whole), None)


class Int4Stack:
    """Room for `count` INT4 matrices under one another, filled one by one."""

    def __init__(self, count: int) -> None:
        self.count, self.filled = count, 0
        self.words = self.scales = torch.empty(0)

    def add(self, weight: PackedWeight) -> None:
        words, scales = panels(weight.words), panels(weight.scales)
        if not self.filled:
            self.words = words.new_empty(self.count, *words.shape)
            self.scales = scales.new_empty(self.count, *scales.shape)
        self.words[self.filled], self.scales[self.filled] = words, scales
        self.filled += 1

    def matrix(self, p: Packer) -> Matrix:
        assert self.filled == self.count, (self.filled, self.count)
        n, k = self.count * self.words.shape[1] * PANEL, self.words.shape[2] * 8
        return Matrix(Q4, k, n, 0, p.keep(self.words), p.keep(self.scales))


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
    q_a = checkpoint.dense(base + "q_a_proj.weight", (c.q_lora_rank, c.hidden_size))
    kv_a = checkpoint.dense(base + "kv_a_proj_with_mqa.weight", (c.latent_width, c.hidden_size))
    kv_b = checkpoint.dense(base + "kv_b_proj.weight", (heads * (nope + value), c.kv_lora_rank))
    uk, uv = kv_b.view(heads // checkpoint.share.ranks, nope + value, c.kv_lora_rank).split([nope, value], 1)
    layer.q_norm = p.keep(checkpoint.weight(base + "q_a_layernorm.weight", c.q_lora_rank))
    layer.kv_norm = p.keep(checkpoint.weight(base + "kv_a_layernorm.weight", c.kv_lora_rank))
    layer.qkv_a = p.matrix(torch.cat([q_a, kv_a]))
    q_b = checkpoint.dense(base + "q_b_proj.weight", (heads * (nope + rope), c.q_lora_rank))
    layer.q_b = p.matrix(q_b, nope + rope)
    layer.uk = p.matrix(uk.mT.flatten(0, 1), c.kv_lora_rank)
    layer.uv = p.matrix(uv.flatten(0, 1), value)
    layer.o = p.matrix(checkpoint.dense(base + "o_proj.weight", (c.hidden_size, heads * value)))


def pack_dense(layer: Layer, p: Packer, checkpoint: Checkpoint, base: str, width: int, hidden: int) -> None:
    gate, up = (checkpoint.dense(f"{base}{name}.weight", (width, hidden)) for name in ("gate_proj", "up_proj"))
    layer.gate_up = p.matrix(in_turn(gate, up))
    layer.down = p.matrix(checkpoint.dense(f"{base}down_proj.weight", (hidden, width)))


def pack_experts(layer: Layer, p: Packer, checkpoint: Checkpoint, base: str, c: K2Config) -> None:
    hidden, width, count = c.hidden_size, c.moe_intermediate_size, c.n_routed_experts
    padding = -count % PANEL
    router = checkpoint.dense(base + "gate.weight", (count, hidden))
    layer.router = p.matrix(torch.cat([router, router.new_zeros(padding, hidden)]))
    bias = checkpoint.weight(base + "gate.e_score_correction_bias", count)
    layer.bias = p.keep(torch.cat([bias, bias.new_zeros(padding)]))
    sizes = {"gate_proj": (width, hidden), "up_proj": (width, hidden), "down_proj": (hidden, width)}
    if c.int4_experts:
        gate_up, down = Int4Stack(count), Int4Stack(count)
        for e in range(count):
            gate, up, out = (checkpoint.packed(f"{base}experts.{e}.{name}", *size) for name, size in sizes.items())
            gate_up.add(PackedWeight(in_turn(gate.words, up.words), in_turn(gate.scales, up.scales)))
            down.add(out)
        layer.experts_gate_up, layer.experts_down = gate_up.matrix(p), down.matrix(p)
        return

    held = width // checkpoint.share.ranks

    def plain(name: str) -> Iterator[torch.Tensor]:
        return (checkpoint.dense(f"{base}experts.{e}.{name}.weight", sizes[name]) for e in range(count))

    def gates() -> Iterator[torch.Tensor]:
        return (in_turn(gate, up) for gate, up in zip(plain("gate_proj"), plain("up_proj"), strict=True))

    layer.experts_gate_up = p.stacked(gates, count * 2 * held, 2 * held)
    layer.experts_down = p.stacked(lambda: plain("down_proj"), count * hidden, hidden)
