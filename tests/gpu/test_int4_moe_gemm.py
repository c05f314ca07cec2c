"""The experts' products of one K2.6 rank on a GPU: values, and bits that neither the batch nor the routing changes.

On a machine without a GPU `tests/parity/test_gpu_interpreted.py` runs the work list and the sum of the slots under
Triton's interpreter; the products are Gluon, which it does not run.
"""

from __future__ import annotations

import functools
import os
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("triton")

from kernels.gpu import moe_many_tiles, moe_tiles
from kernels.gpu.int4_moe_gemm import (
    HIDDEN,
    INNER,
    SLOTS,
    OrderedExperts,
    Workspace,
    int4_moe_gemm,
    order_experts,
    reference,
)
from kernels.gpu.int4_moe_gemm import products as products_of
from kernels.gpu.linear import linear
from kernels.gpu.moe_combine import combine
from kernels.gpu.moe_tiles import Tiles, expert_tiles, most_tiles

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device"),
]
products = pytest.mark.skipif(INTERPRETED, reason="Gluon is not interpreted")
EXPERTS = 48
ROWS = [1, 2, 3, 4, 5, 8, 12, 13, 17, 24, 33, 47, 64, 200, 256]  # every row of the plan, and its edges
ROUTINGS = ["uniform", "skewed", "ragged"]


class Given(NamedTuple):
    x: torch.Tensor
    chosen: torch.Tensor
    weights: torch.Tensor


@functools.cache
def matrices() -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """All sixteen codes."""
    random = torch.Generator(DEVICE).manual_seed(1)

    def matrix(n: int, k: int, size: float) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (EXPERTS, n, k // 8)
        words = torch.randint(-(2**31), 2**31, shape, dtype=torch.int64, device=DEVICE, generator=random)
        scales = (torch.rand(EXPERTS, n, k // 32, device=DEVICE, generator=random) + 0.5) * size
        return words.int(), scales.bfloat16()

    return matrix(2 * INNER, HIDDEN, 0.004), matrix(HIDDEN, INNER, 0.02)


@functools.cache
def experts() -> OrderedExperts:
    return order_experts(*((words.clone(), scales.clone()) for words, scales in matrices()))


@functools.cache
def given(routing: str, rows: int = 512) -> Given:
    """Rows of unlike sizes. skewed: all on the same eight experts; ragged: busy experts, rows and slots without one."""
    random = torch.Generator(DEVICE).manual_seed(7)
    x = torch.randn(rows, HIDDEN, device=DEVICE, generator=random)
    x[5] *= 100
    x[6] += 3
    x[7] *= 1e-3
    rank = torch.rand(rows, EXPERTS, device=DEVICE, generator=random)
    if routing == "skewed":
        rank[:, 3:43:5] += 1
    if routing == "ragged":
        rank[:, :6] += 0.4
    chosen = rank.topk(SLOTS, 1).indices.int()
    if routing == "ragged":
        chosen[3], chosen[9:11], chosen[::7, 5] = -1, -1, -1
    weights = torch.rand(rows, SLOTS, device=DEVICE, generator=random) + 0.1
    return Given(x.bfloat16(), chosen, weights)


def run(g: Given, rows: torch.Tensor | slice, base: torch.Tensor | None = None, of: torch.dtype = torch.bfloat16):
    """The products of some rows; whatever is not written is NaN."""
    x, chosen, weights = (t[rows].contiguous() for t in g)
    space = Workspace(len(x), EXPERTS, DEVICE)
    space.hidden.fill_(torch.nan)
    space.y.fill_(torch.nan)
    out = torch.full((len(x), HIDDEN), torch.nan, dtype=of, device=DEVICE)
    return int4_moe_gemm(x, chosen, weights, experts(), space, out, base)


@functools.cache
def of_many(routing: str) -> torch.Tensor:
    return run(given(routing), slice(None))


@products
@pytest.mark.parametrize("routing", ROUTINGS)
def test_it_computes_the_reference(routing: str) -> None:
    for rows in (1, 3, 8, 17, 33, 64):
        g = given(routing)
        got, expected = run(g, slice(rows), of=torch.float32).double(), reference(*(t[:rows] for t in g), *matrices())
        error = (got - expected).norm(dim=1) / expected.norm(dim=1).clamp(min=1e-9)
        assert float(error.max()) < 4e-3, (rows, float(error.max()))  # hidden and y have 8 bits


@products
@pytest.mark.parametrize("routing", ROUTINGS)
def test_a_row_has_the_same_bits_in_any_number_of_rows(routing: str) -> None:
    every = of_many(routing)
    for rows in ROWS:
        assert torch.equal(run(given(routing), slice(rows)), every[:rows]), rows
    for row in (0, 5, 6, 7, 9, 41, 300, 511):
        assert torch.equal(run(given(routing), slice(row, row + 1)), every[row : row + 1]), row


@products
@pytest.mark.parametrize("rows", [4, 16, 64, 300])
def test_a_row_has_the_same_bits_in_any_company(rows: int) -> None:
    every = of_many("ragged")
    for seed in range(3):
        some = torch.randperm(512, generator=torch.Generator().manual_seed(seed))[:rows].to(DEVICE)
        assert torch.equal(run(given("ragged"), some), every[some])


@products
@pytest.mark.parametrize("routing", ["uniform", "skewed"])
def test_a_prompts_rows_have_the_same_bits(routing: str) -> None:
    g = given(routing)
    many = Given(*(t.repeat(5, *[1] * (t.dim() - 1)) for t in g))
    got = run(many, slice(2100))
    assert torch.equal(got[:512], of_many(routing))
    assert torch.equal(got[512:1024], of_many(routing))
    assert torch.equal(got[2048:], of_many(routing)[:52])


@products
def test_again_and_again() -> None:
    for rows in (3, 16, 64):
        first = run(given("ragged"), slice(rows))
        assert all(torch.equal(run(given("ragged"), slice(rows)), first) for _ in range(20))


@products
@pytest.mark.parametrize("rows", [2, 9])
def test_what_a_row_begins_with_is_added_once(rows: int) -> None:
    g = given("ragged")
    alone = run(g, slice(rows), of=torch.float32)
    base = torch.randn(rows, HIDDEN, device=DEVICE)
    assert torch.equal(run(g, slice(rows), base, torch.float32), base + alone)
    assert torch.equal(run(g, slice(rows)), alone.bfloat16())
    x, chosen, weights = (t[:rows].contiguous() for t in g)
    into = base.clone()
    int4_moe_gemm(x, chosen, weights, experts(), Workspace(rows, EXPERTS), into, into)
    assert torch.equal(into, base + alone)


@products
@pytest.mark.parametrize("rows", [1, 3, 16, 64, 300])
def test_a_launch_between_work_list_and_products_is_waited_for(rows: int) -> None:
    """What it makes is the base, in a graph of many such layers; rows without experts wait as well."""
    of = [given("ragged"), Given(*(t.clone() for t in given("ragged")))]
    of[1].chosen.fill_(-1)
    x, weights = (torch.randn(n, 256, device=DEVICE).bfloat16() for n in (rows, HIDDEN))
    base, space = torch.zeros(8, rows, HIDDEN, device=DEVICE), Workspace(rows, EXPERTS)
    got = torch.full_like(base, torch.nan)

    def layers() -> None:
        for n in range(8):
            g = Given(*(t[:rows] for t in of[n % 2]))
            tiles = space.tiles(g.chosen)
            linear(x, weights, base[n])
            products_of(g.x, g.chosen, g.weights, experts(), tiles, space, got[n], base[n], settled=True)

    layers()
    expected = base.clone()
    expected[::2] += run(of[0], slice(rows), of=torch.float32)
    assert torch.equal(got, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers()
    for _ in range(20):
        base.fill_(torch.nan)
        got.fill_(torch.nan)
        graph.replay()
        assert torch.equal(got, expected)


@products
@pytest.mark.parametrize("rows", [5, 16, 17, 47])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slots_are_summed_with_the_shared_expert_in_the_same_bits(rows: int, dtype: torch.dtype) -> None:
    """A chain of layers in a graph, each of which ends with the next one's launches at its heels."""
    g = Given(*(t[:rows] for t in given("ragged")))
    act, down = (torch.randn(n, INNER, device=DEVICE).bfloat16() for n in (rows, HIDDEN))
    space, base = Workspace(rows, EXPERTS), torch.empty(rows, HIDDEN, device=DEVICE)
    expected, got = (torch.full((4, rows, HIDDEN), torch.nan, dtype=dtype, device=DEVICE) for _ in range(2))
    linear(act, down, base)
    expected[:] = products_of(*g, experts(), space.tiles(g.chosen), space, torch.empty_like(base), base)

    def layers() -> None:
        for n in range(4):
            products_of(*g, experts(), space.tiles(g.chosen), space, got[n], shared=(act, down))

    layers()
    assert torch.equal(got, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers()
    for _ in range(20):
        got.fill_(torch.nan)
        graph.replay()
        assert torch.equal(got, expected)


@products
def test_no_expert_is_nothing() -> None:
    g = given("ragged")
    none = Given(g.x[:9], torch.full_like(g.chosen[:9], -1), g.weights[:9])
    for rows in (1, 4, 9):
        assert not run(none, slice(rows)).any()


@products
def test_shapes_that_do_not_fit_are_named() -> None:
    g, space = given("uniform"), Workspace(4, EXPERTS)
    x, chosen, weights = (t[:4].contiguous() for t in g)
    out = torch.empty(4, HIDDEN, device=DEVICE)
    with pytest.raises(ValueError, match="x has 5 rows, the workspace is for 4"):
        int4_moe_gemm(g.x[:5], g.chosen[:5], g.weights[:5], experts(), space, out)
    with pytest.raises(ValueError, match="chosen has shape"):
        int4_moe_gemm(x, chosen[:, :7], weights, experts(), space, out)
    with pytest.raises(ValueError, match="weights has shape"):
        int4_moe_gemm(x, chosen, weights[:3], experts(), space, out)
    with pytest.raises(ValueError, match=r"out is torch\.float16"):
        int4_moe_gemm(x, chosen, weights, experts(), space, out.half())
    with pytest.raises(ValueError, match="gate_up words has shape"):
        int4_moe_gemm(x, chosen, weights, experts(), Workspace(4, EXPERTS + 1), out)


FEW = [] if INTERPRETED else [(16, 384, 8, 4), (64, 384, 8, 8), (64, 12, 8, 8), (64, 512, 8, 16)]


@pytest.mark.parametrize("few", [False] if INTERPRETED else [False, True])
@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize(("rows", "experts", "top_k", "capacity"), moe_tiles.TEST_SHAPES + FEW)
def test_tiles(
    monkeypatch: pytest.MonkeyPatch, rows: int, experts: int, top_k: int, capacity: int, halves: bool, few: bool
) -> None:
    if halves and capacity != 4:
        pytest.skip("halves have a capacity of 4")
    if not few:
        monkeypatch.setattr(moe_tiles, "few_tiles_cuda", lambda *_: False)
    rank = torch.rand(rows, experts, generator=torch.Generator().manual_seed(rows))
    rank[:, :2] += 0.5  # busy ones
    chosen = rank.topk(top_k, 1).indices.int()
    chosen[rows // 2 :: 7] = -1
    chosen[1::5, 0] = -1
    most = most_tiles(rows, top_k, experts, capacity, halves)
    shapes = (most,), (most, moe_tiles.width_of(capacity)), (1,)
    tiles = Tiles(*(torch.full(shape, 99, dtype=torch.int32, device=DEVICE) for shape in shapes))
    expert_tiles(chosen.to(DEVICE), experts, capacity, tiles, halves)
    expected = moe_tiles.reference(chosen, experts, capacity, halves)
    assert int(tiles.number) == len(expected) <= most
    assert tiles.expert.tolist()[: len(expected)] == [expert for expert, _ in expected]
    for line, (_, pairs) in zip(tiles.pairs.tolist(), expected, strict=False):
        assert line == pairs + [-1] * (len(line) - len(pairs))


LARGE = [] if INTERPRETED else [(1536, 384, 8), (8192, 384, 8)]


@pytest.mark.parametrize(("rows", "experts", "top_k"), moe_many_tiles.TEST_SHAPES + LARGE)
def test_tiles_of_many_rows(rows: int, experts: int, top_k: int) -> None:
    """The list of few rows, for up to 64 pairs a tile."""
    rank = torch.rand(rows, experts, generator=torch.Generator().manual_seed(rows))
    rank[:, :2] += 0.5  # busy ones
    chosen = rank.topk(top_k, 1).indices.int()
    chosen[rows // 2 :: 7] = -1
    chosen[1::5, 0] = -1
    most = most_tiles(rows, top_k, experts, 64)
    tiles = Tiles(*(torch.full(shape, 99, dtype=torch.int32, device=DEVICE) for shape in ((most,), (most, 64), (1,))))
    room = moe_many_tiles.room(rows, top_k, experts, DEVICE)
    moe_many_tiles.many_tiles(chosen.to(DEVICE), experts, room, tiles)
    expected = moe_tiles.reference(chosen, experts, 64)
    assert int(tiles.number) == len(expected) <= most
    assert tiles.expert.tolist()[: len(expected)] == [expert for expert, _ in expected]
    for line, (_, pairs) in zip(tiles.pairs.tolist(), expected, strict=False):
        assert line == pairs + [-1] * (64 - len(pairs))
    with pytest.raises(ValueError, match="counts has 0 lines"):
        moe_many_tiles.many_tiles(chosen.to(DEVICE), experts, room[:0], tiles)


@pytest.mark.parametrize("of", [torch.float32] if INTERPRETED else [torch.float32, torch.bfloat16])
def test_combine(of: torch.dtype) -> None:
    """To the bit: every product and every sum is rounded by itself."""
    random = torch.Generator().manual_seed(3)
    y, weights = torch.randn(5, 8, 96, generator=random).to(of), torch.randn(5, 8, generator=random)
    chosen = torch.randint(-1, 4, (5, 8), dtype=torch.int32, generator=random)
    base = torch.randn(5, 96, generator=random)
    y[chosen < 0] = torch.nan
    parts = torch.where((chosen < 0)[..., None], 0, y.float()) * weights[..., None]
    p = parts[:, 0::2] + parts[:, 1::2]
    expected = base + ((p[:, 0] + p[:, 2]) + (p[:, 1] + p[:, 3]))
    out = torch.full((5, 96), torch.nan, device=DEVICE)
    sent = [t.to(DEVICE) for t in (y, weights, chosen, base)]
    combine[(5, 2)](*sent, out, H=96, BASE=True, PDL=False, BLOCK=64, num_warps=1, enable_fp_fusion=False)
    assert torch.equal(out.cpu(), expected)
