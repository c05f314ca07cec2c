"""The experts of one rank of Kimi K2.6 (384, top 8, INT4), and Humming beside them.

Uniform routing draws every row's experts by itself; `skewed`: all rows on the same eight. The floor counts the experts
that a call's rows have chosen, each once. Neither routing nor the work list is in it. Three sets of weights of 1.19 GB
are read in turn. Humming (humming-kernels, if it is installed) gets uint4 weights, indexed, which is its best form; it
has no fused activation, so its chain is product, SiLU, product, sum of the slots.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from bench.kernel_cells import Call, Cell, Work
from kernels.gpu.int4_moe_gemm import (
    BENCH_SHAPES,
    HIDDEN,
    INNER,
    SLOTS,
    OrderedExperts,
    Workspace,
    order_experts,
    products,
    reference,
)
from kernels.gpu.moe_combine import combine
from kernels.gpu.moe_pack import Ordered
from kernels.gpu.moe_tiles import Tiles

EXPERTS, SETS, CALLS = 384, 3, 48
EXPERT_BYTES = 3 * INNER * HIDDEN * 9 // 16  # half a byte a weight, two bytes a scale of 32
BARS = {1: 2.25, 8: 1.3, 16: 1.22, 32: 1.18, 64: 1.15, 128: 1.15, 512: 1.6}  # times the floor
SKEWED = {16: 27.5}  # us: what Humming took
Matrix = tuple[torch.Tensor, torch.Tensor]


def words(*shape: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64, device="cuda").int()


def scales(size: float, *shape: int) -> torch.Tensor:
    return ((torch.rand(*shape, device="cuda") + 0.5) * size).bfloat16()


@cache
def source() -> tuple[Matrix, Matrix]:
    """The first set, unpacked."""
    n, k = 2 * INNER, HIDDEN
    wide = torch.cat([words(64, n, k // 8) for _ in range(EXPERTS // 64)]), scales(0.004, EXPERTS, n, k // 32)
    return wide, (words(EXPERTS, k, INNER // 8), scales(0.02, EXPERTS, k, INNER // 32))


@cache
def weights(which: int) -> OrderedExperts:
    if which == 0:
        return order_experts(*((codes.clone(), sizes.clone()) for codes, sizes in source()))
    n, k = 2 * INNER // 64, HIDDEN // 256
    wide = Ordered(words(EXPERTS, n, k, 2048), scales(0.004, EXPERTS, n, k, 512).view(torch.int32))
    return OrderedExperts(
        wide, Ordered(words(EXPERTS, 4 * k, 1, 2048), scales(0.02, EXPERTS, 4 * k, 1, 512).view(torch.int32))
    )


@cache
def space(rows: int) -> Workspace:
    return Workspace(rows, EXPERTS)


@cache
def routes(rows: int, skewed: bool) -> list[torch.Tensor]:
    """What the calls' rows choose. Few rows: no expert twice in all calls of one set."""
    draw = torch.Generator().manual_seed(rows)
    if skewed or rows == 1:
        order = torch.randperm(EXPERTS, generator=draw).int().view(-1, SLOTS)
        return [order[i % len(order)].repeat(rows, 1).cuda() for i in range(CALLS)]
    return [torch.rand(rows, EXPERTS, generator=draw).topk(SLOTS, 1).indices.int().cuda() for _ in range(6)]


class Turn:
    """The data of the calls, one after another."""

    def __init__(self, rows: int, skewed: bool) -> None:
        self.rows, self.routes, self.next = rows, routes(rows, skewed), 0

    def take(self) -> tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Which weights, and x, chosen, weights of the slots."""
        n, self.next = self.next, self.next + 1
        per_set = EXPERTS // SLOTS if len(self.routes) == CALLS else 1
        share = torch.rand(self.rows, SLOTS, device="cuda") + 0.1
        x = torch.randn(self.rows, HIDDEN, device="cuda").bfloat16()
        return n // per_set % SETS, x, self.routes[n % len(self.routes)], share / share.sum(1, keepdim=True) * 2.5


def close(got: torch.Tensor, expected: torch.Tensor, most: float = 4e-3) -> None:
    error = float((got.double() - expected).norm() / expected.norm())
    assert error < most, error


def kernel_cell(rows: int, skewed: bool, shape: str, work: Work) -> Cell:
    turn = Turn(rows, skewed)

    def make() -> Call:
        which, x, chosen, share = turn.take()
        out, room, experts = torch.empty_like(x), space(rows), weights(which)
        tiles = Tiles(*(part.clone() for part in room.tiles(chosen)))

        def run() -> None:
            products(x, chosen, share, experts, tiles, room, out)

        def check() -> None:
            if which == 0:
                close(out, reference(x, chosen, share, *source()))

        return Call(run, [out], check)

    cell = Cell("int4_moe_gemm", shape, work, make, work.read)
    if skewed:
        return cell._replace(limit=SKEWED.get(rows))
    return cell._replace(times=BARS.get(rows))


def list_cell(rows: int) -> Cell:
    """The work list alone."""
    turn = Turn(rows, False)

    def make() -> Call:
        _, _, chosen, _ = turn.take()
        room = space(rows)
        return Call(lambda: room.tiles(chosen))

    return Cell("expert_tiles", f"T={rows}", Work(rows * SLOTS * 4), make, rows * SLOTS * 4, most_sets=6)


@triton.jit
def _silu_mul(a, out):
    r, i = tl.program_id(0), tl.arange(0, 256)
    gate = tl.load(a + r * 512 + i).to(tl.float32)
    up = tl.load(a + r * 512 + 256 + i).to(tl.float32)
    tl.store(out + r * 256 + i, (gate / (1.0 + tl.exp(-gate)) * up).to(tl.bfloat16))


@cache
def peers(which: int) -> list[Any]:
    """Humming's two layers, with random weights."""
    from humming.layer import HummingLayer  # type: ignore[import-not-found]

    layers = []
    for n, k, size in ((2 * INNER, HIDDEN, 0.004), (HIDDEN, INNER, 0.02)):
        config = {"quant_method": "humming", "dtype": "uint4", "group_size": 32}
        layer = HummingLayer(
            shape_n=n, shape_k=k, weight_config=config, num_experts=EXPERTS, torch_dtype=torch.bfloat16
        ).to("cuda")
        layer.weight.data.copy_(words(*layer.weight.shape))
        layer.weight_scale.data.copy_(scales(size, *layer.weight_scale.shape))
        layer.transform()
        layers.append(layer)
    return layers


def peer_lists(layer: Any, chosen: torch.Tensor) -> dict[str, torch.Tensor]:
    """Its work list: pairs in blocks of its own height."""
    from humming.tune import get_heuristics_config  # type: ignore[import-not-found]

    pairs = chosen.numel()
    found = [
        c for low, high, c in get_heuristics_config(layer.humming_config, gemm_type="indexed") if low < pairs <= high
    ]
    height = found[0]["block_shape"][0]
    flat = chosen.flatten().long().cpu()
    order, counts = flat.argsort(stable=True), flat.bincount(minlength=EXPERTS)
    ids, blocks = [], []
    for e, part in enumerate(order.split(counts.tolist())):
        for block in part.split(height):
            if len(block):
                blocks.append(e)
                ids.append(torch.cat([block, block.new_full((height - len(block),), pairs)]))
    return {
        "sorted_ids": torch.cat(ids).int().cuda(),
        "expert_ids": torch.tensor(blocks, dtype=torch.int32, device="cuda"),
        "num_tokens_padded": torch.tensor([len(blocks) * height], dtype=torch.int32, device="cuda"),
    }


def peer_cell(rows: int, skewed: bool, shape: str, work: Work) -> Cell:
    turn = Turn(rows, skewed)

    def make() -> Call:
        which, x, chosen, share = turn.take()
        wide, narrow = peers(which % 2)
        first, second = peer_lists(wide, chosen), peer_lists(narrow, chosen)
        pairs, block, how = rows * SLOTS, 256 if rows < 128 else 1024, {"gemm_type": "indexed"}
        a, h, y = (x.new_empty(pairs, n) for n in (2 * INNER, INNER, HIDDEN))
        out = torch.empty_like(x)

        def run() -> None:
            wide(inputs=x, outputs=a, top_k=SLOTS, compute_config=how, **first)
            _silu_mul[(pairs,)](a, h, num_warps=2)
            narrow(inputs=h, outputs=y, top_k=1, compute_config=how, **second)
            combine[(rows, HIDDEN // block)](
                y, share, chosen, out, out, H=HIDDEN, BASE=False, PDL=False, BLOCK=block, num_warps=block // 256
            )

        def check() -> None:
            assert torch.isfinite(out).all()

        return Call(run, [out], check)

    return Cell("int4_moe_gemm", shape, work, make, work.read, "peer Humming")


def cells() -> Iterator[Cell]:
    for rows, skewed in [*((rows, False) for rows in BENCH_SHAPES), (16, True), (64, True)]:
        distinct = [len(chosen.unique()) for chosen in routes(rows, skewed)]
        mean = sum(distinct) / len(distinct)
        work = Work(int(mean * EXPERT_BYTES), 0, 6.0 * rows * SLOTS * INNER * HIDDEN)
        shape = f"T={rows} D={mean:.0f}" + (" skewed" if skewed else "")
        yield kernel_cell(rows, skewed, shape, work)
        yield peer_cell(rows, skewed, shape, work)
    for rows in (8, 16, 64, 512, 2048, 8192):
        yield list_cell(rows)
