"""From a block's logits to trees on the compiled CPU engine (kernels/cpu/trees.c): the op kernels/tree_build.py.

Of the same marginals the same trees, bit for bit; the marginals' own last bits are this engine's.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch

from kernels.cpu.library import NO_MEMORY, Library
from kernels.tree_build import PlainTree


class Best(NamedTuple):
    """The best tokens of each depth, best first, as C reads them: [S, L, K] flat."""

    logprobs: array[float]
    tokens: array[int]
    shape: tuple[int, int, int]


def compiled_trees(
    library: Library, logits: torch.Tensor, budgets: Sequence[int], caps: Sequence[int]
) -> list[PlainTree]:
    """`kernels.tree_build.plain_trees`: logits [S, L, V], budgets of 256 nodes at most."""
    if not budgets:
        return []
    ranks = max(min(cap or budget, budget) for budget, cap in zip(budgets, caps, strict=True))
    return build(library, best_tokens(library, logits, max(ranks, 1)), budgets, caps)


def best_tokens(library: Library, logits: torch.Tensor, k: int) -> Best:
    """`kernels.tree_build.top_logprobs`. No tensor is made: that is slow while nothing of torch is in the caches."""
    sequences, depth, vocabulary = logits.shape
    if not logits.is_contiguous():
        logits = logits.contiguous()
    k, rows = min(k, vocabulary), sequences * depth
    logprobs, tokens = array("f", bytes(4 * rows * k)), array("i", bytes(4 * rows * k))
    code = library.functions.top_logprobs(
        logits.data_ptr(), rows, vocabulary, k, logprobs.buffer_info()[0], tokens.buffer_info()[0]
    )
    assert code == 0, (code, logits.shape, k)
    return Best(logprobs, tokens, (sequences, depth, k))


def build(library: Library, best: Best, budgets: Sequence[int], caps: Sequence[int]) -> list[PlainTree]:
    """`kernels.tree_build.tree_build`. MemoryError."""
    (sequences, depth, width), nodes = best.shape, max(budgets)
    assert sequences == len(budgets) == len(caps), (sequences, budgets, caps)
    pairs = ((budget, min(cap, nodes)) for budget, cap in zip(budgets, caps, strict=True))  # a cap above cuts nothing
    ask = array("i", (number for pair in pairs for number in pair))  # walk.h's TreeAsk
    size = sequences * nodes
    tokens, parents, counts = (array("i", bytes(4 * count)) for count in (size, size, sequences))
    logprobs = array("f", bytes(4 * size))
    code = library.functions.build_trees(
        best.logprobs.buffer_info()[0], best.tokens.buffer_info()[0], sequences, depth, width, nodes,
        *(numbers.buffer_info()[0] for numbers in (ask, tokens, parents, logprobs, counts)),
    )  # fmt: skip
    if code == NO_MEMORY:
        raise MemoryError("no memory for a tree")
    assert code == 0, (code, best.shape, budgets)
    return read_trees(nodes, tokens, parents, logprobs, counts)


def read_trees(
    nodes: int, tokens: array[int], parents: array[int], logprobs: array[float], counts: array[int]
) -> list[PlainTree]:
    """Of [S, nodes] the first `counts` of each sequence."""
    parts = (slice(s * nodes, s * nodes + count) for s, count in enumerate(counts))
    return [PlainTree(tokens[p].tolist(), parents[p].tolist(), logprobs[p].tolist()) for p in parts]
