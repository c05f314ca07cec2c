"""One pass of a DFlash drafter on a GPU over fixed buffers: features into contexts, then the sequences' blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from hedgerow.model.draft_config import DraftConfig
from hedgerow.model.cuda_weights import Reader
from kernels.gpu.add_rmsnorm import add_rmsnorm
from kernels.gpu.draft_block import draft_attention, draft_rows
from kernels.gpu.linear import linear
from kernels.gpu.silu_mul import silu_mul

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True)
class CudaDraftLayer:
    """Weights of one layer, [N, K]."""

    input_norm: torch.Tensor
    qkv: torch.Tensor  # [(heads + 2 kv heads) * head_dim, hidden]
    qk_norm: torch.Tensor  # [heads + kv heads, head_dim]
    k_norm: torch.Tensor  # [kv heads, head_dim]
    o: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor

    @classmethod
    def load(cls, r: Reader, number: int, c: DraftConfig) -> CudaDraftLayer:
        base, h, d = f"layers.{number}.", c.hidden_size, c.head_dim
        heads, groups = c.num_attention_heads, c.num_key_value_heads
        parts = (("q", heads), ("k", groups), ("v", groups))
        q_norm = r.dense((base + "self_attn.q_norm.weight", (d,))).expand(heads, d)
        k_norm = r.dense((base + "self_attn.k_norm.weight", (d,))).expand(groups, d)
        return cls(
            input_norm=r.dense((base + "input_layernorm.weight", (h,))),
            qkv=r.dense(*((f"{base}self_attn.{name}_proj.weight", (count * d, h)) for name, count in parts)),
            qk_norm=torch.cat([q_norm, k_norm]).contiguous(),
            k_norm=k_norm.contiguous(),
            o=r.dense((base + "self_attn.o_proj.weight", (h, heads * d))),
            mlp_norm=r.dense((base + "post_attention_layernorm.weight", (h,))),
            gate_up=r.dense(*((f"{base}mlp.{n}_proj.weight", (c.intermediate_size, h)) for n in ("gate", "up"))),
            down=r.dense((base + "mlp.down_proj.weight", (h, c.intermediate_size))),
        )


class DraftWeights(NamedTuple):
    """All of the drafter, and the target's embedding and head."""

    embedding: torch.Tensor
    head: torch.Tensor
    fc: torch.Tensor | None  # [hidden, feature width]; None: features come projected
    hidden_norm: torch.Tensor
    context_kv: torch.Tensor  # [layers * 2 kv heads * head_dim, hidden]: every layer's keys and values
    layers: list[CudaDraftLayer]
    norm: torch.Tensor
    cos: torch.Tensor  # [positions, head_dim / 2] float32
    sin: torch.Tensor


class DraftShape(NamedTuple):
    """The bucket of a pass: rows of features, sequences that draft."""

    features: int
    sequences: int
    block: int
    pages: int  # of a sequence, at most

    @property
    def words(self) -> int:
        return 2 * self.features + (3 + 2 * self.block + self.pages) * self.sequences


class DraftFields(NamedTuple):
    """The parts of a pass's block of integers."""

    slot: torch.Tensor  # [features], in the pool; -1: padding
    at: torch.Tensor  # [features] positions
    tokens: torch.Tensor  # [sequences * block]
    position: torch.Tensor  # [sequences * block]
    start: torch.Tensor  # [sequences]
    end: torch.Tensor  # [sequences]
    anchor: torch.Tensor  # [sequences]
    pages: torch.Tensor  # [sequences, pages]

    @classmethod
    def of(cls, block: torch.Tensor, s: DraftShape) -> DraftFields:
        rows = s.sequences * s.block
        sizes = [s.features, s.features, rows, rows, *[s.sequences] * 3, s.sequences * s.pages]
        slot, at, tokens, position, start, end, anchor, pages = torch.split(block, sizes)
        return cls(slot, at, tokens, position, start, end, anchor, pages.view(s.sequences, s.pages))


class DraftRoom:
    """The buffers of passes of up to `features` rows of features and `rows` rows of blocks."""

    def __init__(
        self, c: DraftConfig, features: int, rows: int, device: torch.device, dtype: torch.dtype, width: int
    ) -> None:
        self.features, self.rows = features, rows
        heads, groups, d, hidden = c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.hidden_size

        def room(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
            return torch.zeros(*shape, device=device, dtype=of)

        floats = torch.float32
        self.given = room(features, width)
        self.mixed, self.context = room(features, hidden, of=floats), room(features, hidden)
        self.context_kv = room(features, c.num_hidden_layers * 2 * groups * d, of=floats)
        self.x, self.delta = room(rows, hidden, of=floats), room(rows, hidden, of=floats)
        self.normed = room(rows, hidden)
        self.qkv = room(rows, (heads + 2 * groups) * d, of=floats)
        self.q, self.out = room(rows, heads, d), room(rows, heads, d)
        self.own = room(rows, 2, groups, d)
        self.gate_up = room(rows, 2 * c.intermediate_size, of=floats)
        self.act = room(rows, c.intermediate_size)
        self.logits = room(rows, c.vocab_size, of=floats)
        every = torch.arange(rows, dtype=torch.int32)
        self.every = every.to(device)
        self.drafted = every[every % c.block_size > 0].to(device)  # rows that predict a token


class DraftStep:
    """The pass over one shape. `fields` are its integers on the device."""

    def __init__(
        self, c: DraftConfig, weights: DraftWeights, room: DraftRoom, shape: DraftShape, fields: DraftFields
    ) -> None:
        self.c, self.weights, self.room, self.shape, self.fields = c, weights, room, shape, fields

    def run(self, pool: torch.Tensor) -> None:
        """pool [layers, slots, 2, kv heads, head_dim]. Logits are in the room, block - 1 rows a sequence."""
        if self.shape.features:
            self.append(pool)
        if self.shape.sequences:
            self.draft(pool)

    def append(self, pool: torch.Tensor) -> None:
        """The context's keys and values, from the features; they do not go through the layers' input norms."""
        c, w, room, f, n = self.c, self.weights, self.room, self.fields, self.shape.features
        mixed, context, kv = room.mixed[:n], room.context[:n], room.context_kv[:n]
        if w.fc is None:
            context = room.given[:n]
        else:
            linear(room.given[:n], w.fc, mixed)
            add_rmsnorm(mixed, w.hidden_norm, context, c.rms_norm_eps)
        linear(context, w.context_kv, kv)
        width = kv.shape[1] // c.num_hidden_layers
        for number, layer in enumerate(w.layers):
            part = kv[:, number * width : (number + 1) * width]
            draft_rows(part, layer.k_norm, c.rms_norm_eps, f.at, f.slot, w.cos, w.sin, None, pool[number])

    def draft(self, pool: torch.Tensor) -> None:
        c, w, room, f = self.c, self.weights, self.room, self.fields
        n, eps = self.shape.sequences * self.shape.block, c.rms_norm_eps
        x, delta, normed, act = room.x[:n], room.delta[:n], room.normed[:n], room.act[:n]
        q, own, out, qkv, gate_up = room.q[:n], room.own[:n], room.out[:n], room.qkv[:n], room.gate_up[:n]
        for number, layer in enumerate(w.layers):
            if number == 0:
                add_rmsnorm(x, layer.input_norm, normed, eps, tokens=f.tokens, table=w.embedding)
            else:
                add_rmsnorm(x, layer.input_norm, normed, eps, delta=delta)
            linear(normed, layer.qkv, qkv)
            draft_rows(qkv, layer.qk_norm, eps, f.position, room.every[:n], w.cos, w.sin, q, own)
            draft_attention(
                q, own, pool[number], f.pages, f.start, f.end, f.anchor, out, c.windows[number], c.causal[number]
            )
            linear(out.flatten(1), layer.o, delta)
            add_rmsnorm(x, layer.mlp_norm, normed, eps, delta=delta)
            linear(normed, layer.gate_up, gate_up)
            silu_mul(gate_up, act)
            linear(act, layer.down, delta)
        add_rmsnorm(x, w.norm, normed, eps, delta=delta)
        drafted = self.shape.sequences * (self.shape.block - 1)
        linear(normed, w.head, room.logits[:drafted], room.drafted[:drafted])
