"""Routed experts with INT4 weights for one rank of Kimi K2.6 at TP=8: W4A16, symmetric, 32 weights a scale.

    out[r] = base[r] + sum_j w[r, j] D_e (silu(G_e x[r]) * (U_e x[r])),  e = chosen[r, j]; j without an expert: -1

x [R, 7168] bfloat16, chosen [R, 8] int32, weights [R, 8] float32, experts: gate and up [E, 512, 7168], down
[E, 7168, 256], as `order_experts` leaves them -> out [R, 7168], float32 or bfloat16; base as out, or none, or out.

Two or three launches: gate_up with SiLU (moe_gate_up.py), down (moe_down.py), from five rows on the sum of the slots
(moe_combine.py); before them the work list (moe_tiles.py). A prompt's many rows have a list and products of their own
(moe_many_tiles.py, moe_many_products.py). All follow one another by programmatic dependent launch.

Arithmetic, the same for every number of rows and every routing: a group of 32 products with the codes, which are exact,
is one MMA sum in float32, which the group's scale then multiplies into the accumulator; gate_up adds four such chains
(K columns 64 c .. 64 c + 63 of every 256) in order, down has one; hidden and each slot's y are rounded to bfloat16; the
slots' order is fixed. So a row's bits depend on nothing but that row: `plan` may change with R, and nothing else does.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton

from kernels.gpu.follow import followed
from kernels.gpu.moe_combine import combine
from kernels.gpu.moe_down import down_rows, down_tiles
from kernels.gpu.moe_gate_up import gate_up_tiles
from kernels.gpu.moe_many import MANY
from kernels.gpu.moe_many_products import many, many_fit
from kernels.gpu.moe_many_tiles import many_tiles, room
from kernels.gpu.moe_pack import Ordered, pack_down, pack_gate_up
from kernels.gpu.moe_tiles import WIDTH, Tiles, expert_tiles, most_tiles, width_of
from kernels.gpu.shapes import check
from kernels.gpu.shared_combine import combine_with_shared
from kernels.int4 import int4_unpack

HIDDEN, INNER, SLOTS = 7168, 256, 8
MOST_DIRECT = 2  # rows whose pairs are tiles of their own
MANY_ROWS = 1024  # measured: from here on an expert's weights are unpacked once for up to 64 pairs
BENCH_SHAPES = [1, 8, 16, 32, 64, 128, 512, 2048, 8192]  # R; 384 experts
FLOATS = (torch.float32, torch.bfloat16)


class OrderedExperts(NamedTuple):
    """All experts of a layer, in the order of the matrix unit."""

    gate_up: Ordered
    down: Ordered


class Plan(NamedTuple):
    """How a step of as many rows is cut up. No bit depends on it."""

    capacity: int  # pairs of a tile; of one pair, `chosen` is the work list
    halves: bool  # experts with more pairs have tiles of 8, in two halves (moe_tiles.py)
    gate_up: dict[str, int]
    down: dict[str, int] | None  # None: row by row


def plan(rows: int, many_fit: bool = True) -> Plan:
    """A fixed table, found on an H200 with uniform routing. many_fit: the card has a form for many pairs."""
    if rows <= MOST_DIRECT:
        return Plan(1, False, {"TILES": 1, "V": 1, "SLABS": 1, "CHUNKS": 4, "STAGES": 5}, None)
    if rows <= 4:
        return Plan(4, False, {"TILES": 1, "V": 4, "SLABS": 2, "CHUNKS": 2, "STAGES": 4}, None)
    down = {"TILES": 1, "OWN": 14, "TOGETHER": 2, "STAGES": 3}
    if rows <= 12:
        return Plan(8, False, {"TILES": 1, "V": 8, "SLABS": 4, "CHUNKS": 2, "STAGES": 2}, down)
    if rows <= 24:
        return Plan(4, True, {"TILES": 1, "V": 4, "SLABS": 4, "CHUNKS": 1, "STAGES": 5}, down)
    if rows < 48:
        narrow = {"TILES": 1, "OWN": 7, "TOGETHER": 1, "STAGES": 4}
        return Plan(8, False, {"TILES": 1, "V": 8, "SLABS": 4, "CHUNKS": 1, "STAGES": 4}, narrow)
    if rows <= 64:
        return Plan(8, False, {"TILES": 1, "V": 8, "SLABS": 4, "CHUNKS": 1, "STAGES": 4}, down)
    if rows <= 256:
        return Plan(8, False, {"TILES": 1, "V": 8, "SLABS": 8, "CHUNKS": 1, "STAGES": 3}, down)
    if rows < MANY_ROWS or not many_fit:
        return Plan(16, False, {"TILES": 2, "V": 8, "SLABS": 8, "CHUNKS": 1, "STAGES": 3}, down | {"TILES": 2})
    return Plan(MANY, False, {}, {})


def closes_shared(rows: int) -> bool:
    """Whether there is one launch for the sum of the slots and the shared expert's last product. Of more rows that
    product had better stand beside the routed experts' first (64 rows: 2.6 us a layer)."""
    return 4 < rows < 48


def supports(hidden: int, inner: int, top_k: int, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there is code for these widths (hidden states, an expert's on this rank, experts of a row), there."""
    return (hidden, inner, top_k) == (HIDDEN, INNER, SLOTS) and device.type == "cuda" and dtype == torch.bfloat16


def order_experts(
    gate_up: tuple[torch.Tensor, torch.Tensor], down: tuple[torch.Tensor, torch.Tensor]
) -> OrderedExperts:
    """From words and scales as int4_moe.py takes them, in place. ValueError names what does not fit."""
    return OrderedExperts(pack_gate_up(*gate_up), pack_down(*down))


class Workspace:
    """Buffers of steps of up to `rows` rows, at fixed addresses; layers may share them."""

    def __init__(self, rows: int, experts: int, device: str | torch.device = "cuda") -> None:
        self.rows, self.experts = rows, experts
        self.hidden = torch.empty(rows * SLOTS, INNER, dtype=torch.bfloat16, device=device)
        self.y = torch.empty(rows * SLOTS, HIDDEN, dtype=torch.bfloat16, device=device)
        most = 2 * experts + rows * SLOTS // 4
        self._expert = torch.zeros(most, dtype=torch.int32, device=device)
        self._pairs = torch.zeros(most, WIDTH, dtype=torch.int32, device=device)
        self._number = torch.zeros(1, dtype=torch.int32, device=device)
        self.many_fit = many_fit(self.y.device)
        large = rows if rows >= MANY_ROWS and self.many_fit else 0
        self.starts = torch.empty(large, HIDDEN // 32, device=device)
        self._counts = room(large, SLOTS, experts, device)
        self._wide = torch.zeros(experts + large * SLOTS // MANY, width_of(MANY), dtype=torch.int32, device=device)
        # each pair is a tile of its own
        few = MOST_DIRECT * SLOTS
        self._own = torch.full((few, WIDTH), -1, dtype=torch.int32, device=device)
        self._own[:, 0] = torch.arange(few)
        self._all = torch.tensor([few], dtype=torch.int32, device=device)

    def tiles(self, chosen: torch.Tensor) -> Tiles:
        """The work list of a step, made on the device. ValueError names what does not fit."""
        rows = chosen.shape[0]
        how = plan(rows, self.many_fit)
        if how.capacity == 1:
            return Tiles(chosen.view(-1), self._own[: rows * SLOTS], self._all)
        most = most_tiles(rows, SLOTS, self.experts, how.capacity, how.halves)
        tiles = Tiles(self._expert[:most], (self._wide if how.capacity == MANY else self._pairs)[:most], self._number)
        if how.capacity == MANY:
            many_tiles(chosen, self.experts, self._counts, tiles)
        else:
            expert_tiles(chosen, self.experts, how.capacity, tiles, how.halves)
        return tiles


def reference(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    gate_up: tuple[torch.Tensor, torch.Tensor],
    down: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """out [R, H] in float64, from weights that are not packed; hidden is rounded, as the kernel stores it."""
    out = torch.zeros(*x.shape, dtype=torch.float64, device=x.device)
    for e in chosen[chosen >= 0].unique().tolist():
        wide, narrow = (int4_unpack.reference(words[e], scales[e]).double() for words, scales in (gate_up, down))
        row, slot = (chosen == e).nonzero(as_tuple=True)
        gate, up = (x[row].double() @ wide.T).chunk(2, 1)
        hidden = (torch.nn.functional.silu(gate) * up).to(x.dtype).double()
        out.index_add_(0, row, weights[row, slot, None].double() * (hidden @ narrow.T))
    return out


def int4_moe_gemm(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    experts: OrderedExperts,
    space: Workspace,
    out: torch.Tensor,
    base: torch.Tensor | None = None,
) -> torch.Tensor:
    """Fills `out`. ValueError names what does not fit.

    Of what comes before, every kernel must wait for the one before it before it lets its dependents go (follow.py).
    """
    rows = x.shape[0]
    if rows > space.rows:
        raise ValueError(f"x has {rows} rows, the workspace is for {space.rows}")
    check("chosen", chosen, (rows, SLOTS), torch.int32)
    return products(x, chosen, weights, experts, space.tiles(chosen), space, out, base)


def products(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    experts: OrderedExperts,
    tiles: Tiles,
    space: Workspace,
    out: torch.Tensor,
    base: torch.Tensor | None = None,
    settled: bool = False,
    shared: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """`int4_moe_gemm` whose work list has been made. `settled`: x, routing and work list are older than the launch
    before, beside which the first product runs; what that launch makes, `base`, is waited for. `shared`, where
    `closes_shared`: the shared expert's activations and last product (shared_combine.py), in place of `base`."""
    rows, count = x.shape[0], space.experts
    check("x", x, (rows, HIDDEN), torch.bfloat16)
    check("weights", weights, (rows, SLOTS), torch.float32)
    check("gate_up words", experts.gate_up.words, (count, 2 * INNER // 64, HIDDEN // 256, 2048), torch.int32)
    check("gate_up scales", experts.gate_up.scales, (count, 2 * INNER // 64, HIDDEN // 256, 256), torch.int32)
    check("down words", experts.down.words, (count, HIDDEN // 64, 1, 2048), torch.int32)
    check("down scales", experts.down.scales, (count, HIDDEN // 64, 1, 256), torch.int32)
    check("out", out, (rows, HIDDEN), *FLOATS)
    if base is not None:
        check("base", base, (rows, HIDDEN), *FLOATS)
    if shared is not None and (base is not None or not closes_shared(rows)):
        raise ValueError(f"shared is given with {rows} rows and base {base is not None}, see closes_shared")
    how = plan(rows, space.many_fit)
    whole: dict[str, Any] = {"H": HIDDEN, "num_warps": 4, "launch_pdl": followed()["launch_pdl"]}
    hidden, most = space.hidden, len(tiles.expert)
    words, y = hidden.view(torch.int32), space.y.view(torch.int32)
    more = {"BASE": base is not None}
    base = out if base is None else base
    if how.capacity == MANY:
        many(x, experts.gate_up, experts.down, tiles, hidden, space.y, space.starts, **whole)
    else:
        slabs = how.gate_up["SLABS"]
        gate_up_tiles[(32 // slabs, most)](
            x.view(torch.int32), *experts.gate_up, hidden, *tiles, HALVES=how.halves, LATE=settled, **how.gate_up,
            **whole,
        )  # fmt: skip
        if how.down is None:
            down_rows[(HIDDEN // 16, rows)](words, *experts.down, out, base, chosen, weights, **more, **whole)
            return out
        down_tiles[(HIDDEN // 64 // how.down["OWN"], most)](words, *experts.down, y, *tiles, **how.down, **whole)
    if shared:
        return combine_with_shared(*shared, space.y[: rows * SLOTS], weights, chosen, out, eager=True)
    block = 256 if rows < 128 else 1024
    whole |= {"num_warps": block // 256, "enable_fp_fusion": False}
    combine[(rows, triton.cdiv(HIDDEN, block))](
        space.y, weights, chosen, base, out, PDL=True, BLOCK=block, **more, **whole
    )
    return out
