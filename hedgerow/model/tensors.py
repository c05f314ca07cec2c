"""The tensors of a K2-family text model by name, and how tensor parallelism divides each of them.

Names, shapes and types are those of the published checkpoints of K2-Instruct (FP8), K2-Thinking, K2.5 and K2.6 (INT4);
names are without the prefix `language_model.` of the last two. Attention is divided by heads, feed-forward blocks by
their inner width, embedding and head by the vocabulary; norms, router, q_a and kv_a are on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hedgerow.errors import InvalidRequest
from hedgerow.model.config import K2Config

GROUP = 32  # INT4 weights that share a scale
BLOCK = 128  # rows and columns of an FP8 block that shares one
DENSE = ("BF16", "F16", "F32")
FP8 = "F8_E4M3"
ROWS, COLUMNS = 0, 1
# Which axis of a matrix is divided; what is not named is on every rank.
AXES = {
    "embed_tokens": ROWS, "lm_head": ROWS, "q_b_proj": ROWS, "kv_b_proj": ROWS, "o_proj": COLUMNS, "gate_proj": ROWS,
    "up_proj": ROWS, "down_proj": COLUMNS,
}  # fmt: skip


class Share(NamedTuple):
    """Rank `rank` of `ranks`."""

    rank: int = 0
    ranks: int = 1

    def check(self) -> None:
        """Raises InvalidRequest for a rank that there is not."""
        if self.ranks < 1 or not 0 <= self.rank < self.ranks:
            raise InvalidRequest("rank", f"{self.rank} of {self.ranks}", "a rank of 0 .. ranks - 1")

    def of(self, size: int) -> range:
        """What this rank has of a size that divides."""
        part = size // self.ranks
        return range(self.rank * part, (self.rank + 1) * part)


WHOLE = Share()


class Wanted(NamedTuple):
    """A tensor that the model reads."""

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[str, ...]  # allowed, by the format's names; the first is the published one
    axis: int | None  # which one is divided between ranks
    unit: int = 1  # a rank's part of that axis is a multiple of this

    def part(self, ranks: int) -> tuple[int, ...]:
        """The shape of one rank's part."""
        return tuple(size // ranks if axis == self.axis else size for axis, size in enumerate(self.shape))


def axis_of(name: str) -> int | None:
    """Which axis of this tensor is divided; its scales and packed words are divided as it is."""
    parts = name.split(".")
    return AXES.get(parts[-2]) if len(parts) > 1 and parts[-1] != "weight_shape" else None


def scale_name(name: str) -> str:
    """Of the FP8 matrix `name`.weight."""
    return f"{name}_scale_inv"


def scale_shape(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.ceil(size / BLOCK) for size in shape)


def tensors(c: K2Config) -> Iterator[Wanted]:
    """All of them, embedding first, layer by layer. FP8 scales are listed beside every matrix that may be FP8."""
    yield matrix("model.embed_tokens", c.vocab_size, c.hidden_size)
    for number in range(c.num_hidden_layers):
        yield from layer(c, number)
    yield from last(c)


def last(c: K2Config) -> Iterator[Wanted]:
    """What follows the layers."""
    yield vector("model.norm", c.hidden_size)
    yield matrix("lm_head", c.vocab_size, c.hidden_size)


def layer(c: K2Config, number: int) -> Iterator[Wanted]:
    """One decoder layer: attention, then a dense block or router, shared expert and experts."""
    base, hidden = f"model.layers.{number}.", c.hidden_size
    yield vector(base + "input_layernorm", hidden)
    yield from attention(c, base + "self_attn.")
    yield vector(base + "post_attention_layernorm", hidden)
    if number < c.first_k_dense_replace:
        yield from swiglu(base + "mlp.", c.intermediate_size, hidden, c.fp8)
        return
    yield from swiglu(base + "mlp.shared_experts.", c.moe_intermediate_size * c.n_shared_experts, hidden, c.fp8)
    yield matrix(base + "mlp.gate", c.n_routed_experts, hidden)
    yield Wanted(base + "mlp.gate.e_score_correction_bias", (c.n_routed_experts,), ("F32", "BF16", "F16"), None)
    for expert in range(c.n_routed_experts):
        name = f"{base}mlp.experts.{expert}."
        if c.int4_experts:
            yield from int4(name, c.moe_intermediate_size, hidden)
        else:
            yield from swiglu(name, c.moe_intermediate_size, hidden, c.fp8)


def attention(c: K2Config, base: str) -> Iterator[Wanted]:
    heads, nope, rope, value = c.num_attention_heads, c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim
    yield from quantisable(base + "q_a_proj", c.q_lora_rank, c.hidden_size, c.fp8)
    yield from quantisable(base + "kv_a_proj_with_mqa", c.latent_width, c.hidden_size, c.fp8)
    yield vector(base + "q_a_layernorm", c.q_lora_rank)
    yield vector(base + "kv_a_layernorm", c.kv_lora_rank)
    yield from quantisable(base + "q_b_proj", heads * (nope + rope), c.q_lora_rank, c.fp8, nope + rope)
    yield from quantisable(base + "kv_b_proj", heads * (nope + value), c.kv_lora_rank, c.fp8, nope + value)
    yield from quantisable(base + "o_proj", c.hidden_size, heads * value, c.fp8, value)


def swiglu(base: str, width: int, hidden: int, fp8: bool) -> Iterator[Wanted]:
    yield from quantisable(base + "gate_proj", width, hidden, fp8)
    yield from quantisable(base + "up_proj", width, hidden, fp8)
    yield from quantisable(base + "down_proj", hidden, width, fp8)


def int4(base: str, width: int, hidden: int) -> Iterator[Wanted]:
    """An expert in compressed-tensors' `pack-quantized`: eight codes a word along the columns, a scale a group."""
    for name, rows, columns in (
        ("gate_proj", width, hidden),
        ("up_proj", width, hidden),
        ("down_proj", hidden, width),
    ):
        axis = AXES[name]
        words = GROUP // 8 if axis == COLUMNS else 1
        yield Wanted(f"{base}{name}.weight_packed", (rows, columns // 8), ("I32",), axis, words)
        yield Wanted(f"{base}{name}.weight_scale", (rows, columns // GROUP), DENSE, axis)
        yield Wanted(f"{base}{name}.weight_shape", (2,), ("I32", "I64"), None)


def quantisable(name: str, rows: int, columns: int, fp8: bool, unit: int = 1) -> Iterator[Wanted]:
    """A matrix, and the scales of its blocks where the checkpoint's scheme is FP8."""
    if not fp8:
        yield matrix(name, rows, columns, unit)
        return
    axis = AXES.get(name.rsplit(".", 1)[-1])
    wanted = Wanted(f"{name}.weight", (rows, columns), (FP8, *DENSE), axis, math.lcm(unit, BLOCK))
    yield wanted
    yield Wanted(scale_name(wanted.name), scale_shape(wanted.shape), ("F32", "BF16"), axis)


def matrix(name: str, rows: int, columns: int, unit: int = 1) -> Wanted:
    return Wanted(f"{name}.weight", (rows, columns), DENSE, AXES.get(name.rsplit(".", 1)[-1]), unit)


def vector(name: str, size: int) -> Wanted:
    return Wanted(f"{name}.weight", (size,), DENSE, None)
