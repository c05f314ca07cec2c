"""Rows, pages and slots that make no sense are refused by name, and leave the engine as it was."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from hedgerow.errors import InvalidRequest
from hedgerow.model.batch import SequenceRows
from hedgerow.model.compiled import CompiledK2
from tests.compiled_builds import missing_compiler
from tests.tiny import TinyDrafter, TinyTarget, write_tiny

pytestmark = pytest.mark.skipif(bool(missing_compiler()), reason=missing_compiler())
PAGES = 6
GOOD = SequenceRows(70, [4, 1], [5, 6, 7, 8], [-1, 0, 0, 2], [0, 3])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CompiledK2:
    folder = tmp_path_factory.mktemp("tiny")
    paths = write_tiny(folder, TinyTarget(layers=1, positions=200), TinyDrafter(feature_layers=(0,)))
    return CompiledK2.load(paths.target, paths.feature_layers)


BAD = {
    "token of no vocabulary": (replace(GOOD, tokens=[5, 512, 7, 8]), "rows[1].tokens"),
    "negative token": (replace(GOOD, tokens=[5, 6, 7, -1]), "rows[1].tokens"),
    "token above 32 bits": (replace(GOOD, tokens=[5, 6, 7, 1 << 40]), "rows"),
    "token that is no integer": (replace(GOOD, tokens=[5, 6, 7, 0.5]), "rows"),  # type: ignore[list-item]
    "parent of itself": (replace(GOOD, parents=[-1, 0, 2, 2]), "rows[1].parents"),
    "parent after it": (replace(GOOD, parents=[-1, 3, 0, 2]), "rows[1].parents"),
    "parent below -1": (replace(GOOD, parents=[-2, 0, 0, 2]), "rows[1].parents"),
    "fewer parents than tokens": (replace(GOOD, parents=[-1, 0, 0]), "parents"),
    "page past the cache": (replace(GOOD, pages=[4, PAGES]), "rows[1].pages"),
    "negative page": (replace(GOOD, pages=[-1, 1]), "rows[1].pages"),
    "too few pages": (replace(GOOD, pages=[4]), "rows[1].pages"),
    "no pages": (replace(GOOD, pages=[]), "rows[1].pages"),
    "no rows": (replace(GOOD, tokens=[], parents=[], want_logits=[]), "rows[1].tokens"),
    "negative prefix": (replace(GOOD, prefix=-1), "rows[1].prefix"),
    "prefix past the positions": (replace(GOOD, prefix=200, pages=[0, 1, 2, 3]), "rows[1].prefix"),
    "row past the positions": (replace(GOOD, prefix=198, pages=[0, 1, 2, 3]), "rows[1].prefix"),
    "wanted row that is none": (replace(GOOD, want_logits=[0, 4]), "rows[1].want_logits"),
    "wanted row twice": (replace(GOOD, want_logits=[3, 3]), "rows[1].want_logits"),
    "wanted rows out of order": (replace(GOOD, want_logits=[3, 0]), "rows[1].want_logits"),
    "more wanted rows than rows": (replace(GOOD, want_logits=[0, 1, 2, 3, 4]), "rows[1].want_logits"),
}


@pytest.mark.parametrize("name", BAD)
def test_rows_that_make_no_sense_are_refused_by_name(model: CompiledK2, name: str) -> None:
    cache = model.new_cache(PAGES)
    before = model.forward([GOOD], cache)
    rows, field = BAD[name]
    with pytest.raises(InvalidRequest) as refused:
        model.forward([GOOD, rows], cache)
    assert refused.value.field == field
    after = model.forward([GOOD], cache)
    assert torch.equal(before.logits, after.logits)


def test_nothing_at_all_is_refused(model: CompiledK2) -> None:
    with pytest.raises(InvalidRequest):
        model.forward([], model.new_cache(1))


def test_any_numbers_whatever_are_refused_or_computed_but_never_crash(model: CompiledK2) -> None:
    choose, cache, refused = random.Random(0), model.new_cache(PAGES), 0
    numbers = [-(1 << 31), -65, -2, -1, 0, 1, 2, 3, 5, 6, 63, 64, 199, 200, 511, 512, (1 << 31) - 1]

    def some(most: int) -> list[int]:
        return [choose.choice(numbers) for _ in range(choose.randint(0, most))]

    for _ in range(3000):
        tokens = some(4)
        parents = some(4) if choose.random() < 0.2 else list(range(-1, len(tokens) - 1))
        rows = SequenceRows(choose.choice(numbers), some(5), tokens, parents, some(2))
        try:
            out = model.forward([rows], cache)
        except InvalidRequest:
            refused += 1
        else:
            assert out.features.shape[0] == len(tokens)
    assert 2000 < refused < 3000


@pytest.mark.parametrize(
    ("source", "target"),
    [([0, 384], [1, 2]), ([0, 1], [2, 384]), ([-1], [0]), ([0], [-1]), ([0, 1], [2]), ([1 << 62], [0])],
)
def test_slots_that_are_none_are_refused(model: CompiledK2, source: Sequence[int], target: Sequence[int]) -> None:
    cache = model.new_cache(PAGES)
    with pytest.raises(InvalidRequest):
        cache.copy(source, target)


def test_a_copy_reads_every_source_before_it_writes(model: CompiledK2) -> None:
    cache = model.new_cache(PAGES)
    model.forward([SequenceRows(0, [2, 0], range(100, 170), range(-1, 69), [])], cache)
    slots = [130, 131, 132, 4]
    before, keys = cache.read(slots), cache.latents.view(1, -1, 32)[:, slots]
    cache.copy(slots, [131, 132, 4, 383])
    assert torch.equal(cache.read([131, 132, 4, 383]), before)
    assert torch.equal(cache.latents.view(1, -1, 32)[:, [131, 132, 4, 383]], keys)
    assert torch.equal(cache.read([130]), before[:, :1])
    cache.copy([], [])


def test_another_models_cache_is_refused(model: CompiledK2, tmp_path_factory: pytest.TempPathFactory) -> None:
    paths = write_tiny(tmp_path_factory.mktemp("other"), TinyTarget(layers=2))
    other = CompiledK2.load(paths.target, ())
    with pytest.raises(InvalidRequest, match="made by this model's new_cache"):
        model.forward([GOOD], other.new_cache(PAGES))
    with pytest.raises(InvalidRequest):
        model.new_cache(0)


def test_models_without_features_and_steps_without_logits_give_empty_tensors(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    paths = write_tiny(tmp_path_factory.mktemp("plain"), TinyTarget(layers=1), TinyDrafter(feature_layers=(0,)))
    plain = CompiledK2.load(paths.target, ())
    out = plain.forward([SequenceRows(0, [0], [1, 2], [-1, 0], [])], plain.new_cache(1))
    assert (out.logits.shape, out.features.shape) == ((0, 512), (2, 0))
    with pytest.raises(InvalidRequest, match="within the target's 1 layers"):
        CompiledK2.load(paths.target, (1,))
    with pytest.raises(InvalidRequest, match="1 to 256"):
        CompiledK2.load(paths.target, (), threads=0)


def test_calls_from_several_threads_take_turns(model: CompiledK2) -> None:
    expected = model.forward([GOOD], model.new_cache(PAGES)).logits
    results: list[bool] = []

    def call() -> None:
        cache = model.new_cache(PAGES)
        results.extend(torch.equal(model.forward([GOOD], cache).logits, expected) for _ in range(50))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 200
    assert all(results)
