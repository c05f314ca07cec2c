"""On the compiled engine a row has one set of bits: alone, in a chunk, in a tree, in a batch, on any build."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from bench.drive import Job, drive_now, plain
from hedgerow.engine.config import EngineConfig
from hedgerow.engine.types import Sampling
from hedgerow.engine.verifier import VerifierEngine
from hedgerow.model.batch import SequenceRows
from hedgerow.model.compiled import CompiledCache, CompiledK2
from hedgerow.model.k2 import K2Model
from hedgerow.model.threads import ThreadChoice
from kernels.cpu.build import best_isa, build, cpu_features
from tests.compiled_builds import FAULTS, missing_compiler, of_build, plain_build, plant
from tests.engine_rig import EOS, VOCABULARY, oracle, prompt
from tests.tiny import TinyPaths, TinyTarget, write_tiny

pytestmark = pytest.mark.skipif(bool(missing_compiler()), reason=missing_compiler())
TEXT = [random.Random(1).randrange(512) for _ in range(200)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyPaths:
    return write_tiny(tmp_path_factory.mktemp("tiny"), seed=2)


@pytest.fixture(scope="module")
def model(tiny: TinyPaths) -> CompiledK2:
    return CompiledK2.load(tiny.target, tiny.feature_layers)


class Bits(NamedTuple):
    """What a row leaves."""

    logits: torch.Tensor
    features: torch.Tensor
    latent: torch.Tensor  # [layers, width]


def same(a: Bits, b: Bits) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def forward(
    model: CompiledK2,
    cache: CompiledCache,
    prefix: int,
    pages: Sequence[int],
    tokens: Sequence[int],
    parents: Sequence[int] | None = None,
) -> list[Bits]:
    """One sequence; every row's bits."""
    part = rows_of(prefix, pages, tokens, parents)
    return bits_of(model, cache, [part])[0]


def rows_of(
    prefix: int, pages: Sequence[int], tokens: Sequence[int], parents: Sequence[int] | None = None
) -> SequenceRows:
    return SequenceRows(prefix, pages, tokens, parents or range(-1, len(tokens) - 1), range(len(tokens)))


def bits_of(model: CompiledK2, cache: CompiledCache, parts: list[SequenceRows]) -> list[list[Bits]]:
    out, row, found = model.forward(parts, cache), 0, []
    for part in parts:
        slots = [part.pages[s // 64] * 64 + s % 64 for s in range(part.prefix, part.prefix + len(part.tokens))]
        latents, mine = cache.read(slots), range(row, row + len(slots))
        found.append([Bits(out.logits[r], out.features[r], latents[:, r - row]) for r in mine])
        row += len(slots)
    return found


def chunked(
    model: CompiledK2, cache: CompiledCache, pages: Sequence[int], tokens: Sequence[int], size: int
) -> list[Bits]:
    found: list[Bits] = []
    for begin in range(0, len(tokens), size):
        found += forward(model, cache, begin, pages, tokens[begin : begin + size])
    return found


@pytest.fixture(scope="module")
def one_by_one(model: CompiledK2) -> list[Bits]:
    return chunked(model, model.new_cache(5), range(5), TEXT, 1)


@pytest.mark.parametrize("size", [2, 7, 64, 65, 129, 200])
def test_chunks_of_any_size_leave_the_bits_of_one_row_at_a_time(
    model: CompiledK2, one_by_one: list[Bits], size: int
) -> None:
    scattered = chunked(model, model.new_cache(9), [7, 2, 8, 0], TEXT, size)
    assert all(map(same, scattered, one_by_one))


def test_a_chunk_whose_logits_nobody_wants_leaves_the_same_latents_and_features(
    model: CompiledK2, tiny: TinyPaths, one_by_one: list[Bits]
) -> None:
    """Nothing but the latents is then computed of the last layer, unless the drafter reads that layer."""
    of_last = CompiledK2.load(tiny.target, (0, 2))
    for reader in (model, of_last):
        cache = reader.new_cache(4)
        features = reader.forward([SequenceRows(0, range(4), TEXT, range(-1, 199), [])], cache).features
        assert torch.equal(cache.read(range(200)), torch.stack([row.latent for row in one_by_one], 1))
        again = reader.forward([rows_of(0, range(4), TEXT)], reader.new_cache(4)).features
        assert torch.equal(features, again)


def random_tree(rows: int, choose: random.Random, depth: int = 12) -> list[int]:
    """Parents of a tree as best-first builders give: some deep, some bushy."""
    parents, depths = [-1], [0]
    while len(parents) < rows:
        parent = len(parents) - 1 - int(len(parents) * choose.random() ** 3)
        if depths[parent] < depth:
            parents.append(parent)
            depths.append(depths[parent] + 1)
    return parents


def differing_tree_rows(model: CompiledK2, prefix: int, rows: int, seed: int) -> int:
    """Rows of a random tree whose bits are not those of plain decoding along their paths."""
    choose = random.Random(seed)
    parents, tokens = random_tree(rows, choose), [choose.randrange(512) for _ in range(rows)]
    cache, pages, others = model.new_cache(12), [4, 1, 9, 6, 0], [3, 8, 2, 11, 5]
    for held in (pages, others):
        forward(model, cache, 0, held, TEXT[:prefix])
    in_tree = forward(model, cache, prefix, pages, tokens, parents)
    differing = 0
    for row in range(rows):
        path = [row]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        for i, node in enumerate(path):
            alone = forward(model, cache, prefix + i, others, [tokens[node]])[0]
        differing += not same(alone, in_tree[row])
    return differing


TREES = [(5, 9), (60, 17), (127, 33), (183, 64), (1, 64), (64, 7)]  # (prefix, rows)


@pytest.mark.parametrize(("prefix", "rows"), TREES)
def test_a_row_in_any_place_of_a_tree_has_the_bits_of_plain_decoding(model: CompiledK2, prefix: int, rows: int) -> None:
    assert differing_tree_rows(model, prefix, rows, seed=rows) == 0


def test_a_batch_changes_no_bit_of_any_of_its_sequences(model: CompiledK2) -> None:
    """Trees, plain rows and chunks of ten sequences in one step, 300 rows, two of them on a shared first page."""
    choose = random.Random(4)
    prefixes = [0, 1, 63, 64, 65, 100, 130, 7, 128, 130]
    shapes = [40, 1, 9, 64, 1, 33, 100, 17, 1, 34]
    pages = [list(range(5 * i, 5 * i + 5)) for i in range(len(prefixes))]
    pages[9][0] = pages[6][0]
    parts, cache = [], model.new_cache(50)
    for i, (prefix, rows) in enumerate(zip(prefixes, shapes, strict=True)):
        if prefix:
            forward(model, cache, 0, pages[i], TEXT[:prefix])
        parents = random_tree(rows, choose) if i % 2 else None
        parts.append(rows_of(prefix, pages[i], [choose.randrange(512) for _ in range(rows)], parents))
    alone = [bits_of(model, cache, [part])[0] for part in parts]
    together = bits_of(model, cache, parts)
    assert all(same(a, b) for x, y in zip(alone, together, strict=True) for a, b in zip(x, y, strict=True))


def tree_and_chunk(model: CompiledK2) -> list[Bits]:
    cache = model.new_cache(5)
    return forward(model, cache, 0, range(5), TEXT) + forward(
        model, cache, 200, range(5), TEXT[:33], random_tree(33, random.Random(1))
    )


@pytest.fixture(scope="module")
def usual(model: CompiledK2) -> list[Bits]:
    return tree_and_chunk(model)


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_threads_change_no_bit(tiny: TinyPaths, usual: list[Bits], threads: int) -> None:
    several = CompiledK2.load(tiny.target, tiny.feature_layers, threads=threads)
    for used in (threads, 1, threads):
        several.choice = ThreadChoice(used, used)
        assert all(map(same, tree_and_chunk(several), usual))


@pytest.fixture(scope="module")
def faulty(tiny: TinyPaths) -> CompiledK2:
    return of_build(plain_build(), tiny.target, tiny.feature_layers)


@pytest.mark.skipif(best_isa(cpu_features()) == "baseline", reason="this CPU has but the baseline")
def test_sixteen_lanes_without_vector_instructions_have_the_same_bits(faulty: CompiledK2, usual: list[Bits]) -> None:
    """Another level of optimisation, too: the compiler has no multiply-add left to choose."""
    plant(faulty, 0)
    assert all(map(same, tree_and_chunk(faulty), usual))


@pytest.mark.skipif(best_isa(cpu_features()) != "avx512", reason="this CPU has no AVX-512")
def test_avx2_and_avx512_builds_have_the_same_bits(tiny: TinyPaths, usual: list[Bits]) -> None:
    avx2 = of_build(build(isa="avx2"), tiny.target, tiny.feature_layers)
    assert all(map(same, tree_and_chunk(avx2), usual))


@pytest.mark.parametrize("number", FAULTS, ids=FAULTS.values())
def test_a_planted_fault_is_seen(faulty: CompiledK2, number: int) -> None:
    plant(faulty, number)
    differing = differing_tree_rows(faulty, 60, 17, seed=17)
    assert differing > 5 if number else differing == 0, f"{FAULTS[number]}: {differing} of 17 rows differ"


VARIANTS = {
    "default": TinyTarget(),
    "flat config, raw router weights": TinyTarget(nested=False, norm_topk=False, routed_scale=1.3),
    "wide": TinyTarget(
        experts=24, top_k=5, hidden=96, expert_width=64, value=32, kv_rank=64, shared_experts=2, layers=2
    ),
    "odd": TinyTarget(hidden=160, heads=3, nope=32, rope=16, value=48, q_rank=48, kv_rank=48, dense_width=80, layers=2),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_and_features_are_those_of_the_reference(tmp_path: Path, name: str) -> None:
    paths = write_tiny(tmp_path, VARIANTS[name], seed=3)
    compiled = CompiledK2.load(paths.target, paths.feature_layers)
    reference = K2Model.load(paths.target, paths.feature_layers)
    assert compiled.feature_width == reference.feature_width
    assert compiled.checkpoint_hash == reference.checkpoint_hash
    tree = SequenceRows(150, [3, 1, 0], TEXT[:17], random_tree(17, random.Random(2)), range(17))
    text = SequenceRows(0, [3, 1, 0], TEXT[:150], range(-1, 149), range(0, 150, 3))
    caches = compiled.new_cache(4), reference.new_cache(4)
    for rows in (text, tree):
        a, b = compiled.forward([rows], caches[0]), reference.forward([rows], caches[1])
        torch.testing.assert_close(a.logits, b.logits, rtol=0, atol=1e-4)
        torch.testing.assert_close(a.features, b.features, rtol=0, atol=1e-4)
    slots = [3 * 64 + 5, 1 * 64 + 63, 0, 38]
    expected = torch.stack([layer[slots] for layer in caches[1].layers])
    torch.testing.assert_close(caches[0].read(slots), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("budget", [0, 7, 63])
def test_the_engine_on_it_gives_the_tokens_of_plain_decoding(model: CompiledK2, budget: int) -> None:
    sampling = Sampling(temperature=1.0, max_tokens=40)
    jobs = [
        Job(f"j{i}", prompt(length, i), replace(sampling, seed=i), budget, arrives=2 * i)
        for i, length in enumerate((63, 1, 130, 20, 64, 5))
    ]
    expected = {job.name: plain(model, job.prompt, job.sampling, EOS) for job in jobs}
    engine = VerifierEngine(model, EngineConfig(pages=64, prefill_rows=48), VOCABULARY, EOS)
    run = drive_now(engine, oracle(jobs, expected, seed=budget), jobs)
    assert run.tokens == expected
    if budget:
        assert sum(usage.accepted_draft_tokens for usage in run.usage.values()) > 10
