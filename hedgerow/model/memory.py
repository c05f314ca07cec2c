"""How much memory a rank of a K2-family model needs, and how many tokens of cache are left on a card: arithmetic on the
published shapes, before anything is read.

    weights(c, ranks)              bytes of one rank's tensors, in their published types
    on_card(c, ranks)              bytes of them as the GPU engine keeps them
    token(c)                       bytes that one token takes in the latent cache, on every rank
    tokens(c, ranks, card, extra)  how many fit beside the weights on a card

Activations, CUDA graphs and the collectives' buffers come out of what `USABLE` leaves free.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from hedgerow.model.config import K2Config
from hedgerow.model.tensors import FP8, Wanted, tensors

USABLE = 0.92  # of a card's memory, for weights and cache
SIZE_OF = {"BF16": 2, "F16": 2, "F32": 4, "I32": 4, "I64": 8, "F8_E4M3": 1}
CACHE_SIZE = 2  # bytes of a cached value: bfloat16
DRAFTER = 6_958_554_112  # bytes of a published DFlash drafter for K2.6 in bfloat16: 6.48 GiB, on one rank, undivided
CONTEXT_KV = 176_160_768  # of it that the GPU engine has twice: all layers' keys and values side by side


class Card(NamedTuple):
    """A GPU: bytes that its driver shows."""

    name: str
    memory: int


CARDS = (Card("H200", 150 * 10**9), Card("B300", 288 * 10**9), Card("RTX PRO 6000", 102 * 10**9))


@lru_cache(maxsize=16)  # there are 208,215 of them
def weights(c: K2Config, ranks: int) -> int:
    """Bytes of one rank's tensors; that every tensor divides is checked where a folder is opened."""
    return sum(_bytes(wanted, ranks) for wanted in tensors(c))


def _bytes(wanted: Wanted, ranks: int) -> int:
    return math.prod(wanted.part(ranks)) * SIZE_OF[wanted.dtypes[0]]


@lru_cache(maxsize=16)
def on_card(c: K2Config, ranks: int) -> int:
    """A rank's on a GPU, which keeps the stored types; dense matrices of FP8, which are no experts', become bfloat16,
    and every rank has all of the embedding."""
    dense = (w for w in tensors(c) if w.dtypes[0] == FP8 and ".experts." not in w.name)
    others = 2 * c.vocab_size * c.hidden_size * (ranks - 1) // ranks
    return weights(c, ranks) + sum(math.prod(wanted.part(ranks)) for wanted in dense) + others


def token(c: K2Config) -> int:
    """Bytes that a token takes in the cache: the latent and the rotated key, in every layer."""
    return c.latent_width * c.num_hidden_layers * CACHE_SIZE


def drafter(c: K2Config) -> int:
    """Bytes that a published drafter takes on a GPU: beside its own weights all of the target's embedding and head, of
    which a rank has a part. Its contexts come on top."""
    return DRAFTER + CONTEXT_KV + 2 * 2 * c.vocab_size * c.hidden_size


def tokens(c: K2Config, ranks: int, card: Card, extra: int = 0) -> int:
    """Tokens of cache beside the weights and `extra` bytes; 0 where not even those fit."""
    return max(0, left(c, ranks, card) - extra) // token(c)


def left(c: K2Config, ranks: int, card: Card) -> int:
    """Bytes of `USABLE` that the weights leave; negative where they do not fit."""
    return int(card.memory * USABLE) - on_card(c, ranks)


def table(c: K2Config, ranks: int = 8) -> list[str]:
    """Rows of a Markdown table: box, memory, weights, left, tokens, requests of the full context, tokens with a
    drafter on the fullest rank."""
    rows = []
    for card in CARDS:
        most, beside = tokens(c, ranks, card), tokens(c, ranks, card, drafter(c))
        cells = (
            f"{ranks} x {card.name}", f"{card.memory / 1e9:.0f} GB", f"{on_card(c, ranks) / 1e9:.1f} GB",
            f"{left(c, ranks, card) / 1e9:.1f} GB", f"{most:,}", f"{most * 10 // c.max_position_embeddings / 10:.1f}",
            f"{beside:,}",
        )  # fmt: skip
        rows.append(f"| {' | '.join(cells)} |")
    return rows
