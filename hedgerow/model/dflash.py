"""The drafter: DFlash, a block-diffusion model that reads the target's features (arXiv 2602.06036).

A block is the anchor and block_size - 1 masks at positions P .. P+L; row j predicts the token at P+j. Keys and values
of the context come from the target's features of committed positions, strictly before the anchor, which has none yet.
They are projected once, when they arrive, and do not go through the layers' input norms; the block's own are scratch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from hedgerow.errors import InvalidRequest
from hedgerow.model.draft_config import DraftConfig
from hedgerow.model.draft_layer import DraftLayer
from hedgerow.model.draft_tensors import borrow
from hedgerow.model.loader import Checkpoint, checkpoint_hash
from hedgerow.model.projection import FeatureProjection
from kernels.block_attention import block_attention
from kernels.linear import ANY_ROWS, column_blocks, wide_linear
from kernels.rmsnorm import rmsnorm
from kernels.rope import inverse_frequencies, rope_halves, yarn_frequencies
from kernels.swiglu import swiglu
from kernels.tree_build import PlainTree, plain_trees

LEAST_CAPACITY = 64


class LayerContext:
    """Keys and values of one layer for a sequence's newest positions, room for a block behind them.

    A sliding layer keeps the window - 1 positions that a later block can see; moving them to the front and growing are
    amortised over the appends.
    """

    def __init__(self, kv_heads: int, head_dim: int, window: int | None, block: int) -> None:
        self.keep = None if window is None else window - 1
        self.block = block
        self.length = 0
        self.data = torch.empty(2, kv_heads, LEAST_CAPACITY, head_dim)  # keys, values

    def append(self, kv: torch.Tensor) -> None:
        """kv [2, kv heads, n, head_dim]."""
        if self.keep is not None and kv.shape[2] > self.keep:
            kv = kv[:, :, kv.shape[2] - self.keep :]
            self.length = 0
        self.reserve(kv.shape[2])
        self.data[:, :, self.length : self.length + kv.shape[2]] = kv
        self.length += kv.shape[2]

    def reserve(self, rows: int) -> None:
        """Makes room for `rows` more and a block."""
        kept = self.length if self.keep is None else min(self.length, max(0, self.keep - rows))
        capacity = self.data.shape[2]
        if self.length + rows + self.block <= capacity:
            return
        while kept + rows + self.block > (capacity if self.keep is None else capacity // 2):
            capacity *= 2
        old = self.data[:, :, self.length - kept : self.length]
        if capacity == self.data.shape[2]:
            old = old.clone()  # may overlap with its new place
        else:
            self.data = self.data.new_empty(*self.data.shape[:2], capacity, self.data.shape[3])
        self.data[:, :, :kept] = old
        self.length = kept

    @property
    def seen(self) -> int:
        """Positions of the context that a block right behind it can see."""
        return self.length if self.keep is None else min(self.length, self.keep)

    def with_block(self, kv: torch.Tensor) -> torch.Tensor:
        """What is seen, then the block, [2, kv heads, seen + block, head_dim]; the block is scratch, and not kept."""
        end = self.length + self.block
        self.data[:, :, self.length : end] = kv
        return self.data[:, :, self.length - self.seen : end]


class DraftState:
    """A sequence's context: positions start .. end-1 have been appended."""

    def __init__(self, config: DraftConfig) -> None:
        self.config = config
        self.reset(0)

    def reset(self, position: int) -> None:
        """Forgets everything; the next features are those of `position`."""
        c = self.config
        self.start = self.end = position
        self.layers = [LayerContext(c.num_key_value_heads, c.head_dim, w, c.block_size) for w in c.windows]


class DFlashModel:
    """Immutable once loaded; states belong to their callers. Not bit-invariant: a drafter cannot change the output.

    `amplitude` multiplies cos and sin under YaRN. None: what the config says, as Hugging Face reads it
    (`attention_factor`; else m(mscale) / m(mscale_all_dim); else 0.1 ln(factor) + 1). Published serving code disagrees
    on this for Kimi's drafter (1.0 or 1.41589): measure the acceptance both ways.

    `projected`: features come as `FeatureProjection` gives them, [n, hidden].
    """

    def __init__(
        self, folder: Path, target_folder: Path, amplitude: float | None = None, projected: bool = False
    ) -> None:
        c = self.config = DraftConfig.from_folder(folder)
        checkpoint = Checkpoint(folder)
        borrowed = borrow(c, checkpoint, target_folder)
        self.embedding, self.target_head_hash = borrowed.embedding.float(), borrowed.hash
        self.head = column_blocks(borrowed.head.float().T)
        self.feature_layers, self.block_size = c.target_layer_ids, c.block_size
        self.feature_width = c.hidden_size if projected else c.feature_width
        self.vocab_size = c.vocab_size
        self.project = None if projected else FeatureProjection(c, checkpoint)
        self.norm = checkpoint.weight("norm.weight", c.hidden_size)
        self.layers = [DraftLayer.load(checkpoint, n, c) for n in range(c.num_hidden_layers)]
        keys = c.num_attention_heads * c.head_dim
        self.context_kv = torch.cat([layer.qkv[:, keys:] for layer in self.layers], 1).contiguous()
        self.k_norms = torch.stack([layer.qk_norm[-1] for layer in self.layers]).unsqueeze(1)
        self.cos, self.sin = rotary_tables(c, amplitude)
        self.checkpoint_hash = checkpoint_hash(folder)
        self.masks = [
            self.mask(w - 1, 0, w, causal) if w else None for w, causal in zip(c.windows, c.causal, strict=True)
        ]

    @classmethod
    def load(
        cls, folder: Path, target_folder: Path, amplitude: float | None = None, projected: bool = False
    ) -> DFlashModel:
        """Raises ConfigError or CheckpointError."""
        return cls(folder, target_folder, amplitude, projected)

    def new_state(self) -> DraftState:
        """An empty context that starts at position 0."""
        return DraftState(self.config)

    @torch.inference_mode()
    def append(self, state: DraftState, features: torch.Tensor, position: int) -> None:
        """Appends features [n, feature_width] of positions position .. position+n-1; position is the state's end."""
        c, n = self.config, len(features)
        if position != state.end:
            raise InvalidRequest("position", position, f"the end of the sequence's context, {state.end}")
        if n == 0:
            return
        context = features if self.project is None else self.project(features)
        kv = (context @ self.context_kv).view(n, c.num_hidden_layers, 2, c.num_key_value_heads, c.head_dim)
        at = slice(position, position + n)
        keys = rmsnorm(kv[:, :, 0], self.k_norms, c.rms_norm_eps)
        keys = rope_halves(keys, self.cos[at, None, None], self.sin[at, None, None])
        both = torch.stack([keys, kv[:, :, 1]]).permute(2, 0, 3, 1, 4)  # [layers, 2, kv heads, n, head_dim]
        for layer, new in zip(state.layers, both, strict=True):
            layer.append(new)
        state.end += n

    @torch.inference_mode()
    def hidden(self, states: Sequence[DraftState], anchors: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        """Normed states of rows 1.. of each block, [S, block_size - 1, hidden]. `states` are not changed."""
        c, count = self.config, len(states)
        for state, position in zip(states, positions, strict=True):
            if state.end > position:
                raise InvalidRequest("position", position, f"at least the end of its context, {state.end}")
        tokens = torch.full((count, c.block_size), c.mask_token_id)
        tokens[:, 0] = torch.tensor(anchors)
        x = self.embedding.index_select(0, tokens.view(-1))
        at = (torch.tensor(positions).unsqueeze(1) + torch.arange(c.block_size)).view(-1)
        cos, sin = self.cos[at].unsqueeze(1), self.sin[at].unsqueeze(1)
        for number, layer in enumerate(self.layers):
            y = rmsnorm(x, layer.input_norm, c.rms_norm_eps)
            y, kernel = layer.convolve(0, y, c.block_size)
            out = self.attention(number, layer, y, states, positions, cos, sin) @ layer.o
            x = x + layer.convolved(0, out, kernel, c.block_size)
            y, kernel = layer.convolve(1, rmsnorm(x, layer.mlp_norm, c.rms_norm_eps), c.block_size)
            out = swiglu(wide_linear(y, layer.gate_up, ANY_ROWS)) @ layer.down
            x = x + layer.convolved(1, out, kernel, c.block_size)
        return rmsnorm(x.view(count, c.block_size, -1)[:, 1:], self.norm, c.rms_norm_eps)

    def draft(self, states: Sequence[DraftState], anchors: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        """Logits [S, block_size - 1, vocabulary] float32 for positions P+1 .. P+L of each sequence.

        The anchor of a sequence stands at its position P; the context is what was appended, all before P.
        """
        return self.draft_states(states, anchors, positions)[0]

    def draft_states(
        self, states: Sequence[DraftState], anchors: Sequence[int], positions: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`draft`'s logits, and the normed states [S, block_size - 1, hidden] that they are of."""
        with torch.inference_mode():
            hidden = self.hidden(states, anchors, positions)
            logits = wide_linear(hidden.flatten(0, 1), self.head, ANY_ROWS).view(len(states), self.block_size - 1, -1)
            return logits, hidden

    def trees(self, logits: torch.Tensor, budgets: Sequence[int], caps: Sequence[int]) -> list[PlainTree]:
        """One tree a sequence from `draft`'s logits: `kernels.tree_build.plain_trees`."""
        return plain_trees(logits, budgets, caps)

    def attention(
        self,
        number: int,
        layer: DraftLayer,
        y: torch.Tensor,
        states: Sequence[DraftState],
        positions: Sequence[int],
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> torch.Tensor:
        """Attention output [S * block, heads * head_dim] before o, of normed rows y."""
        c, block = self.config, self.block_size
        heads, groups, d = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        qkv = (y @ layer.qkv).view(len(y), heads + 2 * groups, d)
        qk = rope_halves(rmsnorm(qkv[:, : heads + groups], layer.qk_norm, c.rms_norm_eps), cos, sin)
        q = qk[:, :heads].view(len(states), block, groups, heads // groups, d).permute(0, 2, 3, 1, 4).flatten(2, 3)
        kv = torch.stack([qk[:, heads:], qkv[:, heads + groups :]], 1)
        kv = kv.view(len(states), block, 2, groups, d).permute(0, 2, 3, 1, 4)
        out = torch.empty_like(q)
        for s, (state, position) in enumerate(zip(states, positions, strict=True)):
            keys, values = state.layers[number].with_block(kv[s])
            mask = self.block_mask(number, state.layers[number].seen, position - state.end)
            out[s] = block_attention(q[s], keys, values, mask)
        return out.view(-1, groups, heads // groups, block, d).permute(0, 3, 1, 2, 4).reshape(len(y), heads * d)

    def block_mask(self, number: int, context: int, gap: int) -> torch.Tensor | None:
        """What a block sees of `context` positions that end `gap` before the anchor, and of itself; None: all."""
        window, causal, widest = self.config.windows[number], self.config.causal[number], self.masks[number]
        if widest is not None and gap == 0:
            return widest[:, widest.shape[1] - context - self.block_size :]
        return self.mask(context, gap, window, causal) if window or causal else None

    def mask(self, context: int, gap: int, window: int | None, causal: bool) -> torch.Tensor:
        """[query heads of a KV head * block, context + block], 0 or -inf."""
        c = self.config
        row = torch.arange(c.block_size).unsqueeze(1)
        column = torch.cat([torch.arange(-context - gap, -gap), torch.arange(c.block_size)])
        hidden = column > row if causal else torch.zeros(c.block_size, len(column), dtype=torch.bool)
        if window is not None:
            hidden = hidden | ((row - column).abs() >= window)
        mask = torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
        return mask.repeat(c.num_attention_heads // c.num_key_value_heads, 1)


def check_append(features: torch.Tensor, position: int, end: int, width: int, most: int) -> None:
    """InvalidRequest unless `features` are [n, width] of float32 for positions from a context's `end` on, below `most`.
    No rows fit whatever their form.
    """
    n = len(features)
    if position != end:
        raise InvalidRequest("position", position, f"the end of the sequence's context, {end}")
    if n == 0:
        return
    if features.shape != (n, width) or features.dtype != torch.float32:
        raise InvalidRequest("features", tuple(features.shape), f"[rows, {width}] of float32")
    if position < 0 or position + n > most:
        raise InvalidRequest("position", position + n, f"at most the model's {most} positions")


def rotary_tables(c: DraftConfig, amplitude: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and [-sin, sin], [positions + block, head_dim]: a block may reach past the last position."""
    yarn = c.rope.yarn
    if yarn is None:
        inverse, factor = inverse_frequencies(c.head_dim, c.rope.theta), 1.0
    else:
        inverse = yarn_frequencies(c.head_dim, c.rope.theta, yarn.factor, yarn.beta_fast, yarn.beta_slow, yarn.original)
        factor = yarn.amplitude if amplitude is None else amplitude
    angle = torch.arange(c.max_position_embeddings + c.block_size, dtype=torch.float32)[:, None] * inverse
    cos, sin = angle.cos() * factor, angle.sin() * factor
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
