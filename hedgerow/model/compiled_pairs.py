"""Conditional trees on the compiled CPU engine (kernels/cpu/pairs.c): the selector's scores, and the search over them.

Of the same scores the trees are those of `kernels.tree_pairs.tree_pairs_heap`, bit for bit; the scores' own last bits
are this engine's, as its marginals' are.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch

from hedgerow.errors import InvalidRequest
from hedgerow.model.compiled_trees import read_trees
from hedgerow.model.selector import Selector
from kernels.cpu.library import NO_MEMORY, Library, PairWeights
from kernels.tree_build import PlainTree


class FlatPairs(NamedTuple):
    """What `kernels.tree_pairs` takes, as C reads it."""

    logprobs: array[float]  # [S, L, K, K]
    choice: array[int]  # [S, L, K, K]
    tokens: array[int]  # [S, L, K]
    shape: tuple[int, int, int]  # S, L, K


def pair_trees(
    library: Library,
    selector: Selector,
    logits: torch.Tensor,
    hidden: torch.Tensor,
    anchors: Sequence[int],
    budgets: Sequence[int],
    caps: Sequence[int],
) -> list[PlainTree]:
    """One tree a sequence of logits [S, L, V] and hidden [S, L, H]; budgets of 256 nodes at most."""
    if not budgets:
        return []
    ask = tree_asks(budgets, caps)
    return build(library, pair_logprobs(library, selector, logits, hidden, anchors, ask), budgets, ask)


def tree_asks(budgets: Sequence[int], caps: Sequence[int]) -> array[int]:
    """walk.h's TreeAsk, one a sequence."""
    return array("i", (number for pair in zip(budgets, caps, strict=True) for number in pair))


def pair_logprobs(
    library: Library,
    selector: Selector,
    logits: torch.Tensor,
    hidden: torch.Tensor,
    anchors: Sequence[int],
    ask: array[int],
) -> FlatPairs:
    """`Selector.pairs`. InvalidRequest for an anchor that is no token; MemoryError."""
    sequences, depth, vocabulary = logits.shape
    if not all(0 <= anchor < vocabulary for anchor in anchors):
        raise InvalidRequest("anchors", list(anchors), f"within the vocabulary of {vocabulary}")
    logits, hidden = logits.contiguous(), hidden.contiguous()
    k, rank = min(selector.top_k, vocabulary), selector.projection.shape[1]
    weights = PairWeights(
        selector.predecessor.data_ptr(), selector.successor.data_ptr(), selector.projection.data_ptr(), rank, k,
        hidden.shape[-1], vocabulary,
    )  # fmt: skip
    pairs, rows = sequences * depth * k * k, sequences * depth * k
    out = FlatPairs(
        array("f", bytes(4 * pairs)), array("i", bytes(4 * pairs)), array("i", bytes(4 * rows)), (sequences, depth, k)
    )
    before = array("i", anchors)
    code = library.functions.pair_logprobs(
        weights, logits.data_ptr(), hidden.data_ptr(), before.buffer_info()[0], sequences, depth,
        *(numbers.buffer_info()[0] for numbers in (ask, out.logprobs, out.choice, out.tokens)),
    )  # fmt: skip
    if code == NO_MEMORY:
        raise MemoryError("no memory for a tree's scores")
    assert code == 0, (code, logits.shape, selector.top_k)
    return out


def build(library: Library, pairs: FlatPairs, budgets: Sequence[int], ask: array[int]) -> list[PlainTree]:
    """`kernels.tree_pairs.tree_pairs_heap` for every sequence. MemoryError."""
    (sequences, depth, width), nodes = pairs.shape, max(budgets)
    size = sequences * nodes
    tokens, parents, counts = (array("i", bytes(4 * count)) for count in (size, size, sequences))
    logprobs = array("f", bytes(4 * size))
    code = library.functions.build_pair_trees(
        *(numbers.buffer_info()[0] for numbers in pairs[:3]), sequences, depth, width, nodes,
        *(numbers.buffer_info()[0] for numbers in (ask, tokens, parents, logprobs, counts)),
    )  # fmt: skip
    if code == NO_MEMORY:
        raise MemoryError("no memory for a tree")
    assert code == 0, (code, pairs.shape, budgets)
    return read_trees(nodes, tokens, parents, logprobs, counts)
