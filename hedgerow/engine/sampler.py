"""The target's draws: what a request's parameters do to a row of logits, and the limits of those parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from hedgerow.engine.types import Sampling
from hedgerow.errors import InvalidRequest, InvariantViolation
from kernels.sample import Law, sample

MAX_TEMPERATURE = 100.0
MAX_STOPS, MAX_STOP_BYTES = 16, 256
MAX_STOP_TOKENS = 64
MAX_BIASES, MAX_BIAS = 1024, 100.0
SEEDS, WORDS = 1 << 63, 1 << 32


class RowDraw(NamedTuple):
    """How one row is drawn. What came before it enters by `offset` alone."""

    sampling: Sampling
    position: int  # absolute, of the token to be drawn; keys the noise
    offset: int  # output tokens before it; min_tokens counts these


def draw(logits: torch.Tensor, rows: Sequence[RowDraw], eos: frozenset[int]) -> list[int]:
    """One token a row of `logits` [R, V] float32, which stays as it is.

    In this order: `logit_bias` is added; below `min_tokens` the tokens of `eos` and `stop_token_ids` are barred, with
    `ignore_eos` too; then temperature, top-k, top-p, min-p and the seeded draw of `kernels.sample`. InvariantViolation
    where a row is not numbers or has every token barred.
    """
    assert logits.shape[0] == len(rows), "one row of logits a draw"
    edited = [i for i, row in enumerate(rows) if row.sampling.logit_bias or row.offset < row.sampling.min_tokens]
    if edited:
        logits = logits.clone()
        for i in edited:
            _edit(logits[i], rows[i], eos)
    try:
        tokens: list[int] = sample(logits, [_law(row) for row in rows]).tolist()
    except ValueError as error:
        raise InvariantViolation(f"cannot draw: {error}") from error
    return tokens


def _edit(row: torch.Tensor, draw: RowDraw, eos: frozenset[int]) -> None:
    sampling = draw.sampling
    if sampling.logit_bias:
        row[list(sampling.logit_bias)] += torch.tensor(list(sampling.logit_bias.values()), dtype=torch.float32)
    if draw.offset < sampling.min_tokens:
        row[[*eos, *sampling.stop_token_ids]] = -torch.inf


def _law(row: RowDraw) -> Law:
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
