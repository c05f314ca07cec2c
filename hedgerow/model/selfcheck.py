"""Whether the compiled engine computes what it should on this machine: against PyTorch, and against itself.

Run once at load, on a few random rows; under half a second for the bundled model.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from hedgerow.errors import HedgerowError
from hedgerow.model.batch import SequenceRows
from hedgerow.model.compiled import CompiledK2
from hedgerow.model.interface import Draft, Target
from kernels.mla_tree_attention import PAGE
from kernels.sample import Law
from kernels.tree_accept import WalkRows, walk_trees

TOLERANCE = 1e-4  # of a logit, or of the logits' standard deviation where that is above 1
PROMPT = 70  # crosses a page
PARENTS = (-1, 0, 0, 1, 1, 3, 5, 2, 6)  # a tree: its deepest path is DEEPEST
DEEPEST = (0, 1, 3, 5, 6, 8)
PAGES = (2, 0)
CROWD = 150  # rows: more than a tile has, and some

LAWS = (Law(0.0, 0, 1.0, 0.0, 1, 0, 80), Law(1.0, 0, 1.0, 0.0, 2, 0, 80), Law(0.8, 50, 0.9, 0.01, 3, 1, 80))


class SelfCheckFailed(HedgerowError):
    """`what` was found; the engine must not be used."""

    reason = "SELF_CHECK_FAILED"

    def __init__(self, what: str) -> None:
        super().__init__(f"self-check: {what}")


def check_target(model: CompiledK2, reference: Target) -> None:
    """Raises SelfCheckFailed. A model of fewer than 128 positions is checked without the prompt's second page."""
    prompt, tree = texts(model)
    logits = tree_logits(model, prompt, tree, [len(prompt)])
    compare(logits, tree_logits(reference, prompt, tree, [len(prompt)]))
    check_rows(model)
    for law in LAWS:
        rows = [WalkRows(0, PARENTS, tree, law), *(WalkRows(i, (-1,), (0,), law) for i in range(len(tree)))]
        if model.walk(logits, rows) != walk_trees(logits, rows):
            raise SelfCheckFailed(f"other tokens are drawn than PyTorch draws, with {law}")


def texts(model: Target) -> tuple[list[int], list[int]]:
    """A prompt, and the tokens of a tree below it."""
    choose, vocab = random.Random(0), model.config.vocab_size
    length = min(PROMPT, model.config.max_position_embeddings - len(PARENTS))
    return [choose.randrange(vocab) for _ in range(length)], [choose.randrange(vocab) for _ in PARENTS]


def check_rows(model: Target) -> None:
    """SelfCheckFailed where a row's bits depend on what stands beside it."""
    prompt, tree = texts(model)
    length = len(prompt)
    logits = tree_logits(model, prompt, tree, [length])
    if not torch.equal(logits, tree_logits(model, prompt, tree, [1, 7, length - 8])):
        raise SelfCheckFailed("a prompt in chunks leaves other bits than the prompt at once")
    alone = plain_logits(model, prompt, [tree[row] for row in DEEPEST])
    if not torch.equal(logits[list(DEEPEST)], alone):
        raise SelfCheckFailed("a row in a tree has other bits than the row alone")
    if model.architecture.startswith("cuda"):
        check_crowds(model)


def check_crowds(model: Target) -> None:
    """SelfCheckFailed where a row's bits depend on how many there are: alone in a step, and beside `CROWD` others.

    For devices whose products have tiles, or a matrix unit, by the number of rows.
    """
    prompt, tree = texts(model)
    length, cache = len(prompt), model.new_cache(len(PAGES) + 1 + -(-CROWD // PAGE))
    chunk = min(CROWD, model.config.max_position_embeddings)
    model.forward([SequenceRows(0, PAGES, prompt, range(-1, length - 1), [], True)], cache)
    root = SequenceRows(length, PAGES, tree[:1], [-1], [0])
    beside = SequenceRows(0, range(3, cache.pages), [tree[0]] * chunk, range(-1, chunk - 1), [], True)
    alone = model.forward([root], cache).logits.clone()
    if not torch.equal(alone, model.forward([root, beside], cache).logits):
        raise SelfCheckFailed(f"a row beside {chunk} others has other bits than the row alone")
    if not torch.equal(alone[0], tree_logits(model, prompt, tree, [length])[0]):
        raise SelfCheckFailed("a row with a tree has other bits than the row alone")


def check_drafter(model: Draft, reference: Draft) -> None:
    """Raises SelfCheckFailed. Two contexts, one of which begins late and crosses a page."""
    draw = torch.Generator().manual_seed(0)
    most = model.config.max_position_embeddings - model.block_size
    lengths, starts = (min(5, most), min(PROMPT, most)), (0, min(30, most - min(PROMPT, most)))
    features = [torch.randn(length, model.feature_width, generator=draw) for length in lengths]
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    drafts = []
    for drafter in (model, reference):
        states = [drafter.new_state() for _ in features]
        for state, start, rows in zip(states, starts, features, strict=True):
            state.reset(start)
            drafter.append(state, rows, start)
        drafts.append(drafter.draft(states, [0, model.vocab_size - 1], ends))
    compare(*drafts)
    trees, expected = (drafter.trees(drafts[1], [16, 5], [0, 2]) for drafter in (model, reference))
    for tree, other in zip(trees, expected, strict=True):
        if len(tree.tokens) != len(other.tokens):
            raise SelfCheckFailed(f"a tree of {len(tree.tokens)} nodes, PyTorch's has {len(other.tokens)}")
        compare(torch.tensor(tree.logprobs), torch.tensor(other.logprobs))


def compare(logits: torch.Tensor, reference: torch.Tensor) -> None:
    """SelfCheckFailed where the two differ by more than rounding."""
    apart = float((logits - reference).abs().max())
    limit = TOLERANCE * max(1.0, float(reference.std()))
    if not apart <= limit:  # NaN is not
        raise SelfCheckFailed(f"logits differ from PyTorch's by {apart:.1e}, the limit is {limit:.1e}")


def tree_logits(model: Target, prompt: Sequence[int], tree: Sequence[int], chunks: Sequence[int]) -> torch.Tensor:
    """Logits of all rows of the tree after the prompt, which is computed in `chunks`."""
    cache, begin = model.new_cache(3), 0
    for rows in chunks:
        model.forward([SequenceRows(begin, PAGES, prompt[begin : begin + rows], range(-1, rows - 1), [], True)], cache)
        begin += rows
    return model.forward([SequenceRows(begin, PAGES, tree, PARENTS, range(len(tree)))], cache).logits.clone()


def plain_logits(model: Target, prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
    """Logits of `tokens`, one step each, beside another sequence."""
    cache, other = model.new_cache(3), SequenceRows(0, [1], tokens, range(-1, len(tokens) - 1), [0])
    model.forward([SequenceRows(0, PAGES, prompt, range(-1, len(prompt) - 1), [], True)], cache)
    rows = []
    for i, token in enumerate(tokens):
        mine = SequenceRows(len(prompt) + i, PAGES, [token], [-1], [0])
        rows.append(model.forward([other, mine], cache).logits[-1].clone())
    return torch.stack(rows)
