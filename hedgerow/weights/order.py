"""The order "rows-1" of a rank's file: what an engine multiplies together lies side by side, row under row.

    embedding | layer 0 | ... | layer N - 1 | norm, head

In a layer: norm; q_a over kv_a; their norms; q_b; kv_b; o; norm; gate over up, with the router under the shared
expert's; down; the router's bias; of all experts the codes of gate over up, then their scales, then the codes of down,
then their scales; at the end what says the shapes. One matrix of an engine is then one range of bytes, and a rank's
file is read from its first byte to its last. Another order gets another name (`hedgerow.model.manifest.ORDERS`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from hedgerow.model.config import K2Config
from hedgerow.model.folder import Stored
from hedgerow.model.headers import Entry
from hedgerow.model.tensors import Wanted, last, layer, matrix

ORDER = "rows-1"
# The matrices of a layer in order; those of one line lie under one another.
LINES = (
    ("input_layernorm",), ("q_a_proj", "kv_a_proj_with_mqa"), ("q_a_layernorm",), ("kv_a_layernorm",), ("q_b_proj",),
    ("kv_b_proj",), ("o_proj",), ("post_attention_layernorm",), ("gate_proj", "up_proj", "gate"), ("down_proj",),
)  # fmt: skip
PLACES = {name: (line, place) for line, names in enumerate(LINES) for place, name in enumerate(names)}
EXPERTS, SHAPES = len(LINES) + 1, len(LINES) + 3


class Place(NamedTuple):
    """Where a tensor stands in its layer."""

    line: int
    scales: bool
    expert: int
    place: int


class Piece(NamedTuple):
    """A tensor of the source that goes into the ranks' files."""

    wanted: Wanted
    entry: Entry


def place(wanted: Wanted) -> Place:
    """By the tensor's name."""
    *base, module, kind = wanted.name.split(".")
    if kind == "e_score_correction_bias":
        return Place(len(LINES), False, 0, 0)
    line, place = PLACES[module]
    expert = int(base[-1]) if "experts" in base else 0
    if kind == "weight_shape":
        return Place(SHAPES, False, expert, line + place)
    if "experts" in base:
        line = EXPERTS + (module == "down_proj")
    return Place(line, "scale" in kind, expert, place)


def parts(c: K2Config, s: Stored) -> Iterator[list[Piece]]:
    """The pieces of each part of the file, in order."""
    yield found([matrix("model.embed_tokens", c.vocab_size, c.hidden_size)], s)
    for number in range(c.num_hidden_layers):
        yield found(sorted(layer(c, number), key=place), s)
    yield found(last(c), s)


def found(wanted: Iterable[Wanted], s: Stored) -> list[Piece]:
    """Those that the folder has: a plain matrix among FP8 ones has no scales."""
    pieces = ((w, s.get(w.name)) for w in wanted)
    return [Piece(w, entry) for w, entry in pieces if entry is not None]
