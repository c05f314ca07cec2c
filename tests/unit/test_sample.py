"""The draw of one row: known noise, exact filters, one row's bits alone and in any batch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.sample import Law, _exponential, _own_noise, _shared_noise, _weights, keep, philox, sample

PLAIN = Law(1.0, 0, 1.0, 0.0, seed=7, sample_index=0, position=100)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def drawn(logits: torch.Tensor, *laws: Law) -> list[int]:
    return sample(logits, laws).tolist()


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_gives_the_published_answers(counter: str, key: str, words: str) -> None:
    """Random123's kat_vectors for philox4x32-10."""
    as_words = [np.array([int(word, 16) for word in text.split()], np.uint64) for text in (counter, key)]
    assert " ".join(f"{int(word):08x}" for word in philox(*as_words)) == words
    wide = [np.tile(values[:, None], 5) for values in as_words]  # every lane alike
    assert (philox(*wide) == philox(*as_words)[:, None]).all()


def plain_philox(counter: list[int], key: list[int]) -> list[int]:
    """Written out from the paper, in Python integers."""
    c, k, low = list(counter), list(key), 0xFFFFFFFF
    for _ in range(10):
        p0, p1 = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & low, (p0 >> 32) ^ c[3] ^ k[1], p0 & low]
        k = [(k[0] + 0x9E3779B9) & low, (k[1] + 0xBB67AE85) & low]
    return c


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**32, 2**63 - 1])
def test_noise_is_a_function_of_seed_sample_position_and_token(seed: int) -> None:
    for sample_index, position in [(0, 0), (3, 5), (2**32 - 1, 2**32 - 1)]:
        noise = _shared_noise([PLAIN._replace(seed=seed, sample_index=sample_index, position=position)], 11)
        (values,) = noise.values()
        for token in range(11):
            word = plain_philox([token // 4, position, sample_index, 0], [seed & 0xFFFFFFFF, seed >> 32])[token % 4]
            assert float(values[token]) == pytest.approx(-math.log1p(-(word + 0.5) / 2**32), rel=1e-6)


def test_noise_has_the_same_bits_alone_and_in_any_company() -> None:
    """Whole vocabularies, kept tokens at any place among others: one value a key."""
    g = np.random.default_rng(0)
    laws = [PLAIN._replace(seed=i % 3, position=i % 7) for i in range(64)]
    for vocabulary in (1, 6, 509, 4096):
        together = _shared_noise(laws, vocabulary)
        kept = [np.sort(g.permutation(vocabulary)[: g.integers(1, min(vocabulary, 40) + 1)]) for _ in laws]
        for law, ids, own in zip(laws, kept, _own_noise(laws, kept), strict=True):
            alone = _shared_noise([law], vocabulary)[law.key]
            assert (alone.view(np.int32) == together[law.key].view(np.int32)).all()
            assert (own.view(np.int32) == alone[ids].view(np.int32)).all()
            assert (_own_noise([law], [ids])[0].view(np.int32) == own.view(np.int32)).all()


@pytest.mark.parametrize("threads", [1, 2])
def test_the_logarithm_does_not_depend_on_the_place_in_memory(threads: int) -> None:
    """Vector and scalar code of a math library may round differently; a row's place decides which one it gets."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    words = np.random.default_rng(1).integers(0, 2**32, 70_003).astype(np.float32)
    whole = _exponential(words.copy()).view(np.int32)
    for begin in range(33):
        for length in (1, 2, 3, 5, 8, 15, 31, 4096, 69_900):
            part = words[begin : begin + length].copy()
            assert (_exponential(part).view(np.int32) == whole[begin : begin + length]).all()
    torch.set_num_threads(before)


def test_noise_is_finite_and_positive_at_both_ends() -> None:
    extremes = _exponential(np.array([0, 1, 2**32 - 1], np.float64).astype(np.float32))
    assert (extremes > 0).all()
    assert np.isfinite(extremes).all()
    assert extremes[0] == pytest.approx(2.0**-33)


def mixed_laws(count: int, seed: int) -> list[Law]:
    """Every kind of row, several of the same position, as in a batch of trees."""
    g = np.random.default_rng(seed)
    kinds = [
        Law(0.0, 0, 1.0, 0.0, 1, 0, 0),
        Law(1.0, 0, 1.0, 0.0, 2, 0, 0),
        Law(0.8, 0, 0.95, 0.0, 3, 1, 0),
        Law(0.7, 20, 1.0, 0.0, 2**63 - 1, 0, 0),
        Law(1.3, 0, 1.0, 0.05, 5, 0, 0),
        Law(0.9, 40, 0.9, 0.02, 6, 2, 0),
        Law(2.0, 0, 0.999, 0.0, 7, 0, 0),
    ]
    return [
        kinds[i]._replace(position=int(p))
        for i, p in zip(g.integers(0, 7, count), g.integers(0, 9, count), strict=True)
    ]


@pytest.mark.parametrize("vocabulary", [5, 509, 4096])
def test_a_row_draws_the_same_alone_and_in_any_batch(vocabulary: int) -> None:
    logits, laws = randn(64, vocabulary, seed=vocabulary) * 3, mixed_laws(64, vocabulary)
    alone = [drawn(logits[i : i + 1], laws[i])[0] for i in range(64)]
    for count in range(1, 65, 1 if vocabulary < 4096 else 9):
        first = (count * 7) % (65 - count)
        rows = slice(first, first + count)
        assert drawn(logits[rows], *laws[rows]) == alone[rows]
    backwards = list(reversed(range(64)))
    assert drawn(logits[backwards], *[laws[i] for i in backwards]) == [alone[i] for i in backwards]
    strided = torch.stack([logits, logits + 1], 1).flatten(1)[:, :vocabulary]  # rows that are not neighbours in memory
    assert drawn(strided, *laws) == alone


def weights(row: Any, temperature: float = 0.8) -> Any:
    return _weights(row[None], row.max(keepdims=True), [temperature])[0]


@pytest.mark.filterwarnings("ignore:overflow")  # of rows that are only in the way
def test_weights_have_the_same_bits_wherever_the_row_lies() -> None:
    row = randn(509, seed=3).numpy() * 5
    expected = weights(row.copy()).view(np.int32)
    memory = np.zeros(10 * 509 + 64, np.float32)
    for begin in range(65):
        memory[begin : begin + 509] = row
        assert (weights(memory[begin : begin + 509]).view(np.int32) == expected).all()
    for count in range(1, 10):  # as any row of several
        for place in range(count):
            rows = memory[64 : 64 + count * 509].reshape(count, 509)
            rows[place] = row
            peaks, temperatures = np.full(count, row.max()), [0.3] * count
            temperatures[place] = 0.8
            assert (_weights(rows, peaks, temperatures)[place].view(np.int32) == expected).all()


def test_greedy_takes_the_lowest_id_of_equal_logits() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [5.0, 5.0, 5.0, 5.0], [-1.0, -2.0, -1.0, -0.5]])
    assert drawn(logits, *[PLAIN._replace(temperature=0.0)] * 3) == [1, 0, 3]


def test_rows_of_one_position_share_their_noise() -> None:
    """So a token drawn in a tree is the one that plain decoding draws there."""
    logits = randn(1, 300, seed=1).repeat(6, 1)
    for law in (PLAIN, PLAIN._replace(top_p=0.9), PLAIN._replace(top_k=30)):
        assert len(set(drawn(logits, *[law] * 6))) == 1
        spread = drawn(logits, *[law._replace(position=position) for position in range(6)])
        assert len(set(spread)) > 1


def test_a_filter_that_keeps_everything_draws_as_no_filter_does() -> None:
    logits = randn(50, 400, seed=2)
    laws = [PLAIN._replace(position=position) for position in range(50)]
    expected = drawn(logits, *laws)
    for whole in ({"top_p": 1 - 1e-15}, {"top_k": 400}, {"top_k": 10**9}, {"min_p": 1e-30}):
        assert drawn(logits, *[law._replace(**whole) for law in laws]) == expected


def oracle(x: list[float], law: Law) -> list[int]:
    """The filters as the docstring of kernels.sample has them, in plain Python and float64."""
    order = sorted(range(len(x)), key=lambda v: (-x[v], v))
    w = [math.exp((value - max(x)) / law.temperature) for value in x]
    if law.top_k:
        order = order[: law.top_k]
    if law.top_p < 1:
        wanted, mass, count = law.top_p * sum(w[v] for v in order), 0.0, 0
        while mass < wanted and count < len(order):
            mass += w[order[count]]
            count += 1
        order = order[:count]
    if law.min_p:
        order = [v for v in order if w[v] >= law.min_p]
    return sorted(order)


def kept(x: torch.Tensor, law: Law) -> list[int]:
    row = x.numpy()
    return keep(row, weights(row, law.temperature), law).tolist()


@pytest.mark.parametrize("scale", [0.01, 1.0, 6.0])
def test_filters_keep_what_their_definition_says(scale: float) -> None:
    """Flat, ordinary and peaked rows."""
    for seed in range(6):
        x = randn(600, seed=seed) * scale
        for law in mixed_laws(12, seed):
            if law.temperature and law.filters(600):
                assert kept(x, law) == oracle(x.tolist(), law)


@settings(derandomize=True, max_examples=60, deadline=None)
@given(st.data())
def test_ties_at_a_filters_border_go_to_the_lower_id(data: st.DataObject) -> None:
    x = data.draw(st.lists(st.sampled_from([0.0, 1.0, 2.0, -4.0]), min_size=1, max_size=12))
    top_k = data.draw(st.integers(0, 13))
    top_p = data.draw(st.sampled_from([1.0, 0.5, 0.31, 0.9, 1e-9]))
    min_p = data.draw(st.sampled_from([0.0, 0.1, 1.0]))
    law = Law(1.0, top_k, top_p, min_p, 0, 0, 0)
    if law.filters(len(x)):
        assert kept(torch.tensor(x), law) == oracle(x, law)


def test_top_k_of_one_is_greedy() -> None:
    """Also where two logits are so near that their weights are equal."""
    x = randn(200, 64, seed=5)
    x[:, 10] = x.amax(1)
    x[:, 30] = torch.nextafter(x[:, 10], torch.tensor(torch.inf))
    laws = [Law(50.0, 1, 1.0, 0.0, 1, 0, position) for position in range(200)]
    assert drawn(x, *laws) == x.argmax(1).tolist() == [30] * 200


@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 1e-5])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    """A temperature that vanishes in float32 once gave 0 / 0."""
    x = randn(30, 100, seed=6)
    for changed in ({}, {"top_p": 0.5}, {"top_k": 3}):
        laws = [PLAIN._replace(temperature=temperature, position=position, **changed) for position in range(30)]
        assert drawn(x, *laws) == x.argmax(1).tolist()


def test_barred_tokens_are_never_drawn() -> None:
    x = torch.zeros(400, 8)
    x[:, 3:] = -torch.inf
    for changed in ({}, {"top_p": 0.9999999999999999}, {"top_k": 7}, {"min_p": 1e-9}):
        laws: list[Any] = [PLAIN._replace(position=position, **changed) for position in range(400)]
        assert set(drawn(x, *laws)) == {0, 1, 2}


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_are_not_numbers_are_named(poison: float, temperature: float) -> None:
    x = randn(3, 9)
    x[1, 4] = poison
    with pytest.raises(ValueError, match="row 1 "):
        drawn(x, *[PLAIN._replace(temperature=temperature)] * 3)
    x[1] = -math.inf
    with pytest.raises(ValueError, match="row 1 "):
        drawn(x, *[PLAIN._replace(temperature=temperature)] * 3)


def test_the_vocabulary_of_kimi_is_served() -> None:
    x = randn(2, 163_840, seed=8) * 2
    laws = [PLAIN, PLAIN._replace(top_p=0.9)]
    assert drawn(x, *laws) == [drawn(x[:1], laws[0])[0], drawn(x[1:], laws[1])[0]]
