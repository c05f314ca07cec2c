"""config.json of a DFlash drafter, of either kind, read into frozen dataclasses.

Sources: the published config.json of z-lab's and nvidia's drafters, and what the package `dflash` reads of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hedgerow.model.config import MOST_LAYERS, MOST_POSITIONS, Rope
from hedgerow.model.fields import Fields

LAYER_TYPES = ("sliding_attention", "full_attention")
ARCHITECTURES = ["DFlashDraftModel"], ["DFlash2DraftModel"]  # the first kind and the second
MOST_PAIRED = 31  # of a selector's candidates; a rank then has five bits


class Convolution(NamedTuple):
    """DFlash 2's, around both halves of a layer: over a row and the taps - 1 before it, by groups of channels."""

    taps: int
    group: int


class SelectorSize(NamedTuple):
    """DFlash 2's candidate selector: it scores pairs of the `top_k` best tokens of neighbouring positions."""

    rank: int
    top_k: int


@dataclass(frozen=True)
class DraftConfig:
    """A DFlash drafter. Names are those of its config.json; `dflash_config` wins over the top level."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    vocab_size: int
    rope: Rope
    windows: tuple[int | None, ...]  # per layer: keys at q - W + 1 .. q; None: all
    causal: tuple[bool, ...]  # per layer: within the block
    block_size: int  # the anchor and the masks
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None  # that the target has; None: not said
    convolution: Convolution | None
    selector: SelectorSize | None

    @classmethod
    def from_folder(cls, folder: Path) -> DraftConfig:
        """Raises ConfigError with file and field."""
        f = Fields.read(folder / "config.json")
        inner = f.inner("dflash_config") or Fields(f.file, {}, "dflash_config.")
        f.must_be("hidden_act", "silu", "silu")
        f.must_be("attention_bias", False, False)
        refuse_other_kinds(f, inner)
        if f.values.get("architectures") not in ARCHITECTURES:
            raise f.fail("architectures", "only ['DFlashDraftModel'] and ['DFlash2DraftModel'] are supported")
        where = inner if inner.values.get("block_size") is not None else f
        layers, heads = f.size("num_hidden_layers", most=MOST_LAYERS), f.size("num_attention_heads")
        windows, causal = layer_masks(f, inner, layers)
        config = cls(
            hidden_size=f.size("hidden_size"),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=f.size("num_key_value_heads"),
            head_dim=f.size("head_dim", max(1, f.size("hidden_size") // heads)),
            intermediate_size=f.size("intermediate_size"),
            rms_norm_eps=f.above(0, "rms_norm_eps"),
            max_position_embeddings=f.size("max_position_embeddings", most=MOST_POSITIONS),
            vocab_size=f.size("vocab_size"),
            rope=Rope.from_fields(f),
            windows=windows,
            causal=causal,
            block_size=where.size("block_size"),
            mask_token_id=inner.get("mask_token_id", int),
            target_layer_ids=target_layers(f, inner, layers),
            num_target_layers=size_of(f, inner, "num_target_layers"),
            convolution=convolution(f, inner),
            selector=selector_size(f, inner),
        )
        config.check(f, inner, where)
        return config

    @property
    def feature_width(self) -> int:
        """Values of a position's features: the target's hidden states after `target_layer_ids`."""
        return len(self.target_layer_ids) * self.hidden_size

    def check(self, f: Fields, inner: Fields, where: Fields) -> None:
        if self.block_size < 2:
            raise where.fail("block_size", "at least 2: the anchor and one mask")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise inner.fail("mask_token_id", f"within the vocabulary of {self.vocab_size}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise f.fail("num_key_value_heads", f"must divide num_attention_heads, {self.num_attention_heads}")


def refuse_other_kinds(f: Fields, inner: Fields) -> None:
    """ConfigError for what other drafters of the family have and there is no code for, wherever the key stands.

    attention_mode: of the two names of grouped queries, not of latents; sinks: learnt logits beside the keys;
    sample_from_anchor, markov_rank: DSpark's, which drafts from row 0.
    """
    neutral: dict[str, tuple[object, ...]] = {
        "input_embedding_scale": (1.0, 1), "output_multiplier": (1.0, 1), "attention_mode": ("gqa", "mha"),
        "attention_sink_bias": (False,), "add_swa_attention_sink_bias": (False,),
        "add_full_attention_sink_bias": (False,), "attention_value_scale": (1.0, 1), "partial_rotary_factor": (1.0, 1),
        "is_neox_style": (True,), "use_aux_hidden_state": (True,), "sample_from_anchor": (False,), "markov_rank": (0,),
    }  # fmt: skip
    same = {"draft_vocab_size": "vocab_size", "target_hidden_size": "hidden_size", "v_head_dim": "head_dim"}
    for where in (f, inner):
        for name, allowed in neutral.items():
            where.neutral(name, *allowed)
        where.must_be("final_logit_softcapping", None, None)
        for name, of in same.items():
            if f.values.get(of) is not None:
                where.neutral(name, f.values[of])


def layer_masks(f: Fields, inner: Fields, layers: int) -> tuple[tuple[int | None, ...], tuple[bool, ...]]:
    """Window and causality of each layer. Without an explicit flag, those that `layer_types` calls sliding are causal
    within the block.

    `use_swa` gives every layer a window where `layer_types` gives none: these see both ways. A window is
    `swa_window_size` or `sliding_window`; which one counts where they differ, serving code does not agree on.
    """
    types = f.values.get("layer_types") or ["full_attention"] * layers
    if not isinstance(types, list) or len(types) != layers or any(t not in LAYER_TYPES for t in types):
        raise f.fail("layer_types", f"{layers} of 'sliding_attention' or 'full_attention'")
    sliding = tuple(t == "sliding_attention" for t in types)
    windowed = sliding if any(sliding) or not inner.get("use_swa", bool, False) else (True,) * layers
    explicit = f.values.get("is_causal", inner.values.get("causal"))
    causal = tuple(s if explicit is None else bool(explicit) for s in sliding)
    if not any(windowed):
        return (None,) * layers, causal
    f.neutral("use_sliding_window", True)
    if inner.values.get("swa_window_size") is None:
        window = f.size("sliding_window")
    else:
        window = inner.size("swa_window_size")
        f.neutral("sliding_window", window)
    return tuple(window if w else None for w in windowed), causal


def size_of(f: Fields, inner: Fields, name: str) -> int | None:
    """Of `dflash_config`, else of the top level; None where neither says it."""
    where = inner if inner.values.get(name) is not None else f
    return where.size(name) if where.values.get(name) is not None else None


def convolution(f: Fields, inner: Fields) -> Convolution | None:
    """None where the layers have none: a DFlash of the first kind."""
    if f.values.get("architectures") != ["DFlash2DraftModel"]:
        return None
    taps, group = (size_of(f, inner, f"conv_{name}_size") for name in ("kernel", "group"))
    if taps is None or group is None or f.size("hidden_size") % group:
        raise inner.fail("conv_group_size", f"with conv_kernel_size, and a divisor of {f.size('hidden_size')}")
    return Convolution(taps, group)


def selector_size(f: Fields, inner: Fields) -> SelectorSize | None:
    """None where there is no selector; DFlash 2 has one."""
    rank, top_k = (size_of(f, inner, f"selector_{name}") for name in ("rank", "top_k"))
    if rank is None and top_k is None and f.values.get("architectures") != ["DFlash2DraftModel"]:
        return None
    if rank is None or top_k is None or top_k > min(MOST_PAIRED, f.size("vocab_size")):
        raise inner.fail("selector_top_k", f"with selector_rank, and at most {MOST_PAIRED}")
    return SelectorSize(rank, top_k)


def target_layers(f: Fields, inner: Fields, layers: int) -> tuple[int, ...]:
    """Layers whose outputs are the features; where absent, DFlash's default over the target's depth."""
    ids = inner.integers("target_layer_ids") or f.integers("target_layer_ids")
    if ids:
        return ids
    depth = (inner if inner.values.get("num_target_layers") else f).size("num_target_layers")
    if layers == 1:
        return (depth // 2,)
    return tuple(round(1 + i * (depth - 4) / (layers - 1)) for i in range(layers))
