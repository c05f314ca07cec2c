"""From a block's logits to trees on the compiled CPU engine (kernels/cpu/trees.c): the op kernels/tree_build.py.

Of the same marginals the same trees, bit for bit; the marginals' own last bits are this engine's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.cpu.library import Library, TreeAsk
from kernels.tree_build import PlainTree, TopLogprobs

NO_MEMORY = 11


def compiled_trees(
    library: Library, logits: torch.Tensor, budgets: Sequence[int], caps: Sequence[int]
) -> list[PlainTree]:
    """`kernels.tree_build.plain_trees`: logits [S, L, V], budgets of 256 nodes at most."""
    if not budgets:
        return []
    ranks = max(min(cap or budget, budget) for budget, cap in zip(budgets, caps, strict=True))
    return build(library, top_logprobs(library, logits, max(ranks, 1)), budgets, caps)


def top_logprobs(library: Library, logits: torch.Tensor, k: int) -> TopLogprobs:
    """As the op of that name, tokens in int32."""
    *shape, vocabulary = logits.shape
    logits, k = logits.contiguous(), min(k, vocabulary)
    logprobs, tokens = torch.empty(*shape, k), torch.empty(*shape, k, dtype=torch.int32)
    rows = logits.numel() // vocabulary
    code = library.functions.top_logprobs(
        logits.data_ptr(), rows, vocabulary, k, logprobs.data_ptr(), tokens.data_ptr()
    )
    assert code == 0, (code, logits.shape, k)
    return TopLogprobs(logprobs, tokens)


def build(library: Library, best: TopLogprobs, budgets: Sequence[int], caps: Sequence[int]) -> list[PlainTree]:
    """As the op `tree_build`, tokens in int32. MemoryError."""
    (sequences, depth, width), nodes = best.logprobs.shape, max(budgets)
    assert sequences == len(budgets) == len(caps), (sequences, budgets, caps)
    ask = (TreeAsk * sequences)(*(TreeAsk(*pair) for pair in zip(budgets, caps, strict=True)))
    numbers = torch.empty(2 * sequences * nodes + sequences, dtype=torch.int32)
    sums, at, size = torch.empty(sequences * nodes), numbers.data_ptr(), 4 * sequences * nodes
    code = library.functions.build_trees(
        best.logprobs.data_ptr(), best.tokens.data_ptr(), sequences, depth, width, nodes, ask,
        at, at + size, sums.data_ptr(), at + 2 * size,
    )  # fmt: skip
    if code == NO_MEMORY:
        raise MemoryError("no memory for a tree")
    assert code == 0, (code, best.logprobs.shape, budgets)
    words, logprobs = numbers.tolist(), sums.tolist()
    parents, counts = sequences * nodes, words[2 * sequences * nodes :]
    return [
        PlainTree(words[i : i + n], words[parents + i : parents + i + n], logprobs[i : i + n])
        for i, n in zip(range(0, sequences * nodes, nodes) if nodes else [0] * sequences, counts, strict=True)
    ]
