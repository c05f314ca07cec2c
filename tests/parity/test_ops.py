"""Every op of the model against its formula, written out in float64 without regard to speed."""

from __future__ import annotations

import math

import pytest
import torch

from kernels import (
    block_attention,
    int4_moe,
    kv_compact,
    kv_write,
    linear,
    mla_tree_attention,
    moe_route,
    rmsnorm,
    rope,
    swiglu,
)
from kernels.linear import MIN_4, TILE_16, RowLaw
from kernels.mla_tree_attention import PAGE, AttentionGroup
from kernels.row_blocks import GRAIN, by_row_blocks

LAWS = pytest.mark.parametrize("law", [MIN_4, TILE_16], ids=["min-4", "tile-16"])


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def close(got: torch.Tensor, expected: torch.Tensor, tolerance: float = 2e-5) -> None:
    assert got.shape == expected.shape
    assert (got.double() - expected).abs().max() <= tolerance * max(1.0, float(expected.abs().max()))


@LAWS
@pytest.mark.parametrize(("m", "k", "n"), linear.TEST_SHAPES)
def test_linear(law: RowLaw, m: int, k: int, n: int) -> None:
    rows = law.padded(m)
    x, w, base = torch.randn(rows, k), torch.randn(k, n), torch.randn(rows, n)
    expected = x.double() @ w.double()
    close(linear.linear(x, w, law), expected)
    close(linear.linear(x, w, law, base), expected + base)
    close(linear.batched_linear(x.expand(3, -1, -1), w.expand(3, -1, -1), law), expected.expand(3, -1, -1))


@LAWS
@pytest.mark.parametrize("columns", [96, 1024, 1056, 2048])
def test_wide_linear_has_the_bits_of_linear(law: RowLaw, columns: int) -> None:
    x, w = torch.randn(16, 64), torch.randn(64, columns)
    assert torch.equal(linear.wide_linear(x, linear.column_blocks(w), law), linear.linear(x, w, law))


def test_padding_repeats_the_first_row() -> None:
    x = torch.arange(6.0).view(3, 2)
    assert linear.pad_rows(x, 5).tolist() == [[0, 1], [2, 3], [4, 5], [0, 1], [0, 1]]
    assert linear.pad_rows(x, 3) is x
    assert linear.pad_rows(x, 4, 1).tolist() == [[0, 1, 0, 0], [2, 3, 2, 2], [4, 5, 4, 4]]


def test_a_row_law_says_how_many_rows_a_product_has() -> None:
    assert [MIN_4.padded(n) for n in (1, 4, 5, 17)] == [4, 4, 5, 17]
    assert [TILE_16.padded(n) for n in (1, 16, 17)] == [16, 16, 32]
    with pytest.raises(AssertionError):
        linear.linear(torch.zeros(3, 4), torch.zeros(4, 4), MIN_4)
    with pytest.raises(AssertionError):
        linear.batched_linear(torch.zeros(2, 20, 4), torch.zeros(2, 4, 4), TILE_16)


@pytest.mark.parametrize("shape", rmsnorm.TEST_SHAPES, ids=str)
def test_rmsnorm(shape: tuple[int, ...]) -> None:
    x, w = torch.randn(shape) * 3, torch.randn(shape[-1])
    d = x.double()
    close(rmsnorm.rmsnorm(x, w, 1e-5), d / (d.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w)


def test_rmsnorm_of_zeros_is_zero() -> None:
    assert rmsnorm.rmsnorm(torch.zeros(4, 32), torch.ones(32), 1e-5).abs().max() == 0


@pytest.mark.parametrize("shape", rope.TEST_SHAPES, ids=str)
def test_rope(shape: tuple[int, ...]) -> None:
    x, half = torch.randn(shape), shape[-1] // 2
    angle = torch.rand((*shape[:-1], half)) * 100
    cos, sin = angle.double().cos(), angle.double().sin()
    even, odd = x[..., 0::2].double(), x[..., 1::2].double()
    expected = torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)
    close(rope.rope_pairs(x, torch.polar(torch.ones_like(angle), angle)), expected)
    first, second = x[..., :half].double(), x[..., half:].double()
    expected = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    c, s = angle.cos(), angle.sin()
    close(rope.rope_halves(x, torch.cat([c, c], -1), torch.cat([-s, s], -1)), expected)


def test_yarn_frequencies_of_kimi() -> None:
    """K2 (beta_fast 1) and K2.5 (32), factor 64: the values differ at indices 9 to 19 and nowhere else."""
    step, ramp = (rope.yarn_frequencies(64, 50000.0, 64.0, fast, 1.0, 4096) for fast in (1.0, 32.0))
    known = {9: (4.768861e-2, 4.377666e-2), 12: (1.729363e-2, 1.161916e-2), 16: (4.472136e-3, 1.537297e-3)}
    for i, values in known.items():
        assert (float(step[i]), float(ramp[i])) == pytest.approx(values, rel=1e-5)
    assert torch.equal(step[:9], ramp[:9])
    assert torch.allclose(step[20:], ramp[20:], rtol=1e-6)
    assert bool((step[9:20] != ramp[9:20]).all())


@pytest.mark.parametrize("shape", swiglu.TEST_SHAPES, ids=str)
def test_swiglu(shape: tuple[int, ...]) -> None:
    x = torch.randn((*shape[:-1], 2 * shape[-1])) * 4
    gate, up = x.double().chunk(2, -1)
    close(swiglu.swiglu(x), gate / (1 + (-gate).exp()) * up)


def test_blocks_of_rows_stay_below_what_torch_splits() -> None:
    seen: list[int] = []

    def note(part: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        seen.append(part.numel())
        return part + other

    x = torch.randn(257, 640)
    assert torch.equal(by_row_blocks(note, x, x), x + x)
    assert len(seen) > 1
    assert max(seen) < GRAIN


@pytest.mark.parametrize(("rows", "experts", "top_k"), moe_route.TEST_SHAPES)
@pytest.mark.parametrize("normalise", [True, False])
def test_moe_route(rows: int, experts: int, top_k: int, normalise: bool) -> None:
    """The bias selects and does not weigh; padding is never chosen."""
    padding = -experts % moe_route.ROUTER_MULTIPLE
    logits, bias = torch.randn(rows, experts + padding), torch.randn(experts)
    padded = torch.cat([bias, torch.full((padding,), -math.inf)])
    route = moe_route.moe_route(logits, padded, top_k, normalise, 2.5)
    for row in range(rows):
        scores = [1 / (1 + math.exp(-v)) for v in logits[row, :experts].tolist()]
        best = sorted(range(experts), key=lambda e: -(scores[e] + float(bias[e])))[:top_k]
        total = sum(scores[e] for e in best) if normalise else 1.0
        assert route.chosen[row].tolist() == best
        assert route.weights[row].tolist() == pytest.approx([scores[e] / total * 2.5 for e in best], rel=1e-5)


@LAWS
@pytest.mark.parametrize(("rows", "hidden", "width", "experts", "top_k"), int4_moe.TEST_SHAPES)
def test_int4_moe(law: RowLaw, rows: int, hidden: int, width: int, experts: int, top_k: int) -> None:
    """More than half of the experts in use, and a few: both forms of the reference."""
    weights = int4_moe.ExpertWeights.of(
        torch.randn(experts, hidden, 2 * width) * 0.1, torch.randn(experts, width, hidden)
    )
    for used in (experts, top_k):
        x = torch.randn(rows, hidden)
        chosen = torch.stack([torch.randperm(used)[:top_k] for _ in range(rows)])
        route = moe_route.Route(chosen, torch.rand(rows, top_k))
        got = int4_moe.int4_moe(linear.pad_rows(x, law.padded(rows)), route, weights, law)
        expected = torch.zeros(rows, hidden, dtype=torch.float64)
        for r in range(rows):
            for e, weight in zip(chosen[r].tolist(), route.weights[r].tolist(), strict=True):
                gate, up = (x[r].double() @ weights.gate_up[e].double()).chunk(2)
                expected[r] += weight * (gate / (1 + (-gate).exp()) * up) @ weights.down[e].double()
        close(got, expected)


def one_row(q: torch.Tensor, keys: torch.Tensor, latent: int) -> torch.Tensor:
    """Attention of q [H, W] over keys [n, W], float64."""
    p = (q.double() @ keys.double().T).softmax(-1)
    return p @ keys[:, :latent].double()


@LAWS
@pytest.mark.parametrize(("rows", "heads", "width", "latent"), mla_tree_attention.TEST_SHAPES)
@pytest.mark.parametrize("before", [0, 128])
def test_mla_tree_attention(law: RowLaw, rows: int, heads: int, width: int, latent: int, before: int) -> None:
    """A chain's page and gathered paths: rows through both forms have the same bits, and the formula's values."""
    cache, q = torch.randn(5 * PAGE, width) * 0.3, torch.randn(rows, heads, width)
    slots = torch.randperm(5)[: before // PAGE + 1].unsqueeze(1) * PAGE + torch.arange(PAGE)
    slots = slots.flatten()
    mask = torch.full((rows, PAGE), -math.inf).triu_(4).unsqueeze(1)
    chain = AttentionGroup(slice(0, rows), before, slots, None, mask)
    tail = slots[before:].repeat(rows)
    tree = AttentionGroup(slice(0, rows), before, slots[:before], tail, mask)
    outs = [mla_tree_attention.mla_tree_attention(q, cache, [group], latent, law) for group in (chain, tree)]
    assert torch.equal(*outs)
    for row in range(rows):
        close(outs[0][row], one_row(q[row], cache[slots[: before + row + 4]], latent))


@pytest.mark.parametrize(("groups", "queries", "keys", "dim"), block_attention.TEST_SHAPES)
def test_block_attention(groups: int, queries: int, keys: int, dim: int) -> None:
    q, k, v = torch.randn(groups, queries, dim), torch.randn(groups, keys, dim), torch.randn(groups, keys, dim)
    hidden = torch.rand(queries, keys) < 0.3
    hidden[:, 0] = False
    for mask in (None, torch.zeros(queries, keys).masked_fill_(hidden, -math.inf)):
        scores = q.double() @ k.double().mT / math.sqrt(dim)
        expected = (scores if mask is None else scores + mask).softmax(-1) @ v.double()
        close(block_attention.block_attention(q, k, v, mask), expected)


@pytest.mark.parametrize(("slots", "rows", "width"), kv_write.TEST_SHAPES)
def test_kv_write(slots: int, rows: int, width: int) -> None:
    cache, where, values = torch.zeros(slots, width), torch.randperm(slots)[:rows], torch.randn(rows, width)
    kv_write.kv_write(cache, where, values)
    assert torch.equal(cache[where], values)
    assert int((cache != 0).any(-1).sum()) == rows


@pytest.mark.parametrize(("layers", "slots", "width", "count"), kv_compact.TEST_SHAPES)
def test_kv_compact(layers: int, slots: int, width: int, count: int) -> None:
    """Targets that are sources as well get what these held before."""
    cache = torch.randn(layers, slots, width)
    before, source = cache.clone(), torch.arange(count) + 1
    kv_compact.kv_compact(cache, source, source - 1)
    assert torch.equal(cache[:, :count], before[:, 1 : count + 1])
    assert torch.equal(cache[:, count:], before[:, count:])
