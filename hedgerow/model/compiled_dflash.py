"""The drafter on the compiled CPU engine (kernels/cpu): DFlashModel's interface."""

from __future__ import annotations

import ctypes
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch

from hedgerow.errors import InvalidRequest
from hedgerow.model.compiled import checked_threads
from hedgerow.model.compiled_pairs import pair_trees
from hedgerow.model.compiled_trees import compiled_trees
from hedgerow.model.convolution import StoredHalf, stored_halves
from hedgerow.model.dflash import check_append, rotary_tables
from hedgerow.model.draft_config import DraftConfig
from hedgerow.model.draft_tensors import borrow
from hedgerow.model.fields import ConfigError
from hedgerow.model.loader import Checkpoint, checkpoint_hash
from hedgerow.model.packing import PANEL, Packer, in_turn
from hedgerow.model.selector import Selector
from hedgerow.model.threads import ThreadChoice
from kernels.cpu import library as lib
from kernels.cpu.build import BUILDS, build
from kernels.mla_tree_attention import PAGE
from kernels.tree_build import PlainTree

# drafter.h: what is wrong with a step
FAULTS = {
    20: ("anchors", "within the vocabulary"),
    21: ("positions", "within the model's positions"),
    22: ("states", "contexts that end at or before their anchors' positions"),
}


class LayerPages:
    """Keys and values of one layer for one sequence: position p lies in page p // 64 modulo `pages`.

    A sliding layer keeps the pages that a later block can see, the others all of them; both grow as they fill.
    """

    def __init__(self, c: DraftConfig, window: int | None) -> None:
        self.most = None if window is None else max(1, -(-(window - 1) // PAGE))
        self.config, self.pages = c, 0
        self.keys = self.values = torch.empty(0)
        self.struct = lib.DraftContext()

    def reserve(self, first: int, end: int) -> None:
        """Makes room for positions first .. end - 1, of which those that were written stay."""
        low, needed = first // PAGE, (end - 1) // PAGE - first // PAGE + 1
        if self.most is not None:
            needed = min(needed, self.most)
        if needed <= self.pages:
            return
        c, pages = self.config, max(needed, 2 * self.pages)
        pages = pages if self.most is None else min(pages, self.most)
        keys = torch.zeros(c.num_key_value_heads, pages, c.head_dim, PAGE)  # zeros: unseen places are read, times 0
        values = torch.zeros(c.num_key_value_heads, pages, PAGE, c.head_dim)
        if self.pages:
            old = torch.arange(low, low + self.pages)
            keys[:, old % pages] = self.keys[:, old % self.pages]
            values[:, old % pages] = self.values[:, old % self.pages]
        self.keys, self.values, self.pages = keys, values, pages
        self.struct = lib.DraftContext(keys.data_ptr(), values.data_ptr(), pages)


class CompiledDraftState:
    """A sequence's context: positions start .. end - 1 have been appended."""

    def __init__(self, config: DraftConfig) -> None:
        self.config = config
        self.reset(0)

    def reset(self, position: int) -> None:
        """Forgets everything; the next features are those of `position`."""
        self.start = self.end = position
        self.layers = [LayerPages(self.config, window) for window in self.config.windows]

    def reserve(self, rows: int) -> list[lib.DraftContext]:
        """Every layer's pages, with room for `rows` more positions."""
        for layer in self.layers:
            layer.reserve(self.start, self.end + rows)
        return [layer.struct for layer in self.layers]


class CompiledDFlash:
    """Immutable once loaded; states are their callers'; calls take turns. Threads as in CompiledK2."""

    def __init__(
        self,
        library: lib.Library,
        folder: Path,
        target_folder: Path,
        amplitude: float | None = None,
        threads: int = 1,
        projected: bool = False,
    ) -> None:
        c = self.config = DraftConfig.from_folder(folder)
        check_sizes(c, folder / "config.json")
        self.choice = ThreadChoice(checked_threads(threads), threads)
        self.feature_layers, self.block_size, self.vocab_size = c.target_layer_ids, c.block_size, c.vocab_size
        self.feature_width = c.hidden_size if projected else c.feature_width
        self.checkpoint_hash = checkpoint_hash(folder)
        self._library, self._functions, self._packer = library, library.functions, Packer(library.lanes)
        self._model = self._describe(Checkpoint(folder), target_folder, amplitude, projected)
        self._engine = library.functions.drafter_open(self._model, threads)
        if not self._engine:
            raise MemoryError("the compiled engine has no memory or cannot start its threads")
        weakref.finalize(self, library.functions.drafter_close, self._engine)
        self._turn = threading.Lock()

    @classmethod
    def load(
        cls,
        folder: Path,
        target_folder: Path,
        amplitude: float | None = None,
        threads: int = 1,
        builds: Path = BUILDS,
        projected: bool = False,
    ) -> CompiledDFlash:
        """Raises ConfigError or CheckpointError as DFlashModel does, also for a size without code here; BuildError."""
        return cls(lib.Library(build(builds)), folder, target_folder, amplitude, threads, projected)

    def new_state(self) -> CompiledDraftState:
        """An empty context that starts at position 0."""
        return CompiledDraftState(self.config)

    def append(self, state: CompiledDraftState, features: torch.Tensor, position: int) -> None:
        """Appends features [n, feature_width] of positions position .. position+n-1; position is the state's end."""
        c, n = self.config, len(features)
        check_append(features, position, state.end, self.feature_width, c.max_position_embeddings)
        if n == 0:
            return
        features = features.contiguous()
        contexts = (lib.DraftContext * c.num_hidden_layers)(*state.reserve(n))
        with self._turn:
            code = self._functions.drafter_append(
                self._engine, contexts, features.data_ptr(), n, position, self.choice.usual
            )
        assert code == 0, code  # all that it refuses was refused above
        state.end += n

    def draft(
        self, states: Sequence[CompiledDraftState], anchors: Sequence[int], positions: Sequence[int]
    ) -> torch.Tensor:
        """Logits [S, block_size - 1, vocabulary] float32 for positions P+1 .. P+L of each sequence.

        The anchor of a sequence stands at its position P; the context is what was appended, all before P. `states` are
        not changed. InvalidRequest for an anchor or a position that makes no sense.
        """
        logits = torch.empty(len(states), self.config.block_size - 1, self.vocab_size)
        self._draft(states, anchors, positions, logits, None)
        return logits

    def draft_states(
        self, states: Sequence[CompiledDraftState], anchors: Sequence[int], positions: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`draft`'s logits, and the normed states [S, block_size - 1, hidden] that they are of."""
        c = self.config
        shape = len(states), c.block_size - 1
        logits, hidden = torch.empty(*shape, c.vocab_size), torch.empty(*shape, c.hidden_size)
        self._draft(states, anchors, positions, logits, hidden)
        return logits, hidden

    def _draft(
        self,
        states: Sequence[CompiledDraftState],
        anchors: Sequence[int],
        positions: Sequence[int],
        logits: torch.Tensor,
        hidden: torch.Tensor | None,
    ) -> None:
        c, count = self.config, len(states)
        if not count == len(anchors) == len(positions):
            raise InvalidRequest("states", count, "as many as anchors and positions")
        asks = zip(states, anchors, positions, strict=True)
        ask = (lib.DraftAsk * count)(*(lib.DraftAsk(a, p, s.start, s.end) for s, a, p in asks))
        contexts = (lib.DraftContext * (count * c.num_hidden_layers))(
            *(layer.struct for state in states for layer in state.layers)
        )
        bad = ctypes.c_int()
        with self._turn:
            threads, begun = self.choice.threads(count), time.perf_counter()
            out = logits.data_ptr(), None if hidden is None else hidden.data_ptr()
            code = self._functions.drafter_step(self._engine, count, ask, contexts, threads, *out, bad)
            self.choice.took(count, time.perf_counter() - begun)
        if code in FAULTS:
            field, limit = FAULTS[code]
            wrong = (anchors[bad.value], positions[bad.value], states[bad.value].end)
            raise InvalidRequest(f"{field}[{bad.value}]", wrong, limit)
        if code:
            raise MemoryError("no memory for the step's scores")

    def trees(self, logits: torch.Tensor, budgets: Sequence[int], caps: Sequence[int]) -> list[PlainTree]:
        """One tree a sequence from `draft`'s logits, as `kernels.tree_build.plain_trees`."""
        return compiled_trees(self._library, logits, budgets, caps)

    def pair_trees(
        self,
        selector: Selector,
        logits: torch.Tensor,
        hidden: torch.Tensor,
        anchors: Sequence[int],
        budgets: Sequence[int],
        caps: Sequence[int],
    ) -> list[PlainTree]:
        """Conditional trees of `draft_states`, one a sequence: `selector.BuildsPairs`."""
        return pair_trees(self._library, selector, logits, hidden, anchors, budgets, caps)

    def _describe(
        self, checkpoint: Checkpoint, target_folder: Path, amplitude: float | None, projected: bool
    ) -> lib.DraftModel:
        c, p = self.config, self._packer
        borrowed = borrow(c, checkpoint, target_folder)
        self.target_head_hash = borrowed.hash
        embedding, narrow = p.table(borrowed.embedding)
        taps, group = c.convolution or (0, 0)
        cos, sin = (table[:, c.head_dim // 2 :] for table in rotary_tables(c, amplitude))
        layers = [pack_layer(p, checkpoint, n, c) for n in range(c.num_hidden_layers)]
        return lib.DraftModel(
            layers=c.num_hidden_layers, hidden=c.hidden_size, vocab=c.vocab_size, heads=c.num_attention_heads,
            kv_heads=c.num_key_value_heads, head_dim=c.head_dim, width=c.intermediate_size, block=c.block_size,
            mask_token=c.mask_token_id, feature_width=self.feature_width, positions=c.max_position_embeddings,
            projected=projected, taps=taps, group=group, narrow=narrow, eps=c.rms_norm_eps, scale=c.head_dim**-0.5,
            layer=(lib.DraftLayer * len(layers))(*layers),
            embedding=embedding, norm=p.keep(checkpoint.weight("norm.weight", c.hidden_size)),
            context_norm=p.keep(checkpoint.weight("hidden_norm.weight", c.hidden_size)), cos=p.keep(cos),
            sin=p.keep(sin), head=p.matrix(borrowed.head),
            fc=lib.Matrix() if projected else p.matrix(checkpoint.dense("fc.weight", (c.hidden_size, c.feature_width))),
        )  # fmt: skip


def check_sizes(c: DraftConfig, file: Path) -> None:
    """Raises ConfigError for a size that the engine does not take."""
    for name in ("hidden_size", "head_dim", "intermediate_size", "vocab_size"):
        if getattr(c, name) % PANEL:
            raise ConfigError(file, name, getattr(c, name), f"a multiple of {PANEL}, for the compiled engine")


def pack_layer(p: Packer, checkpoint: Checkpoint, number: int, c: DraftConfig) -> lib.DraftLayer:
    base, h, d = f"layers.{number}.", c.hidden_size, c.head_dim
    q, kv = c.num_attention_heads, c.num_key_value_heads
    attention = [(f"self_attn.{n}_proj", heads * d) for n, heads in (("q", q), ("k", kv), ("v", kv))]
    qkv = torch.cat([checkpoint.dense(f"{base}{name}.weight", (rows, h)) for name, rows in attention])
    gate, up = (checkpoint.dense(f"{base}mlp.{n}_proj.weight", (c.intermediate_size, h)) for n in ("gate", "up"))
    window = c.windows[number]
    (attention_base, attention_conv), (mlp_base, mlp_conv) = [
        pack_convolution(p, checkpoint, half) for half in stored_halves(base, c)
    ] or [(None, lib.Matrix())] * 2
    return lib.DraftLayer(
        input_norm=p.keep(checkpoint.weight(base + "input_layernorm.weight", h)),
        mlp_norm=p.keep(checkpoint.weight(base + "post_attention_layernorm.weight", h)),
        q_norm=p.keep(checkpoint.weight(base + "self_attn.q_norm.weight", d)),
        k_norm=p.keep(checkpoint.weight(base + "self_attn.k_norm.weight", d)),
        qkv=p.matrix(qkv, q * d),
        o=p.matrix(checkpoint.dense(base + "self_attn.o_proj.weight", (h, q * d))),
        gate_up=p.matrix(in_turn(gate, up)),
        down=p.matrix(checkpoint.dense(base + "mlp.down_proj.weight", (h, c.intermediate_size))),
        window=0 if window is None else window,
        causal=c.causal[number],
        attention_base=attention_base,
        attention_conv=attention_conv,
        mlp_base=mlp_base,
        mlp_conv=mlp_conv,
    )


def pack_convolution(p: Packer, checkpoint: Checkpoint, half: StoredHalf) -> tuple[int | None, lib.Matrix]:
    """The bases and the projection of one half's convolution (convolution.py)."""
    projection = checkpoint.dense(f"{half.projection}.weight", half.projection_shape)
    rows, hidden = half.projection_shape
    padded = torch.cat([projection, projection.new_zeros(-rows % PANEL, hidden)])
    return p.keep(checkpoint.weight(half.base, *half.base_shape)), p.matrix(padded)
