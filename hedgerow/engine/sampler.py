"""The target's draws: what a request's parameters do to a row of logits, and the limits of those parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from hedgerow.engine.types import Sampling
from hedgerow.errors import InvalidRequest, InvariantViolation
from kernels.sample import Law
from kernels.tree_accept import Walked, WalkRows, walk_trees

MAX_TEMPERATURE = 100.0
MAX_STOPS, MAX_STOP_BYTES = 16, 256
MAX_STOP_TOKENS = 64
MAX_BIASES, MAX_BIAS = 1024, 100.0
SEEDS, WORDS = 1 << 63, 1 << 32


WalkTrees = Callable[[torch.Tensor, Sequence[WalkRows]], list[Walked]]  # a target's `walk`


class RowDraw(NamedTuple):
    """How one row is drawn. What came before it enters by `offset` alone."""

    sampling: Sampling
    position: int  # absolute, of the token to be drawn; keys the noise
    offset: int  # output tokens before it; min_tokens counts these


class DrawnTree(NamedTuple):
    """One sequence's rows of logits, from `first` on: the anchor's and its nodes', parents before children."""

    first: int
    parents: Sequence[int]  # -1: row 0 has none
    tokens: Sequence[int]
    depths: Sequence[int]  # 0 of row 0
    draw: RowDraw  # of row 0; the others draw later positions and offsets


def draw(logits: torch.Tensor, rows: Sequence[RowDraw], eos: frozenset[int], walk: WalkTrees = walk_trees) -> list[int]:
    """One token a row of `logits` [R, V] float32, which stays as it is; the rest as in `walk`."""
    assert logits.shape[0] == len(rows), "one row of logits a draw"
    trees = [DrawnTree(i, (-1,), (0,), (0,), row) for i, row in enumerate(rows)]
    return [walked.bonus for walked in follow(logits, trees, eos, walk)]


def follow(logits: torch.Tensor, trees: Sequence[DrawnTree], eos: frozenset[int], walk: WalkTrees) -> list[Walked]:
    """Draws from `logits` [R, V] float32, which stays as it is, and follows the draws down every tree.

    In this order: `logit_bias` is added; below `min_tokens` the tokens of `eos` and `stop_token_ids` are barred, with
    `ignore_eos` too; then temperature, top-k, top-p, min-p and the seeded draw of `kernels.sample`. InvariantViolation
    where a row that is drawn is not numbers or has every token barred.
    """
    if not trees:
        return []
    edited = [tree for tree in trees if edits(tree.draw)]
    if edited:
        logits = logits.clone()
        for tree in edited:
            for row, depth in enumerate(tree.depths):
                _edit(logits[tree.first + row], tree.draw._replace(offset=tree.draw.offset + depth), eos)
    with drawing():
        return walk(logits, walk_rows(trees))


def walk_rows(trees: Sequence[DrawnTree]) -> list[WalkRows]:
    """What `walk` is asked for trees whose logits are as they should be drawn."""
    return [WalkRows(tree.first, tree.parents, tree.tokens, law_of(tree.draw)) for tree in trees]


@contextmanager
def drawing() -> Iterator[None]:
    """InvariantViolation for a row that cannot be drawn."""
    try:
        yield
    except ValueError as error:
        raise InvariantViolation(f"cannot draw: {error}") from error


def edits(draw: RowDraw) -> bool:
    """Whether logits are changed before the draw."""
    return bool(draw.sampling.logit_bias) or draw.offset < draw.sampling.min_tokens


def _edit(row: torch.Tensor, draw: RowDraw, eos: frozenset[int]) -> None:
    sampling = draw.sampling
    if sampling.logit_bias:
        row[list(sampling.logit_bias)] += torch.tensor(
            list(sampling.logit_bias.values()), dtype=torch.float32, device=row.device
        )
    if draw.offset < sampling.min_tokens:
        row[[*eos, *sampling.stop_token_ids]] = -torch.inf


def law_of(row: RowDraw) -> Law:
    """How the row's token is drawn, where nothing changes its logits."""
    s = row.sampling
    return Law(s.temperature, s.top_k, s.top_p, s.min_p, s.seed, s.sample_index, row.position)


def validate_sampling(sampling: Sampling, vocab_size: int) -> None:
    """InvalidRequest with field, value and limit, for the first parameter that is out of its limits."""
    s = sampling
    _check("temperature", s.temperature, 0 <= s.temperature <= MAX_TEMPERATURE, "0 to 100")
    _check("top_k", s.top_k, s.top_k >= 0, "at least 0")
    _check("top_p", s.top_p, 0 < s.top_p <= 1, "above 0, at most 1")
    _check("min_p", s.min_p, 0 <= s.min_p <= 1, "0 to 1")
    _check("seed", s.seed, 0 <= s.seed < SEEDS, "0 to 2^63 - 1")
    _check("sample_index", s.sample_index, 0 <= s.sample_index < WORDS, "0 to 2^32 - 1")
    _check("max_tokens", s.max_tokens, s.max_tokens >= 1, "at least 1")
    _check("min_tokens", s.min_tokens, s.min_tokens >= 0, "at least 0")
    _check("stop", len(s.stop), len(s.stop) <= MAX_STOPS, f"at most {MAX_STOPS} strings")
    for stop in s.stop:
        # a lone surrogate takes three bytes here; whoever encodes it for matching refuses it
        size = len(stop.encode("utf-8", "surrogatepass"))
        _check("stop", stop, 1 <= size <= MAX_STOP_BYTES, f"1 to {MAX_STOP_BYTES} bytes a string")
    _check_tokens(s, vocab_size)


def _check_tokens(s: Sampling, vocab_size: int) -> None:
    count = len(s.stop_token_ids)
    _check("stop_token_ids", count, count <= MAX_STOP_TOKENS, f"at most {MAX_STOP_TOKENS} tokens")
    for token in s.stop_token_ids:
        _check("stop_token_ids", token, 0 <= token < vocab_size, f"0 to {vocab_size - 1}")
    _check("logit_bias", len(s.logit_bias), len(s.logit_bias) <= MAX_BIASES, f"at most {MAX_BIASES} entries")
    for token, bias in s.logit_bias.items():
        _check("logit_bias", token, 0 <= token < vocab_size, f"tokens from 0 to {vocab_size - 1}")
        _check("logit_bias", bias, -MAX_BIAS <= bias <= MAX_BIAS, "-100 to 100")


def _check(field: str, value: object, holds: bool, limit: str) -> None:
    if not holds:
        raise InvalidRequest(field, value, limit)
