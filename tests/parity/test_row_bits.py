"""One position of one session has one set of bits: alone, in any batch, chunk or tree, after compaction and rebuild.

Run under both row laws; `test_the_bits_would_differ_without_padding` shows that there is something to protect.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from hedgerow.model.batch import ForwardOutput, SequenceRows
from hedgerow.model.cache import LatentCache
from hedgerow.model.k2 import K2Model
from kernels.linear import MIN_4, TILE_16, RowLaw
from tests.tiny import TinyTarget, write_target

PAGE = 64
SHAPE = TinyTarget(heads=8, experts=16, top_k=4, expert_width=64, layers=3)
ODD_SHAPE = TinyTarget(heads=3, experts=12, top_k=3, q_rank=40, kv_rank=24, rope=16, hidden=96, dense_width=160)


@dataclass(frozen=True)
class Plain:
    """A sequence decoded one token a step: the bits that everything else must have."""

    tokens: list[int]
    logits: torch.Tensor
    features: torch.Tensor
    latents: torch.Tensor  # [layers, positions, width]


@pytest.fixture(
    scope="module", params=[(MIN_4, SHAPE), (TILE_16, SHAPE), (MIN_4, ODD_SHAPE)], ids=["min-4", "tile-16", "odd"]
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> K2Model:
    law, shape = request.param
    folder = tmp_path_factory.mktemp("target")
    write_target(folder, shape)
    return K2Model.load(folder, (0, 2), law=law)


def chain(tokens: Sequence[int], start: int, end: int, pages: Sequence[int], wanted: bool = True) -> SequenceRows:
    rows = end - start
    return SequenceRows(start, pages, tokens[start:end], range(-1, rows - 1), range(rows) if wanted else ())


def decode_plainly(model: K2Model, tokens: list[int], pages: Sequence[int]) -> Plain:
    cache = model.new_cache(max(pages) + 1)
    steps = [model.forward([chain(tokens, i, i + 1, pages)], cache) for i in range(len(tokens))]
    logits, features = (torch.cat(parts) for parts in zip(*steps, strict=True))
    return Plain(tokens, logits, features, latents(cache, pages, len(tokens)))


def latents(cache: LatentCache, pages: Sequence[int], count: int) -> torch.Tensor:
    """The sequence's first `count` cached vectors, [layers, count, width]."""
    return cache.data[:, [slot(pages, i) for i in range(count)]].clone()


def slot(pages: Sequence[int], at: int) -> int:
    return pages[at // PAGE] * PAGE + at % PAGE


@pytest.fixture(scope="module")
def plain(model: K2Model) -> Plain:
    return decode_plainly(model, some_tokens(1, 210), [3, 0, 2, 1])


def some_tokens(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(SHAPE.vocab) for _ in range(count)]


def random_tree(rng: random.Random, rows: int, deepest: int = 12) -> list[int]:
    """Parents of a tree, some deep and some bushy, not in the order of depth."""
    parents, depth = [-1], [0]
    while len(parents) < rows:
        parent = len(parents) - 1 - int(len(parents) * rng.random() ** 3)
        if depth[parent] < deepest:
            parents.append(parent)
            depth.append(depth[parent] + 1)
    return parents


def path_to(parents: Sequence[int], row: int) -> list[int]:
    path = [row]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def assert_rows_equal(out: ForwardOutput, rows: slice | Sequence[int], plain: Plain, at: slice | Sequence[int]) -> None:
    assert torch.equal(out.logits[rows], plain.logits[at])
    assert torch.equal(out.features[rows], plain.features[at])


@pytest.mark.parametrize("chunks", [[210], [1, 2, 3, 5, 53, 64, 82], [64, 64, 64, 18], [63, 2, 130, 15]], ids=str)
def test_any_chunk_of_prefill_has_the_bits_of_plain_steps(model: K2Model, plain: Plain, chunks: list[int]) -> None:
    cache, pages, start = model.new_cache(8), [6, 7, 1, 4], 0
    for size in chunks:
        out = model.forward([chain(plain.tokens, start, start + size, pages)], cache)
        assert_rows_equal(out, slice(None), plain, slice(start, start + size))
        start += size
    assert torch.equal(latents(cache, pages, start), plain.latents)


def test_a_row_has_its_bits_in_any_batch(model: K2Model, plain: Plain) -> None:
    """Plain rows, a prefill chunk and a tree of other sequences share the step; the wanted rows are a few of all."""
    cache = model.new_cache(24)
    pages = [[4 * s, 4 * s + 2, 4 * s + 1, 4 * s + 3] for s in range(6)]
    for s, prefix in enumerate([209, 130, 64, 63, 5]):
        model.forward([chain(plain.tokens, 0, prefix, pages[s], wanted=False)], cache)
    tree = random_tree(random.Random(3), 17)
    batch = [
        chain(plain.tokens, 209, 210, pages[0]),
        SequenceRows(130, pages[1], some_tokens(9, 17), tree, [0, 3]),
        chain(plain.tokens, 64, 65, pages[2]),
        chain(plain.tokens, 63, 133, pages[3], wanted=False),
        chain(plain.tokens, 5, 6, pages[4]),
        chain(plain.tokens, 0, 1, pages[5]),
    ]
    out = model.forward(batch, cache)
    assert torch.equal(out.logits[[0, 3, 4, 5]], plain.logits[[209, 64, 5, 0]])
    assert torch.equal(out.features[[0, 18, 89, 90]], plain.features[[209, 64, 5, 0]])
    assert torch.equal(out.features[19:89], plain.features[63:133])


@pytest.mark.parametrize(("prefix", "rows"), [(5, 9), (60, 33), (126, 17), (128, 64), (63, 2), (190, 9)])
def test_every_node_of_a_tree_has_the_bits_of_its_path(model: K2Model, plain: Plain, prefix: int, rows: int) -> None:
    """Against plain decoding along the path to each leaf. 60, 126 and 190 cross a page."""
    rng = random.Random(prefix)
    tokens, parents = some_tokens(prefix, rows), random_tree(rng, rows)
    cache, pages = model.new_cache(8), [5, 0, 3, 4]
    model.forward([chain(plain.tokens, 0, prefix, pages, wanted=False)], cache)
    tree = model.forward([SequenceRows(prefix, pages, tokens, parents, range(rows))], cache)
    for leaf in sorted(set(range(rows)) - set(parents))[:6]:
        path = path_to(parents, leaf)
        line = plain.tokens[:prefix] + [tokens[row] for row in path]
        alone = model.new_cache(4)
        model.forward([chain(line, 0, prefix, range(4), wanted=False)], alone)
        for at, row in enumerate(path, prefix):
            out = model.forward([chain(line, at, at + 1, range(4))], alone)
            assert torch.equal(out.logits[0], tree.logits[row])
            assert torch.equal(out.features[0], tree.features[row])


@pytest.mark.parametrize("prefix", [61, 100, 128])
def test_compaction_leaves_the_cache_of_plain_decoding(model: K2Model, plain: Plain, prefix: int) -> None:
    """The accepted path lies between wrong guesses; after the move the sequence goes on with plain bits."""
    parents = [-1, 0, 0, 1, 2, 2, 4, 5, 7, 8]  # the true path: rows 0, 2, 5, 7, 8
    path = [0, 2, 5, 7, 8]
    tokens = some_tokens(7, len(parents))
    for depth, row in enumerate(path):
        tokens[row] = plain.tokens[prefix + depth]
    cache, pages = model.new_cache(5), [2, 4, 0]
    model.forward([chain(plain.tokens, 0, prefix, pages, wanted=False)], cache)
    out = model.forward([SequenceRows(prefix, pages, tokens, parents, path)], cache)
    assert torch.equal(out.logits, plain.logits[prefix : prefix + len(path)])
    cache.copy([slot(pages, prefix + row) for row in path], [slot(pages, prefix + i) for i in range(len(path))])
    end = prefix + len(path)
    assert torch.equal(latents(cache, pages, end), plain.latents[:, :end])
    after = model.forward([chain(plain.tokens, end, end + 1, pages)], cache)
    assert_rows_equal(after, slice(None), plain, slice(end, end + 1))


def test_copy_reads_every_source_before_it_writes(model: K2Model) -> None:
    cache = model.new_cache(1)
    cache.data.copy_(torch.randn_like(cache.data))
    before = cache.data.clone()
    cache.copy([5, 6, 7, 9], [4, 5, 6, 7])
    assert torch.equal(cache.data[:, [4, 5, 6, 7]], before[:, [5, 6, 7, 9]])
    assert torch.equal(cache.data[:, [8, 9, 10]], before[:, [8, 9, 10]])


@pytest.mark.parametrize("offset", [0, 1, 40, 109])
def test_a_rebuilt_session_has_the_same_latents(model: K2Model, plain: Plain, offset: int) -> None:
    """Prompt by prefill, committed output as forced chains of up to 64 rows, in other pages beside another rebuild."""
    prompt, end = 100, 101 + offset
    cache, pages, other = model.new_cache(9), [8, 2, 7, 0], [1, 3, 4, 5]
    model.forward([chain(plain.tokens, 0, prompt, p, wanted=False) for p in (pages, other)], cache)
    for start in range(prompt, end, 64):
        stop = min(start + 64, end)
        model.forward([chain(plain.tokens, start, stop, p, wanted=False) for p in (pages, other)], cache)
    for where in (pages, other):
        assert torch.equal(latents(cache, where, end), plain.latents[:, :end])


@pytest.mark.parametrize("threads", [1, 2])
def test_the_thread_count_does_not_change_bits(model: K2Model, plain: Plain, threads: int) -> None:
    """A whole prefill and a plain step; 210 rows are enough for torch to split elementwise ops between threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        cache = model.new_cache(4)
        out = model.forward([chain(plain.tokens, 0, 209, range(4))], cache)
        assert_rows_equal(out, slice(None), plain, slice(0, 209))
        out = model.forward([chain(plain.tokens, 209, 210, range(4))], cache)
        assert_rows_equal(out, slice(None), plain, slice(209, 210))
    finally:
        torch.set_num_threads(before)


def test_the_bits_would_differ_without_padding(model: K2Model, plain: Plain) -> None:
    """The check has teeth: on a BLAS that picks kernels by row count, products of single rows give other bits."""
    x, w = torch.randn(64, 384), torch.randn(384, 288)
    whole = torch.mm(x, w)
    if all(torch.equal(torch.mm(x[i : i + 1], w), whole[i : i + 1]) for i in range(64)):
        pytest.skip("this BLAS gives equal rows for every row count: nothing to protect")
    law, model.law = model.law, RowLaw(1)
    try:
        careless = decode_plainly(model, plain.tokens[:40], [0])
    finally:
        model.law = law
    assert not torch.equal(careless.logits, plain.logits[:40])
