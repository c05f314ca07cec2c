"""What a request's parameters do to its rows, and which parameters are refused."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from hedgerow.engine.sampler import RowDraw, draw, validate_sampling
from hedgerow.engine.types import Sampling
from hedgerow.errors import InvalidRequest, InvariantViolation

VOCABULARY = 50
EOS = frozenset({3})


def logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed))


def test_greedy_is_the_default() -> None:
    x = logits(5)
    assert draw(x, [RowDraw(Sampling(), 10 + i, i) for i in range(5)], EOS) == x.argmax(1).tolist()


def test_no_rows_draw_nothing() -> None:
    assert draw(logits(0), [], EOS) == []


def test_ends_are_barred_until_min_tokens_have_come() -> None:
    """Offsets below min_tokens bar eos and stop tokens, ignore_eos or not; the offset itself is free again."""
    x = logits(1).repeat(4, 1)
    x[:, 3], x[:, 8], x[:, 20] = 9.0, 8.0, 7.0
    for ignore_eos in (False, True):
        sampling = Sampling(min_tokens=2, stop_token_ids=(8,), ignore_eos=ignore_eos)
        rows = [RowDraw(sampling, 100 + offset, offset) for offset in range(4)]
        assert draw(x, rows, EOS) == [20, 20, 3, 3]
        biased = replace(sampling, logit_bias={20: 0.5})  # a bias must not bar them longer
        assert draw(x, [row._replace(sampling=biased) for row in rows], EOS) == [20, 20, 3, 3]
    seeded = replace(sampling, temperature=1.0, seed=5)
    assert not {3, 8} & set(draw(x.repeat(50, 1), [RowDraw(seeded, i, i % 2) for i in range(200)], EOS))


def test_a_bias_moves_the_choice_of_its_own_rows_only() -> None:
    x = logits(3)
    best = x.argmax(1).tolist()
    biased = Sampling(logit_bias={7: 100.0, best[1]: -100.0})
    assert draw(x, [RowDraw(Sampling(), 1, 0), RowDraw(biased, 1, 0), RowDraw(Sampling(), 1, 0)], EOS) == [
        best[0],
        7,
        best[2],
    ]


def test_the_callers_logits_stay_as_they_are() -> None:
    x = logits(2)
    before = x.clone()
    rows = [RowDraw(Sampling(min_tokens=9, logit_bias={1: 5.0}, temperature=0.7, top_p=0.9), 5, 0)] * 2
    draw(x, rows, EOS)
    assert torch.equal(x, before)


@torch.inference_mode()
def test_logits_of_a_forward_pass_can_be_edited() -> None:
    """Tensors of inference mode refuse in-place changes from outside it; a clone inside does not."""
    assert draw(logits(1), [RowDraw(Sampling(logit_bias={11: 50.0}), 5, 0)], EOS) == [11]


def test_a_biased_row_draws_the_same_alone_and_in_company() -> None:
    x = logits(40, seed=2)
    kinds = [
        Sampling(),
        Sampling(temperature=1.0, seed=9),
        Sampling(temperature=0.8, top_p=0.9, seed=1, logit_bias={4: 2.0, 5: -3.0}),
        Sampling(temperature=0.7, top_k=20, min_tokens=4, stop_token_ids=(1, 2), seed=2),
    ]
    rows = [RowDraw(kinds[i % 4], 30 + i % 6, i % 6) for i in range(40)]
    together = draw(x, rows, EOS)
    assert together == [draw(x[i : i + 1], rows[i : i + 1], EOS)[0] for i in range(40)]


def test_seed_sample_and_position_are_told_apart() -> None:
    x = torch.zeros(1, VOCABULARY)
    base = Sampling(temperature=1.0, seed=1)
    others = [replace(base, seed=s) for s in (1, 2, 1 << 40)] + [replace(base, sample_index=i) for i in (1, 2)]
    drawn = [tuple(draw(x, [RowDraw(s, position, 0)], EOS)[0] for position in range(20)) for s in others]
    assert len(set(drawn)) == len(others)


def test_the_offset_alone_changes_no_draw() -> None:
    x = logits(1).repeat(9, 1)
    assert len(set(draw(x, [RowDraw(Sampling(temperature=1.0), 77, offset) for offset in range(9)], EOS))) == 1


def test_a_row_without_numbers_is_loud() -> None:
    x = logits(2)
    x[1, 0] = math.nan
    with pytest.raises(InvariantViolation, match="row 1"):
        draw(x, [RowDraw(Sampling(), 5, 0)] * 2, EOS)


LEAST = Sampling(temperature=0.0, top_p=1e-12, min_p=0.0, top_k=0, seed=0, max_tokens=1, min_tokens=0)
MOST = Sampling(
    temperature=100.0,
    top_p=1.0,
    min_p=1.0,
    top_k=2**32 - 1,
    seed=2**63 - 1,
    sample_index=2**32 - 1,
    max_tokens=2**32 - 1,
    stop=("é" * 128,) * 16,
    stop_token_ids=(VOCABULARY - 1,) * 64,
    logit_bias={0: -100.0, VOCABULARY - 1: 100.0},
)


@pytest.mark.parametrize("sampling", [Sampling(), LEAST, MOST])
def test_parameters_at_their_limits_pass(sampling: Sampling) -> None:
    validate_sampling(sampling, VOCABULARY)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 100.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.0001),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("min_p", math.nan),
        ("top_k", -1),
        ("seed", -1),
        ("seed", 2**63),
        ("sample_index", -1),
        ("sample_index", 2**32),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("stop", ("a",) * 17),
        ("stop", ("ok", "é" * 129)),
        ("stop", ("",)),
        ("stop_token_ids", (1,) * 65),
        ("stop_token_ids", (VOCABULARY,)),
        ("stop_token_ids", (-1,)),
        ("logit_bias", dict.fromkeys(range(1025), 0.0)),
        ("logit_bias", {VOCABULARY: 1.0}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: 100.5}),
        ("logit_bias", {1: math.nan}),
    ],
)
def test_a_parameter_out_of_its_limits_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        validate_sampling(replace(Sampling(), **{field: value}), VOCABULARY)
    assert refused.value.field == field
    assert refused.value.limit
    assert len(refused.value.metadata["value"]) <= 80
