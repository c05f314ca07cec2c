"""The target on the compiled CPU engine (kernels/cpu): K2Model's interface, and bits of its own.

Each element is one chain of fused multiply-adds in ascending order, so that a row's bits depend on neither the rows
beside it, nor the tree, the chunk, the pages, the threads, the instruction set or the compiler.
"""

from __future__ import annotations

import ctypes
import hashlib
import threading
import time
import weakref
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hedgerow.errors import InvalidRequest
from hedgerow.model.batch import ForwardOutput, SequenceRows
from hedgerow.model.compiled_walk import Walker
from hedgerow.model.config import K2Config
from hedgerow.model.interface import checked_taps
from hedgerow.model.k2 import check_ranks, rotations
from hedgerow.model.loader import Checkpoint, checkpoint_hash
from hedgerow.model.packing import HEAD_ROWS, Packer, check_sizes, pack_layer
from hedgerow.model.tensors import WHOLE, Share
from hedgerow.model.threads import ThreadChoice
from kernels.collectives import Ranks
from kernels.cpu import library as lib
from kernels.cpu.build import BUILDS, build
from kernels.mla_tree_attention import PAGE
from kernels.tree_accept import Walked, WalkRows

LAW = "c2"  # of the arithmetic; the next number when a bit of any result, or a drawn token, changes
# target.h: what is wrong with a plan, and what would be right
FAULTS = {
    1: ("rows", "at least one sequence, and at most 2^24 rows"),
    2: ("prefix", "at least 0 and below the model's positions"),
    3: ("tokens", "at least one"),
    4: ("tokens", "within the vocabulary"),
    5: ("parents", "-1 or a row before it"),
    6: ("pages", "not negative"),
    7: ("pages", "pages of the cache"),
    8: ("want_logits", "ascending rows of the sequence"),
    9: ("prefix", "with the row's depth below the model's positions"),
    10: ("pages", "enough for the prefix and the rows"),
}


class CompiledCache:
    """`pages` pages of 64 tokens for every layer, in two layouts. A flat slot is page * 64 + offset."""

    page_size = PAGE

    def __init__(self, library: lib.Library, layers: int, pages: int, latent: int, rope: int) -> None:
        if pages < 1:
            raise InvalidRequest("pages", pages, "at least 1")
        self.pages, self._functions = pages, library.functions
        self.keys = torch.zeros(layers, pages, latent + rope, PAGE)  # latent and rotated key, positions side by side
        self.latents = torch.zeros(layers, pages, PAGE, latent)
        self.shape = (layers, latent, rope)
        self._room = torch.empty(0)  # of a copy; kept, since calls into torch are slow while nothing of it is cached
        self._room_at, self._most = 0, 0
        self.struct = lib.Cache(self.keys.data_ptr(), self.latents.data_ptr(), pages)

    def copy(self, src_slots: Sequence[int], dst_slots: Sequence[int]) -> None:
        """Moves latents in all layers; every source is read before any target is written.

        InvalidRequest where there is no such slot.
        """
        count, (layers, latent, rope) = len(src_slots), self.shape
        if count != len(dst_slots):
            raise InvalidRequest("dst_slots", len(dst_slots), f"as many as src_slots, {count}")
        if count == 0:
            return
        if count > self._most:
            self._most, self._room = 2 * count, torch.empty(2 * count, 2 * latent + rope)
            self._room_at = self._room.data_ptr()
        source, target = array("q", src_slots), array("q", dst_slots)
        code = self._functions.cache_copy(
            self.struct, layers, latent, rope, count, source.buffer_info()[0], target.buffer_info()[0], self._room_at
        )
        if code:
            raise InvalidRequest("slots", [*src_slots, *dst_slots], f"slots of the cache's {self.pages} pages")

    def read(self, slots: Sequence[int]) -> torch.Tensor:
        """Latent and rotated key of these slots, [layers, slots, width], copied."""
        at = torch.tensor(slots)
        return self.keys[:, at // PAGE, :, at % PAGE].transpose(0, 1).contiguous()


class CompiledK2:
    """Immutable once loaded; calls of `forward` take turns.

    `threads`: the most of a step. `choice` says how many each takes, all of them unless it is replaced; no bit changes.
    `ranks`: of those that divide the model, the one that is computed here. Its parts of sums meet the others' in rank
    order; what another rank does not bring raises from `forward` whatever `ranks` raised.
    """

    architecture = "cpu-compiled"

    def __init__(
        self,
        library: lib.Library,
        config: K2Config,
        checkpoint: Checkpoint,
        feature_layers: Sequence[int],
        threads: int = 1,
        latent_eps: float | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        c = self.config = config
        self.ranks = ranks or Ranks()
        self.shards = self.ranks.count
        assert len(self.ranks.mine) == 1, "one rank a model"
        for layer in feature_layers:
            if not 0 <= layer < c.num_hidden_layers:
                raise InvalidRequest("feature_layers", layer, f"within the target's {c.num_hidden_layers} layers")
        check_sizes(c, checkpoint.folder / "config.json")
        check_ranks([checkpoint], c)
        checkpoint.compare()
        self.feature_layers = tuple(feature_layers)
        self.feature_width = len(self.feature_layers) * c.hidden_size
        self.checkpoint_hash = checkpoint_hash(checkpoint.folder) if 0 in self.ranks.mine else ""
        self._add, self._lost = lib.SUM(self._sum), list[Exception]()
        self.choice = ThreadChoice(checked_threads(threads), threads)
        self._library, self._packer = library, Packer(library.lanes)
        self._model = self._describe(checkpoint, c.rms_norm_eps if latent_eps is None else latent_eps)
        self._engine = library.functions.target_open(self._model, threads)
        if not self._engine:
            raise MemoryError("the compiled engine has no memory or cannot start its threads")
        weakref.finalize(self, library.functions.target_close, self._engine)
        self._walker, self._turn = Walker(library, c.vocab_size), threading.Lock()

    @classmethod
    def load(
        cls,
        folder: Path,
        feature_layers: Sequence[int],
        threads: int = 1,
        latent_eps: float | None = None,
        builds: Path = BUILDS,
        ranks: Ranks | None = None,
    ) -> CompiledK2:
        """Raises ConfigError or CheckpointError as K2Model does, also for a size without code here; BuildError."""
        config = K2Config.from_folder(folder)
        check_sizes(config, folder / "config.json")
        library = lib.Library(build(builds))
        share = Share(ranks.mine[0], ranks.count) if ranks else WHOLE
        return cls(library, config, Checkpoint(folder, share), feature_layers, threads, latent_eps, ranks)

    def tap(self, layers: Sequence[int]) -> None:
        """As `interface.Taps.tap`: the engine reads them with every step."""
        with self._turn:
            self.feature_layers = checked_taps(layers, self.feature_layers, self.config.num_hidden_layers)
            self._tapped.copy_(torch.tensor(self.feature_layers, dtype=torch.int32))

    def new_cache(self, pages: int) -> CompiledCache:
        """A cache of `pages` pages of 64 tokens for every layer."""
        c = self.config
        return CompiledCache(self._library, c.num_hidden_layers, pages, c.kv_lora_rank, c.qk_rope_head_dim)

    def forward(self, rows: Sequence[SequenceRows], cache: CompiledCache) -> ForwardOutput:
        """Computes all rows of a step and writes their latents into `cache`.

        InvalidRequest for rows that make no sense or pages that are not the cache's; nothing has then been computed.
        """
        c = self.config
        if cache.shape != (c.num_hidden_layers, c.kv_lora_rank, c.qk_rope_head_dim):
            raise InvalidRequest("cache", cache.shape, "made by this model's new_cache")
        plan = plan_words(rows)
        count = sum(len(part.tokens) for part in rows)
        wanted = sum(len(part.want_logits) for part in rows)
        logits = torch.empty(wanted, c.vocab_size // self.shards)
        features = torch.empty(count, self.feature_width)
        fault = lib.Fault()
        with self._turn:
            threads, begun = self.choice.threads(count), time.perf_counter()
            code = self._library.functions.target_step(
                self._engine, cache.struct, plan.buffer_info()[0], len(plan), threads, logits.data_ptr(),
                features.data_ptr(), fault,
            )  # fmt: skip
            self.choice.took(count, time.perf_counter() - begun)
        if code == lib.NO_SUM:
            raise self._lost[0]
        if code == lib.NO_MEMORY:
            raise MemoryError("no memory for the step's scores")
        if code:
            field, limit = FAULTS[code]
            raise InvalidRequest(f"rows[{fault.sequence}].{field}", fault.value, f"{limit} (row {fault.row})")
        return ForwardOutput(self.ranks.join([logits]) if wanted else torch.empty(0, c.vocab_size), features)

    def experts(self) -> float | None:
        """As `interface.Routes.experts`. A microsecond."""
        layers = ctypes.c_int()
        found: int = self._library.functions.target_experts(self._engine, layers)
        return found / layers.value if layers.value else None

    def _sum(self, part: Any, count: int) -> int:
        """Called by the engine in a step: `part`, this rank's, becomes the sum of all. Nothing may be raised there."""
        if not self._lost:
            try:
                mine = torch.from_numpy(np.ctypeslib.as_array(part, (count,)))
                mine.copy_(self.ranks.sum([mine]))
            except Exception as error:  # noqa: BLE001  raised by `forward`
                self._lost.append(error)
        return len(self._lost)

    def walk(self, logits: torch.Tensor, trees: Sequence[WalkRows]) -> list[Walked]:
        """As `kernels.tree_accept.walk_trees`, by the engine's own law of rounding."""
        with self._turn:
            return self._walker(logits, trees)

    def _describe(self, checkpoint: Checkpoint, latent_eps: float) -> lib.Model:
        c, p, n = self.config, self._packer, self.shards
        embedding, narrow = p.table(checkpoint.dense("model.embed_tokens.weight", (c.vocab_size, c.hidden_size)))
        turns = torch.view_as_real(rotations(c)).movedim(-1, 0).contiguous()
        self.kernel_law = f"{LAW}-{hashlib.sha256(turns.numpy().tobytes()).hexdigest()[:8]}"  # torch made the tables
        if self.shards > 1:
            self.kernel_law += f"-shards-{self.shards}"
        self._tapped = torch.tensor(self.feature_layers, dtype=torch.int32)
        layers = (lib.Layer * c.num_hidden_layers)(
            *(pack_layer(p, checkpoint, n, c) for n in range(c.num_hidden_layers))
        )
        return lib.Model(
            layers=c.num_hidden_layers, hidden=c.hidden_size, vocab=c.vocab_size // n, heads=c.num_attention_heads // n,
            nope=c.qk_nope_head_dim, rope=c.qk_rope_head_dim, value=c.v_head_dim, q_rank=c.q_lora_rank,
            kv_rank=c.kv_lora_rank, width=c.intermediate_size // n,
            shared_width=c.moe_intermediate_size * c.n_shared_experts // n, experts=c.n_routed_experts,
            top_k=c.num_experts_per_tok, expert_width=c.moe_intermediate_size // n, normalise=c.norm_topk_prob,
            positions=c.max_position_embeddings, taps=len(self.feature_layers), ranks=n,
            first_token=self.ranks.mine[0] * (c.vocab_size // n), tokens=c.vocab_size, eps=c.rms_norm_eps,
            latent_eps=latent_eps, softmax_scale=c.softmax_scale, routed_scale=c.routed_scaling_factor,
            tapped=p.keep(self._tapped), layer=layers,
            embedding=embedding, narrow=narrow, norm=p.keep(checkpoint.weight("model.norm.weight", c.hidden_size)),
            cos=p.keep(turns[0]), sin=p.keep(turns[1]), sum=ctypes.cast(self._add, ctypes.c_void_p).value,
            head=p.stacked(
                lambda: checkpoint.blocks("lm_head.weight", (c.vocab_size, c.hidden_size), HEAD_ROWS), c.vocab_size // n
            ),
        )  # fmt: skip


def checked_threads(threads: int) -> int:
    """InvalidRequest where they are none or absurd."""
    if not 1 <= threads <= 256:
        raise InvalidRequest("threads", threads, "1 to 256")
    return threads


def plan_words(rows: Sequence[SequenceRows]) -> array[int]:
    """The step as the engine reads it (target.h, plan_read)."""
    words = array("i", [len(rows)])
    try:
        for part in rows:
            if len(part.parents) != len(part.tokens):
                raise InvalidRequest("parents", len(part.parents), f"as many as tokens, {len(part.tokens)}")
            words.extend((part.prefix, len(part.tokens), len(part.pages), len(part.want_logits)))
        for part in rows:
            words.extend(part.tokens)
            words.extend(part.parents)
            words.extend(part.pages)
            words.extend(part.want_logits)
    except (OverflowError, TypeError) as error:
        raise InvalidRequest("rows", str(error), "integers of 32 bits") from None
    return words
