"""Conditional draft trees on the GPU, one program a sequence: the best paths of pairwise scores, level by level.

    sigma(rho) = sum_d logprobs[d, c_{d-1}, rho_d]       c_d = choice[d, c_{d-1}, rho_d]; before the first stands row 0
    tree       = the first `budget` paths by (-sigma, rho)

As kernels/tree_pairs.py: at each depth the first N of what continues the level above are kept, in lexicographic order,
so a place among them breaks ties; the tree is the first N of all levels. A program chooses by counting (select.py) and
orders what is left by comparing all pairs. The same nodes in the same order as best-first search, bit for bit.

logprobs [S, L, K, K] float32, choice [S, L, K, K] int32, tokens [S, L, K] int32, budgets [S] int32 -> Trees of N nodes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.checks import at_most, expect
from kernels.gpu.select import NEVER, choose
from kernels.gpu.tree_build import MOST_NODES, Trees, as_rows
from kernels.tree_pairs import BENCH_SHAPES, MOST_DEPTH, MOST_WIDTH, RANK_BITS, TEST_SHAPES
from kernels.tree_pairs import tree_pairs as pairs_reference

__all__ = ["BENCH_SHAPES", "TEST_SHAPES", "reference", "tree_pairs"]
IMPOSSIBLE = tl.constexpr(0x7F800000)  # the cost of probability zero: the bits of infinity
FIELDS = 6  # of a node in scratch: code, cost, candidate, parent's place, token, place in the tree


def reference(
    logprobs: torch.Tensor, choice: torch.Tensor, tokens: torch.Tensor, budgets: torch.Tensor, nodes: int
) -> Trees:
    """The same by torch ops."""
    return as_rows(pairs_reference.reference(logprobs, choice.long(), tokens.long(), budgets.long(), nodes))


@triton.jit
def _tree_pairs(
    logprobs_ptr, choice_ptr, tokens_ptr, budgets_ptr, scratch_ptr,
    out_tokens, out_parents, out_depth, out_mask, out_logprobs, out_counts, width,
    DEPTH: tl.constexpr, NODES: tl.constexpr, PLACES: tl.constexpr, WIDTH: tl.constexpr, POOL: tl.constexpr,
    RANK_BITS: tl.constexpr, MOST_DEPTH: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    s = tl.program_id(0).to(tl.int64)
    pool = scratch_ptr + s * FIELDS * POOL
    budget = tl.minimum(tl.maximum(tl.load(budgets_ptr + s), 0), NODES)
    i = tl.arange(0, POOL)
    tl.store(pool + POOL + i, NEVER + tl.zeros([POOL], tl.int64))  # costs: nothing is there yet
    tl.debug_barrier()
    slot, rank = tl.arange(0, PLACES), tl.arange(0, WIDTH)
    total = 0
    for d in tl.static_range(DEPTH):
        row, sigma, there = tl.zeros([PLACES], tl.int32), tl.zeros([PLACES], tl.float32), slot == 0
        if d > 0:
            above = pool + (d - 1) * PLACES + slot
            cost = tl.load(above + POOL).to(tl.int32)
            there = cost < NEVER
            sigma = 0.0 - cost.to(tl.float32, bitcast=True)
            row = tl.load(above + 2 * POOL, mask=there, other=0).to(tl.int32)
        at = ((s * DEPTH + d) * width + row[:, None]) * width + rank[None, :]
        inside = there[:, None] & (rank[None, :] < width)
        terms = sigma[:, None] + tl.load(logprobs_ptr + at, mask=inside, other=float("-inf"))
        cost = (0.0 - terms).to(tl.int32, bitcast=True)
        cost = tl.reshape(tl.where(inside & (cost < IMPOSSIBLE), cost, NEVER), (PLACES * WIDTH,))
        id = tl.arange(0, PLACES * WIDTH)
        real = tl.sum((cost < NEVER).to(tl.int32), 0)
        want = tl.minimum(real, budget)
        kept = choose(cost, id, want)
        total += want
        new = pool + d * PLACES + tl.cumsum(kept.to(tl.int32), 0) - 1
        tl.store(new + POOL, cost.to(tl.int64), mask=kept)
        tl.store(new + 3 * POOL, id.to(tl.int64), mask=kept)  # the parent's place there and the rank, for a moment
        tl.debug_barrier()  # what other threads stored is read back
        mine = pool + d * PLACES + slot
        there = slot < want
        id = tl.load(mine + 3 * POOL, mask=there, other=0).to(tl.int32)
        place, mine_rank = id // WIDTH, id % WIDTH
        row = tl.zeros([PLACES], tl.int32)
        code = tl.zeros([PLACES], tl.int64)
        if d > 0:
            row = tl.load(pool + (d - 1) * PLACES + place + 2 * POOL, mask=there, other=0).to(tl.int32)
            code = tl.load(pool + (d - 1) * PLACES + place, mask=there, other=0)
        named = tl.load(choice_ptr + ((s * DEPTH + d) * width + row) * width + mine_rank, mask=there, other=0)
        token = tl.load(tokens_ptr + (s * DEPTH + d) * width + named, mask=there, other=0)
        code += (mine_rank + 1).to(tl.int64) << (RANK_BITS * (MOST_DEPTH - 1 - d))
        tl.debug_barrier()
        tl.store(mine, code, mask=there)
        tl.store(mine + 2 * POOL, named.to(tl.int64), mask=there)
        tl.store(mine + 3 * POOL, ((d - 1) * PLACES + place).to(tl.int64), mask=there)  # below 0: the anchor
        tl.store(mine + 4 * POOL, token.to(tl.int64), mask=there)
        tl.debug_barrier()
    count = tl.minimum(budget, total)
    tl.store(out_counts + s, count)
    _order(pool, POOL)
    _finish(
        pool, out_tokens, out_parents, out_depth, out_mask, out_logprobs, s, count, DEPTH, NODES, PLACES, POOL,
    )  # fmt: skip


@triton.jit
def _order(pool, POOL: tl.constexpr):
    """Each node's place by (cost, code); what is not there comes last."""
    i = tl.arange(0, POOL)
    cost = tl.load(pool + POOL + i)
    there = cost < NEVER
    code = tl.load(pool + i, mask=there, other=0)
    before = tl.zeros([POOL], tl.int32)
    STEP: tl.constexpr = 16
    for n in tl.range(POOL // STEP):
        j = n * STEP + tl.arange(0, STEP)
        their_cost = tl.load(pool + POOL + j)
        their_code = tl.load(pool + j, mask=their_cost < NEVER, other=0)
        first = (their_cost[None, :] < cost[:, None]) | (
            (their_cost[None, :] == cost[:, None]) & (their_code[None, :] < code[:, None])
        )
        before += tl.sum((first & (their_cost < NEVER)[None, :]).to(tl.int32), 1)
    tl.store(pool + 5 * POOL + i, tl.where(there, before, POOL).to(tl.int64))
    tl.debug_barrier()


@triton.jit
def _finish(
    pool, out_tokens, out_parents, out_depth, out_mask, out_logprobs, s, count,
    DEPTH: tl.constexpr, NODES: tl.constexpr, PLACES: tl.constexpr, POOL: tl.constexpr,
):  # fmt: skip
    """From places to a tree; parents come before their children, for no path is better than its beginning."""
    n = tl.arange(0, PLACES)
    fits = (n >= count) & (n < NODES)
    at = s * NODES
    tl.store(out_tokens + at + n, 0, mask=fits)  # what lies behind the tree
    tl.store(out_parents + at + n, -1, mask=fits)
    tl.store(out_depth + at + n, 0, mask=fits)
    tl.store(out_mask + at + n, tl.zeros([PLACES], tl.int64), mask=fits)
    tl.store(out_logprobs + at + n, 0.0, mask=fits)
    i = tl.arange(0, POOL)
    place = tl.load(pool + 5 * POOL + i)
    chosen = place < count
    above = tl.load(pool + 3 * POOL + i, mask=chosen, other=-1)
    inner = chosen & (above >= 0)
    parent = tl.load(pool + 5 * POOL + above, mask=inner, other=-1)
    cost = tl.load(pool + POOL + i, mask=chosen, other=0).to(tl.int32)
    tl.store(out_tokens + at + place, tl.load(pool + 4 * POOL + i, mask=chosen, other=0).to(tl.int32), mask=chosen)
    tl.store(out_parents + at + place, parent.to(tl.int32), mask=chosen)
    tl.store(out_depth + at + place, i // PLACES + 1, mask=chosen)
    tl.store(out_logprobs + at + place, 0.0 - cost.to(tl.float32, bitcast=True), mask=chosen)
    mask = tl.full([POOL], 1, tl.int64) | (tl.full([POOL], 1, tl.int64) << (place + 1))
    up = above
    for _d in tl.static_range(DEPTH - 1):
        go = chosen & (up >= 0)
        up_place = tl.load(pool + 5 * POOL + up, mask=go, other=0)
        mask |= tl.where(go, tl.full([POOL], 1, tl.int64) << (up_place + 1), 0)
        up = tl.load(pool + 3 * POOL + up, mask=go, other=-1)
    tl.store(out_mask + at + place, mask, mask=chosen)


def tree_pairs(
    logprobs: torch.Tensor, choice: torch.Tensor, tokens: torch.Tensor, budgets: torch.Tensor, nodes: int
) -> Trees:
    """Builds every sequence's tree in one launch, without a host sync.

    logprobs [S, L, K, K] float32, at most 0 and descending along the last; choice the same shape, int32; tokens
    [S, L, K] int32; budgets [S] int32 on the device, `nodes` at most. L at most 12, K at most 31.
    """
    expect("tokens", tokens, torch.int32, (None, None, None))
    sequences, depth, width = tokens.shape
    expect("logprobs", logprobs, torch.float32, (sequences, depth, width, width))
    expect("choice", choice, torch.int32, logprobs.shape)
    expect("budgets", budgets, torch.int32, (sequences,))
    at_most("nodes", nodes, MOST_NODES)
    at_most("depth", depth, MOST_DEPTH)
    at_most("width", width, MOST_WIDTH)
    device, shape = logprobs.device, (sequences, nodes)
    narrow = tuple(torch.empty(shape, dtype=torch.int32, device=device) for _ in range(3))
    mask = torch.empty(shape, dtype=torch.int64, device=device)
    sigma = torch.empty(shape, dtype=torch.float32, device=device)
    counts = torch.zeros(sequences, dtype=torch.int32, device=device)
    if sequences and nodes:
        places = max(16, triton.next_power_of_2(nodes))
        pool = triton.next_power_of_2(depth * places)
        scratch = torch.empty((sequences, FIELDS, pool), dtype=torch.int64, device=device)
        _tree_pairs[(sequences,)](
            logprobs, choice, tokens, budgets, scratch, *narrow, mask, sigma, counts, width,
            DEPTH=depth, NODES=nodes, PLACES=places, WIDTH=triton.next_power_of_2(width), POOL=pool,
            RANK_BITS=RANK_BITS, MOST_DEPTH=MOST_DEPTH, FIELDS=FIELDS, num_warps=8,
        )  # fmt: skip
    return Trees(narrow[0], narrow[1], narrow[2], mask, sigma, counts)
