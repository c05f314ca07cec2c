"""Trees, draws, walks and cache moves on a GPU against their references and the oracle.

On a machine without a GPU `tests/unit/test_gpu_tree_ops.py` runs this file under Triton's interpreter, on fewer inputs.
"""

from __future__ import annotations

import os
import random

import pytest
import torch

pytest.importorskip("triton")

from kernels.gpu import draw, kv_compact, kv_write, topk_logprobs, tree_accept, tree_build, tree_mask
from kernels.sample import Law
from kernels.tree_accept import accept_walk
from kernels.tree_build import tree_build_heap

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy under the interpreter: a masked lane divides by zero
]


def generator(*numbers: int) -> torch.Generator:
    return torch.Generator().manual_seed(hash(numbers) % (1 << 40))


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def marginals(sequences: int, depth: int, width: int, kind: str, g: torch.Generator) -> tuple[torch.Tensor, ...]:
    """Log-probabilities, best first, and tokens: as drawn, on a coarse grid, all equal, or impossible behind two."""
    x = torch.randn(sequences, depth, 2 * width + 2, generator=g) * 3
    if kind == "grid":
        x = (x * 2).round() / 2
    if kind == "flat":
        x = torch.zeros_like(x)
    best, tokens = x.log_softmax(-1).topk(width)
    if kind == "bare":
        best[..., min(2, width) :] = -torch.inf
    return best, tokens.int()


KINDS = ("drawn", "grid", "flat", "bare")


@pytest.mark.parametrize("kind", KINDS)
def test_a_tree_is_the_heaps(kind: str) -> None:
    """Ten thousand on a GPU: mixed budgets and caps in one batch, ties included."""
    rounds, sequences = (1, 12) if INTERPRETED else (10, 250)
    for n in range(rounds):
        g = generator(n, len(kind))
        nodes, width, depth = (63, 63, 7) if n % 2 == 0 else (20, 11, 5)
        best, tokens = marginals(sequences, depth, width, kind, g)
        budgets = torch.randint(0, nodes + 1, (sequences,), generator=g, dtype=torch.int32)
        caps = torch.randint(0, 6, (sequences,), generator=g, dtype=torch.int32) * torch.randint(0, 2, (sequences,))
        got = tree_build.tree_build(
            best.to(DEVICE), tokens.to(DEVICE), budgets.to(DEVICE), caps.int().to(DEVICE), nodes
        )  # fmt: skip
        built = [column.tolist() for column in got]
        for s in range(sequences):
            want = tree_build_heap(best[s].tolist(), tokens[s].tolist(), int(budgets[s]), int(caps[s]))
            count = built[5][s]
            assert count == len(want.tokens), (s, budgets[s], caps[s])
            assert built[0][s] == want.tokens + [0] * (nodes - count), s
            assert built[1][s] == want.parents + [-1] * (nodes - count), s
            assert built[4][s][:count] == want.logprobs, s


@pytest.mark.parametrize(("sequences", "depth", "nodes"), tree_build.TEST_SHAPES)
def test_masks_and_depths_of_a_tree_are_the_references(sequences: int, depth: int, nodes: int) -> None:
    g = generator(sequences, depth, nodes)
    best, tokens = marginals(sequences, depth, min(nodes, 20), "grid", g)
    budgets = torch.randint(0, nodes + 1, (sequences,), generator=g, dtype=torch.int32)
    budgets[0] = nodes
    caps = torch.zeros(sequences, dtype=torch.int32)
    want = tree_build.reference(best, tokens, budgets, caps, nodes)
    got = tree_build.tree_build(*(t.to(DEVICE) for t in (best, tokens, budgets, caps)), nodes)
    for name, a, b in zip(want._fields, want, got, strict=True):
        assert torch.equal(a, b.cpu()), name


@pytest.mark.parametrize("kind", ["drawn", "grid", "zeros"])
@pytest.mark.parametrize(("sequences", "depth", "vocabulary", "k"), topk_logprobs.TEST_SHAPES)
def test_top_tokens_are_the_references(sequences: int, depth: int, vocabulary: int, k: int, kind: str) -> None:
    x = torch.randn(sequences, depth, vocabulary, generator=generator(vocabulary)) * 3
    if kind != "drawn":
        x = x.round()
    if kind == "zeros":
        x[x == 0] = -0.0
        x[..., ::3] = 0.0
    want, got = topk_logprobs.reference(x, k), topk_logprobs.topk_logprobs(x.to(DEVICE), k)
    assert torch.equal(got.tokens.cpu(), want.tokens)
    torch.testing.assert_close(got.logprobs.cpu(), want.logprobs, atol=2e-6, rtol=2e-6)


def test_logits_in_bfloat16_are_taken_as_they_are() -> None:
    """Many are equal then: ties, in top-k and in draws."""
    x = torch.randn(2, 1, 700, generator=generator(16)).bfloat16()
    got, want = topk_logprobs.topk_logprobs(x.to(DEVICE), 20), topk_logprobs.reference(x.float(), 20)
    assert torch.equal(got.tokens.cpu(), want.tokens)
    laws, depth, starts = some_laws(2, 700, 6), torch.zeros(2, dtype=torch.int32), torch.arange(3, dtype=torch.int32)
    drawn = draw.draw(x[:, 0].contiguous().to(DEVICE), draw.Laws.of(laws, DEVICE), depth.to(DEVICE), starts.to(DEVICE))
    assert drawn.tolist() == draw.reference(x[:, 0].float(), depth, starts, laws).tolist()


def test_top_tokens_of_four_shards_are_those_of_the_whole() -> None:
    x = torch.randn(1, 3, 1024, generator=generator(4)).round().to(DEVICE)
    shards = [part.contiguous().view(3, 256) for part in x.split(256, -1)]
    parts = [topk_logprobs.shard_top(shard, 40, 256 * rank) for rank, shard in enumerate(shards)]
    gathered = topk_logprobs.Partial(*(torch.cat(column, 1) for column in zip(*parts, strict=True)))
    got, want = topk_logprobs.merge_top(gathered, (1, 3), 1024), topk_logprobs.reference(x, 40)
    assert torch.equal(got.tokens, want.tokens)
    torch.testing.assert_close(got.logprobs, want.logprobs, atol=2e-6, rtol=2e-6)


def test_rows_that_cannot_be_ranked_have_no_probability() -> None:
    x = torch.randn(1, 4, 200, generator=generator(9))
    x[0, 0, 3], x[0, 1, 5], x[0, 2] = torch.nan, torch.inf, -torch.inf
    x[0, 3, 10:] = -torch.inf
    got = topk_logprobs.topk_logprobs(x.to(DEVICE), 12).logprobs[0].cpu()
    assert bool((got[:3] == -torch.inf).all())
    torch.testing.assert_close(got[3], topk_logprobs.reference(x, 12).logprobs[0, 3])


def ragged(sequences: int, most: int, g: torch.Generator, padding: int = 3) -> tuple[list[int], list[int]]:
    """Parents of random trees one behind another, some empty, padding behind them; and where each begins."""
    parents, starts = list[int](), [0]
    for s in range(sequences):
        rows = most if s == 0 else int(torch.randint(0, most + 1, (1,), generator=g))
        parents += [-1 if i == 0 else int(torch.randint(0, i, (1,), generator=g)) for i in range(rows)]
        starts.append(len(parents))
    return parents + [5] * padding, starts


@pytest.mark.parametrize(("sequences", "most"), [*tree_mask.TEST_SHAPES, (2, 100)])
def test_masks_are_the_references(sequences: int, most: int) -> None:
    parents, starts = ragged(sequences, most, generator(sequences, most))
    got = tree_mask.tree_mask(ints(parents), ints(starts))
    want = tree_mask.reference(torch.tensor(parents, dtype=torch.int32), torch.tensor(starts, dtype=torch.int32))
    assert torch.equal(got.mask.cpu(), want.mask)
    assert torch.equal(got.depth.cpu(), want.depth)


def some_laws(count: int, vocabulary: int, seed: int) -> list[Law]:
    r = random.Random(seed)
    return [
        Law(
            r.choice([0.0, 0.6, 1.0, 2.5]), r.choice([0, 0, 1, 5, vocabulary // 2 + 1]), r.choice([1.0, 0.4, 0.95]),
            r.choice([0.0, 0.0, 0.05]), r.getrandbits(64), r.getrandbits(32), r.getrandbits(20),
        )
        for _ in range(count)
    ]  # fmt: skip


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("sequences", "rows", "vocabulary"), draw.TEST_SHAPES)
def test_draws_are_the_references(sequences: int, rows: int, vocabulary: int, tied: bool) -> None:
    """Two candidates nearer to each other than rounding would be a coincidence at these sizes: none of these seeds."""
    g = generator(rows, vocabulary)
    sequences = sequences if INTERPRETED else 40 * sequences
    x = torch.randn(sequences * rows, vocabulary, generator=g) * 2
    if tied:
        x = x.round()
    starts = torch.arange(0, len(x) + 1, rows, dtype=torch.int32)
    depth = torch.randint(0, 5, (len(x),), generator=g, dtype=torch.int32)
    laws = some_laws(sequences, vocabulary, rows)
    want = draw.reference(x, depth, starts, laws)
    got = draw.draw(x.to(DEVICE), draw.Laws.of(laws, DEVICE), depth.to(DEVICE), starts.to(DEVICE))
    assert got.tolist() == want.tolist()


def test_a_row_draws_the_same_alone_and_in_any_batch() -> None:
    count, vocabulary = (4, 130) if INTERPRETED else (120, 20480)
    x = (torch.randn(count, vocabulary, generator=generator(1)) * 2).to(DEVICE)
    laws, depth = some_laws(count, vocabulary, 2), torch.arange(count, dtype=torch.int32).to(DEVICE) % 7
    together = draw.draw(x, draw.Laws.of(laws, DEVICE), depth, ints(list(range(count + 1)))).tolist()
    order = torch.randperm(count, generator=generator(3)).tolist()
    shuffled = draw.draw(
        x[order].contiguous(), draw.Laws.of([laws[i] for i in order], DEVICE), depth[order].contiguous(),
        ints(list(range(count + 1))),
    ).tolist()  # fmt: skip
    assert [shuffled[order.index(i)] for i in range(count)] == together
    for i in range(0, count, 3):
        alone = draw.draw(x[i : i + 1], draw.Laws.of([laws[i]], DEVICE), depth[i : i + 1], ints([0, 1])).tolist()
        assert alone == [together[i]]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_cannot_be_drawn_draws_no_token(value: float) -> None:
    x = torch.randn(3, 100, generator=generator(5))
    x[1] = value if value < 0 else x[1]
    x[1, 7] = value
    for temperature in (0.0, 1.0):
        laws = [Law(temperature, 0, 0.9, 0.0, 1, 0, 0)] * 3
        got = draw.draw(x.to(DEVICE), draw.Laws.of(laws, DEVICE), ints([0, 0, 0]), ints([0, 1, 2, 3])).tolist()
        assert got[1] == draw.NO_TOKEN
        assert min(got[0], got[2]) >= 0


@pytest.mark.parametrize(("sequences", "most", "vocabulary"), tree_accept.TEST_SHAPES)
def test_the_walk_is_the_oracles(sequences: int, most: int, vocabulary: int) -> None:
    """A vocabulary of a few tokens makes the draws follow the trees; a sequence without rows and padding among them."""
    g = generator(sequences, most, vocabulary)
    few = min(vocabulary, 3)
    parents, starts = ragged(sequences, most, g)
    tokens = torch.randint(0, few, (len(parents),), generator=g).tolist()
    drawn = torch.randint(0, few, (len(parents),), generator=g).tolist()
    seen = set[tuple[int, int]]()
    for s in range(sequences):  # no token twice below one parent
        for r in range(starts[s], starts[s + 1]):
            while (1000 * s + parents[r], tokens[r]) in seen:
                tokens[r] += few
            seen.add((1000 * s + parents[r], tokens[r]))
    masks = tree_mask.tree_mask(ints(parents), ints(starts))
    got = tree_accept.accept(ints(parents), ints(tokens), masks.mask, ints(drawn), ints(starts), most)
    for s in range(sequences):
        at = slice(starts[s], starts[s + 1])
        path = accept_walk(parents[at], tokens[at], drawn[at]) if at.stop > at.start else []
        emitted = [tokens[at][row] for row in path[1:]] + [drawn[at][row] for row in path[-1:]]
        assert got.path[s].tolist() == path + [-1] * (most - len(path))
        assert got.emitted[s].tolist() == emitted + [-1] * (most - len(path))
        assert int(got.length[s]) == len(path)
        assert int(got.bonus[s]) == (emitted[-1] if emitted else -1)


def test_what_is_emitted_is_what_the_cpu_emits() -> None:
    """Draws and walk together: a tree of every token two levels deep, so that paths have three rows."""
    vocabulary, sequences = 4, 2 if INTERPRETED else 40
    parents = [-1, *[0] * 4, *[row for row in range(1, 5) for _ in range(4)]]
    tokens = [0, *range(4), *list(range(4)) * 4]
    x = torch.randn(sequences * 21, vocabulary, generator=generator(8))
    starts = list(range(0, 21 * sequences + 1, 21))
    laws = some_laws(sequences, vocabulary, 4)
    masks = tree_mask.tree_mask(ints(parents * sequences), ints(starts))
    got = tree_accept.tree_accept(
        x.to(DEVICE), ints(parents * sequences), ints(tokens * sequences), masks.depth, masks.mask, ints(starts),
        draw.Laws.of(laws, DEVICE), 8,
    )  # fmt: skip
    every = torch.tensor(parents * sequences), torch.tensor(tokens * sequences), torch.tensor(starts)
    want = tree_accept.reference(x, *every, laws)
    assert [row[: len(e)] for row, e in zip(got.emitted.tolist(), want, strict=True)] == want
    assert got.length.tolist() == [3] * sequences


@pytest.mark.parametrize(("slots", "rows", "width"), kv_write.TEST_SHAPES)
def test_written_latents_are_where_they_belong(slots: int, rows: int, width: int) -> None:
    g = generator(slots, rows)
    cache, values = torch.randn(slots // 64, 64, width, generator=g), torch.randn(rows, width, generator=g)
    at = torch.randperm(slots, generator=g)[:rows].clone()
    at[1:2] = -1
    want, got = cache.clone(), cache.to(DEVICE)
    kv_write.reference(want, at, values)
    kv_write.kv_write(got, at.to(DEVICE), values.to(DEVICE))
    assert torch.equal(got.cpu(), want)


@pytest.mark.parametrize(("layers", "slots", "width", "sequences", "deepest"), kv_compact.TEST_SHAPES)
def test_accepted_latents_stand_where_plain_decoding_puts_them(
    layers: int, slots: int, width: int, sequences: int, deepest: int
) -> None:
    """Sources and targets overlap: a path of most of a tree's rows moves by one or two places."""
    g = generator(slots, deepest)
    _, starts = ragged(sequences, min(deepest + 2, 64), g)
    path = torch.full((sequences, deepest), -1, dtype=torch.int32)
    length = torch.zeros(sequences, dtype=torch.int32)
    for s in range(sequences):
        rows = starts[s + 1] - starts[s]
        length[s] = min(rows, deepest)
        if rows:
            below = 1 + torch.randperm(rows - 1, generator=g)[: length[s] - 1].sort().values
            path[s, : length[s]] = torch.cat([torch.zeros(1, dtype=torch.int64), below])
    at = torch.randperm(slots, generator=g)[: starts[-1]]
    cache = torch.randn(layers, slots // 64, 64, width, generator=g)
    want, got = cache.clone(), cache.to(DEVICE)
    kv_compact.reference(want, at, torch.tensor(starts), path, length)
    kv_compact.kv_compact(got, at.to(DEVICE), ints(starts), path.to(DEVICE), length.to(DEVICE))
    assert torch.equal(got.cpu(), want)


@pytest.mark.skipif(INTERPRETED, reason="ten gigabytes")
def test_slots_beyond_two_to_the_31_elements() -> None:
    slots, width = 4_000_000, 576
    cache = torch.zeros(1, slots, width, dtype=torch.bfloat16, device=DEVICE)
    values = torch.randn(2, width, device=DEVICE).bfloat16()
    at = torch.tensor([slots - 1, 3], device=DEVICE)
    kv_write.kv_write(cache, at, values)
    assert torch.equal(cache[0, at], values)
    moved = torch.tensor([slots - 2, slots - 3, slots - 1], device=DEVICE)
    kv_compact.kv_compact(cache, moved, ints([0, 3]), ints([0, 2]).view(1, 2), ints([2]))
    assert torch.equal(cache[0, slots - 3], values[0])


@pytest.mark.skipif(INTERPRETED, reason="graphs are CUDA's")
def test_a_graph_reads_budgets_trees_and_laws_on_the_device() -> None:
    """Captured once, replayed with other budgets, logits and seeds in the same buffers."""
    x = torch.randn(4, 7, 2048, device=DEVICE)
    budgets, caps = ints([63, 0, 16, 5]), ints([0, 0, 3, 0])

    def run() -> tree_build.Trees:
        return tree_build.tree_build(*topk_logprobs.topk_logprobs(x, 63), budgets, caps, 63)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for n in range(3):
        x.copy_(torch.randn(4, 7, 2048, generator=generator(n)))
        budgets.copy_(torch.tensor([n, 63 - n, 20 * n, 63]))
        graph.replay()
        want = run()
        assert all(torch.equal(a, b) for a, b in zip(out, want, strict=True))
        assert out.counts.tolist() == want.counts.tolist()
        assert int(out.counts[3]) == 63


def test_what_does_not_fit_is_refused_by_name() -> None:
    x = torch.zeros(2, 3, 40, device=DEVICE)
    with pytest.raises(ValueError, match=r"logits has strides .* contiguous"):
        topk_logprobs.topk_logprobs(x.transpose(1, 2), 4)
    with pytest.raises(ValueError, match="k is 65, at most 64"):
        topk_logprobs.topk_logprobs(x.expand(2, 3, 40).repeat(1, 1, 2), 65)
    with pytest.raises(ValueError, match=r"tokens is torch.int64, expected torch.int32"):
        tree_build.tree_build(x, x.long(), ints([1, 1]), ints([0, 0]), 4)
    with pytest.raises(ValueError, match=r"budgets has shape \(1,\), expected \(2\)"):
        tree_build.tree_build(x, x.int(), ints([1]), ints([0, 0]), 4)
    with pytest.raises(ValueError, match="nodes is 64, at most 63"):
        tree_build.tree_build(x, x.int(), ints([1, 1]), ints([0, 0]), 64)
    with pytest.raises(ValueError, match="rows of 6 bytes, expected a multiple of 8"):
        kv_compact.kv_compact(
            torch.zeros(1, 4, 3, dtype=torch.float16, device=DEVICE), torch.zeros(2, dtype=torch.int64, device=DEVICE),
            ints([0, 2]), ints([0, 1]).view(1, 2), ints([2]),
        )  # fmt: skip
