"""One pass of a DFlash drafter on a GPU over fixed buffers: features into contexts, then the sequences' blocks."""

from __future__ import annotations

from typing import Generic, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from hedgerow.model.cuda_convolution import ConvolutionRoom
from hedgerow.model.cuda_draft_weights import CudaDraftLayer, DraftWeights
from hedgerow.model.cuda_plan import Block, aligned
from hedgerow.model.draft_config import DraftConfig
from kernels.gpu.add_rmsnorm import add_rmsnorm
from kernels.gpu.block_attention import SPLIT, block_attention, words
from kernels.gpu.draft_block import draft_attention, draft_rows
from kernels.gpu.linear import linear
from kernels.gpu.silu_mul import silu_mul

Ints = npt.NDArray[np.int32]
LONG = 1024  # positions: where contexts may be longer, keys are split among programs; short ones cost 4 us a layer more


class DraftShape(NamedTuple):
    """The bucket of a pass: rows of features, sequences that draft."""

    features: int
    sequences: int
    block: int
    pages: int  # of a sequence, at most
    nodes: int = 0  # of a tree, at most; 0: logits, and no trees
    pairs: bool = False  # conditional trees

    @property
    def sizes(self) -> tuple[int, ...]:
        """Words of each of `DraftFields`."""
        rows, q = self.sequences * self.block, self.sequences
        return (*[self.features] * 2, *[rows] * 2, *[q] * 5, q * self.pages)

    @property
    def words(self) -> int:
        return sum(map(aligned, self.sizes))


class DraftFields(NamedTuple, Generic[Block]):
    """The parts of a pass's block of integers, as NumPy's or torch's."""

    slot: Block  # [features], in the pool; -1: padding
    at: Block  # [features] positions
    tokens: Block  # [sequences * block]
    position: Block  # [sequences * block]
    start: Block  # [sequences]
    end: Block  # [sequences]
    anchor: Block  # [sequences]
    budgets: Block  # [sequences] nodes
    caps: Block  # [sequences] tokens at one depth
    pages: Block  # [sequences, pages]


def split_draft(block: Block, shape: DraftShape) -> DraftFields[Block]:
    """Views of `block` [shape.words]."""
    parts, begin = list[Block](), 0
    for size in shape.sizes:
        parts.append(block[begin : begin + size])
        begin += aligned(size)
    parts[-1] = parts[-1].reshape(shape.sequences, shape.pages)
    return DraftFields(*parts)


class DraftRoom:
    """The buffers of passes of up to `features` rows of features, `width` wide, and `rows` rows of blocks."""

    def __init__(
        self, c: DraftConfig, features: int, rows: int, pages: int, device: torch.device, dtype: torch.dtype, width: int
    ) -> None:
        self.features, self.rows = features, rows
        heads, groups, d, hidden = c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.hidden_size

        def room(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
            return torch.zeros(*shape, device=device, dtype=of)

        floats = torch.float32
        self.came, self.given = room(features, width, of=floats), room(features, width)
        self.mixed, self.context = room(features, hidden, of=floats), room(features, hidden)
        self.context_kv = room(features, c.num_hidden_layers * 2 * groups * d, of=floats)
        self.x, self.delta = room(rows, hidden, of=floats), room(rows, hidden, of=floats)
        self.normed = room(rows, hidden)
        self.qkv = room(rows, (heads + 2 * groups) * d, of=floats)
        self.q, self.out = room(rows, heads, d), room(rows, heads, d)
        self.own = room(rows, 2, groups, d)
        most = (words(count + 1, heads, groups, d, c.block_size, pages) for count in range(rows // c.block_size))
        self.splits = room(max(most, default=0), of=floats)  # of contexts of up to `pages` pages
        self.gate_up = room(rows, 2 * c.intermediate_size, of=floats)
        self.act = room(rows, c.intermediate_size)
        self.convolution = None if c.convolution is None else ConvolutionRoom(c, rows, device, dtype)
        self.logits = room(rows, c.vocab_size, of=floats)
        every = torch.arange(rows, dtype=torch.int32)
        self.every = every.to(device)
        self.drafted = every[every % c.block_size > 0].to(device)  # rows that predict a token


class DraftStep:
    """The pass over one shape. `fields` are its integers on the device."""

    def __init__(
        self,
        c: DraftConfig,
        weights: DraftWeights,
        room: DraftRoom,
        shape: DraftShape,
        fields: DraftFields[torch.Tensor],
    ) -> None:
        self.c, self.weights, self.room, self.shape, self.fields = c, weights, room, shape, fields

    def run(self, pool: torch.Tensor, came: torch.Tensor | None = None) -> None:
        """pool [layers, slots, 2, kv heads, head_dim]. Logits are in the room, block - 1 rows a sequence. `came`: where
        features lie, where not in the room."""
        if self.shape.features:
            self.append(pool, came)
        if self.shape.sequences:
            self.draft(pool)

    def append(self, pool: torch.Tensor, came: torch.Tensor | None = None) -> None:
        """The context's keys and values, from the features; they do not go through the layers' input norms."""
        c, w, room, f, n = self.c, self.weights, self.room, self.fields, self.shape.features
        mixed, context, kv = room.mixed[:n], room.context[:n], room.context_kv[:n]
        room.given[:n].copy_(room.came[:n] if came is None else came)  # rounds
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
        added = delta  # what the last half gave
        for number, layer in enumerate(w.layers):
            if number == 0:
                add_rmsnorm(x, layer.input_norm, normed, eps, tokens=f.tokens, table=w.embedding)
            else:
                add_rmsnorm(x, layer.input_norm, normed, eps, delta=added)
            given, kernel = self.convolve(layer, 0, normed)
            linear(given, layer.qkv, qkv)
            draft_rows(qkv, layer.qk_norm, eps, f.position, room.every[:n], w.cos, w.sin, q, own)
            window = c.windows[number]
            read = q, own, pool[number], f.pages, f.start, f.end, f.anchor, out, window, c.causal[number]
            if c.max_position_embeddings > LONG and not (window and window <= SPLIT):
                block_attention(*read, room.splits)
            else:
                draft_attention(*read)
            linear(out.flatten(1), layer.o, delta)
            added = self.convolved(layer, 0, delta, kernel)
            add_rmsnorm(x, layer.mlp_norm, normed, eps, delta=added)
            given, kernel = self.convolve(layer, 1, normed)
            linear(given, layer.gate_up, gate_up)
            silu_mul(gate_up, act)
            linear(act, layer.down, delta)
            added = self.convolved(layer, 1, delta, kernel)
        add_rmsnorm(x, w.norm, normed, eps, delta=added)
        drafted = self.shape.sequences * (self.shape.block - 1)
        linear(normed, w.head, room.logits[:drafted], room.drafted[:drafted])

    def convolve(self, layer: CudaDraftLayer, half: int, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What goes into attention (0) or MLP (1), and the kernel for what comes out: y and none but in DFlash 2."""
        room = self.room.convolution
        return (y, None) if room is None else layer.convolutions[half].before(y, room)

    def convolved(
        self, layer: CudaDraftLayer, half: int, out: torch.Tensor, kernel: torch.Tensor | None
    ) -> torch.Tensor:
        room = self.room.convolution
        return out if room is None or kernel is None else layer.convolutions[half].after(out, kernel, room)
