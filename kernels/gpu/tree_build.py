"""Draft trees on the GPU, one program a sequence: the best prefixes, by the table of kernels/tree_build.py.

    sigma(row) = sum over depths, in order, of logprobs[d, rank_d(row)]     row of the table: a tuple of ranks
    tree       = the first `budget` rows by (-sigma, row)

The same nodes in the same order as the heap, bit for bit: both add the same floats in depth order, and the rows are in
lexicographic order, so a row's number breaks ties as the heap does. A program holds all costs in registers, finds
few candidates (kernels/gpu/select.py), and orders these by counting.

logprobs [S, L, K] float32, tokens [S, L, K] int32, budgets, caps [S] int32 (read on the device) -> Trees of N nodes.
Node i is row i + 1 of the verifier's step, the anchor row 0: masks count rows, as kernels/tree_mask.py.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.gpu.checks import at_most, expect
from kernels.gpu.follow import follow, followed
from kernels.gpu.select import NEVER, NO_KEY, choose
from kernels.tree_build import BuiltTrees, candidates
from kernels.tree_build import tree_build as build_reference
from kernels.tree_mask import tree_mask as mask_reference

TEST_SHAPES = [(1, 7, 1), (2, 1, 63), (1, 7, 16), (3, 7, 33), (2, 12, 16), (1, 7, 63)]  # (S, L, N)
BENCH_SHAPES = [(1, 7, 15), (1, 7, 63), (8, 7, 15), (8, 7, 63), (64, 7, 15), (64, 7, 63)]
MOST_NODES = 63  # a node's bit, and a rank in 6 bits
MOST_ROWS = 8192  # of the table, what one program's registers hold: 63 nodes at 7 levels, 24 at 15
FIELDS = 9  # ranks in one word of the table; above them, in the first, the worst of all


class Trees(NamedTuple):
    """Trees in best-first order, parents before children. From `counts` on: token 0, parent -1, depth 0, mask 0."""

    tokens: torch.Tensor  # [S, N] int32
    parents: torch.Tensor  # [S, N] int32; -1: the anchor
    depth: torch.Tensor  # [S, N] int32, from 1
    mask: torch.Tensor  # [S, N] int64: bit 0 the anchor, bit j + 1 node j: itself and its ancestors
    logprobs: torch.Tensor  # [S, N] float32, sigma
    counts: torch.Tensor  # [S] int32


def reference(
    logprobs: torch.Tensor, tokens: torch.Tensor, budgets: torch.Tensor, caps: torch.Tensor, nodes: int
) -> Trees:
    """The same by torch ops."""
    return as_rows(build_reference.reference(logprobs, tokens.long(), budgets.long(), caps.long(), nodes))


def as_rows(built: BuiltTrees) -> Trees:
    """Trees of torch ops with the depth and mask of each node, as the kernels give them."""
    nodes = built.tokens.shape[1]
    real = torch.arange(nodes, device=built.tokens.device) < built.counts[:, None]
    rows = torch.nn.functional.pad(built.parents + 1, (1, 0), value=-1)  # as rows of a step, the anchor in front
    rows[:, 1:] = torch.where(real, rows[:, 1:], -1)
    masks = mask_reference.reference(rows)
    return Trees(
        torch.where(real, built.tokens, 0).int(),
        torch.where(real, built.parents, -1).int(),
        torch.where(real, masks.depth[:, 1:], 0).int(),
        torch.where(real, masks.mask[:, 1:], 0),
        torch.where(real, built.logprobs, 0),
        built.counts.int(),
    )


@lru_cache(maxsize=32)
def table(depth: int, nodes: int, device: torch.device) -> torch.Tensor:
    """[W, M] int64: rank + 1 of depth d in bits 6 (d % 9).. of word d // 9, 0 past a tuple's end; rows in order.

    Bits 54.. of the first word: the worst rank + 1.
    """
    known = candidates(depth, nodes, torch.device("cpu"))
    rows = len(known.last)
    terms = known.terms.view(depth, rows)
    ranks = torch.where(terms < depth * nodes, terms % nodes + 1, 0)
    words = torch.zeros((-(-depth // FIELDS), rows), dtype=torch.int64)
    for d in range(depth):
        words[d // FIELDS] |= ranks[d] << (6 * (d % FIELDS))
    words[0] |= (known.worst + 1) << (6 * FIELDS)
    return words.to(device)


@triton.jit
def _field(word, d: tl.constexpr, FIELDS: tl.constexpr):
    return ((word >> (6 * (d % FIELDS))) & 63).to(tl.int32)


@triton.jit
def _tree_build(
    logprobs_ptr, tokens_ptr, budgets_ptr, caps_ptr, table_ptr, scratch_ptr,
    out_tokens, out_parents, out_depth, out_mask, out_logprobs, out_counts, width, rows,
    DEPTH: tl.constexpr, NODES: tl.constexpr, BLOCK: tl.constexpr, FOUND: tl.constexpr, PLACES: tl.constexpr,
    FIELDS: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    follow(PDL)
    s = tl.program_id(0).to(tl.int64)
    logprobs_ptr += s * DEPTH * width
    cap = tl.load(caps_ptr + s)
    cap = tl.minimum(tl.where(cap > 0, cap, width), width)
    row = tl.arange(0, BLOCK)
    real = row < rows
    word = tl.load(table_ptr + row, mask=real, other=0)
    real &= ((word >> (6 * FIELDS)) & 63).to(tl.int32) <= cap
    sigma = tl.zeros([BLOCK], tl.float32)
    for d in tl.static_range(DEPTH):
        if d % FIELDS == 0 and d > 0:
            word = tl.load(table_ptr + (d // FIELDS) * rows + row, mask=row < rows, other=0)
        rank = _field(word, d, FIELDS)
        inside = (rank > 0) & (WIDE | (rank <= width))
        sigma += tl.load(logprobs_ptr + (d * width - 1) + rank, mask=inside, other=0.0)
    cost = tl.where(real, (0.0 - sigma).to(tl.int32, bitcast=True), NEVER)
    budget = tl.minimum(tl.maximum(tl.load(budgets_ptr + s), 0), NODES)
    count = tl.minimum(budget, tl.sum(real.to(tl.int32), 0))
    tl.store(out_counts + s, count)
    scratch_ptr += s * (FOUND + PLACES)
    kept, found = _candidates(cost, row, count, scratch_ptr, BLOCK, BLOCK if BLOCK < 128 else 128, FOUND)
    place = tl.cumsum(kept.to(tl.int32), 0) - 1
    tl.store(scratch_ptr + place, (cost.to(tl.int64) << 32) | row, mask=kept)
    _sort(scratch_ptr, found, FOUND, PLACES)
    _finish(
        tokens_ptr, table_ptr, scratch_ptr + FOUND, out_tokens, out_parents, out_depth, out_mask, out_logprobs,
        s, width, rows, count, DEPTH, NODES, PLACES, FIELDS,
    )  # fmt: skip


@triton.jit
def _candidates(cost, row, count, scratch_ptr, BLOCK: tl.constexpr, LANES: tl.constexpr, FOUND: tl.constexpr):
    """[BLOCK] bool, FOUND times true at most: the `count` first, and perhaps more, by the least of each lane."""
    lanes = cost
    if BLOCK > 512:
        lanes = tl.min(tl.reshape(cost, (BLOCK // 512, 512)), 0)
    lanes = tl.min(tl.reshape(lanes, (lanes.shape[0] // LANES, LANES)), 0)
    tl.store(scratch_ptr + tl.arange(0, LANES), lanes.to(tl.int64))
    tl.debug_barrier()  # what other threads stored is read back
    less = _less(scratch_ptr, lanes.to(tl.int64), LANES)
    tl.debug_barrier()
    t = tl.max(tl.where(less < count, lanes, -0x80000000), 0)
    kept = cost <= t  # none, where none are wanted
    found = tl.sum(kept.to(tl.int32), 0)
    if found > FOUND:  # ties
        kept = choose(cost, row, count)
        found = count
    return kept, found


@triton.jit
def _less(keys_ptr, key, COUNT: tl.constexpr):
    """How many of the COUNT keys in memory are less than each of `key`; 32 at a time, for registers are few."""
    STEP: tl.constexpr = 32 if COUNT > 32 else COUNT
    less = tl.zeros([key.shape[0]], tl.int32)
    for i in tl.range(COUNT // STEP):
        other = tl.load(keys_ptr + i * STEP + tl.arange(0, STEP))
        less += tl.sum((other[None, :] < key[:, None]).to(tl.int32), 1)
    return less


@triton.jit
def _sort(scratch_ptr, found, FOUND: tl.constexpr, PLACES: tl.constexpr):
    """The first PLACES of the distinct keys at scratch, in order, behind them."""
    tl.debug_barrier()  # what other threads stored is read back
    i = tl.arange(0, FOUND)
    tl.store(scratch_ptr + i, NO_KEY + i.to(tl.int64), mask=i >= found)
    tl.debug_barrier()
    key = tl.load(scratch_ptr + i)
    place = _less(scratch_ptr, key, FOUND)
    tl.store(scratch_ptr + FOUND + place, key, mask=place < PLACES)
    tl.debug_barrier()


@triton.jit
def _finish(
    tokens_ptr, table_ptr, sorted_ptr, out_tokens, out_parents, out_depth, out_mask, out_logprobs,
    s, width, rows, count,
    DEPTH: tl.constexpr, NODES: tl.constexpr, PLACES: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """From keys in order to a tree."""
    i = tl.arange(0, PLACES)
    real = i < count
    key = tl.load(sorted_ptr + i, mask=real, other=0)
    row = (key & 0xFFFFFFFF).to(tl.int32)
    above = tl.full([PLACES, PLACES], 1, tl.int1)  # [i, j]: j is i or an ancestor of i
    depth = tl.zeros([PLACES], tl.int32)
    rank = tl.zeros([PLACES], tl.int32)
    word = tl.zeros([PLACES], tl.int64)
    for d in tl.static_range(DEPTH):
        if d % FIELDS == 0:
            word = tl.load(table_ptr + (d // FIELDS) * rows + row, mask=real, other=0)
        field = _field(word, d, FIELDS)
        above &= (field[None, :] == 0) | (field[None, :] == field[:, None])
        depth += (field > 0).to(tl.int32)
        rank = tl.where(field > 0, field - 1, rank)
    above &= real[None, :] & real[:, None]
    bit = tl.full([PLACES], 1, tl.int64) << (i + 1).to(tl.int64)
    mask = tl.sum(tl.where(above, bit[None, :], 0), 1) | 1
    parent = tl.sum(tl.where(above & (depth[None, :] == depth[:, None] - 1), i[None, :] + 1, 0), 1) - 1
    token = tl.load(tokens_ptr + (s * DEPTH + depth - 1) * width + rank, mask=real, other=0)
    sigma = 0.0 - (key >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    at, fits = s * NODES + i, i < NODES
    tl.store(out_tokens + at, token, mask=fits)
    tl.store(out_parents + at, tl.where(real, parent, -1), mask=fits)
    tl.store(out_depth + at, depth, mask=fits)
    tl.store(out_mask + at, tl.where(real, mask, 0), mask=fits)
    tl.store(out_logprobs + at, tl.where(real, sigma, 0.0), mask=fits)


def tree_build(
    logprobs: torch.Tensor, tokens: torch.Tensor, budgets: torch.Tensor, caps: torch.Tensor, nodes: int
) -> Trees:
    """Builds every sequence's tree in one launch, without a host sync.

    logprobs [S, L, K] float32, at most 0 and descending along K; tokens [S, L, K] int32, distinct along K; budgets and
    caps [S] int32 on the device: the most nodes (`nodes` at most), and the most ranks at one depth (0: no cap). The
    table of (L, nodes) is made at the first call, on the CPU: call once before a graph is captured. Where it has more
    than MOST_ROWS rows (blocks of 16 with large trees), torch ops build the trees.
    """
    expect("logprobs", logprobs, torch.float32, (None, None, None))
    sequences, depth, width = logprobs.shape
    expect("tokens", tokens, torch.int32, logprobs.shape)
    expect("budgets", budgets, torch.int32, (sequences,))
    expect("caps", caps, torch.int32, (sequences,))
    at_most("nodes", nodes, MOST_NODES)
    device = logprobs.device
    if sequences and nodes and table(depth, nodes, device).shape[1] > MOST_ROWS:
        return reference(logprobs, tokens, budgets, caps, nodes)
    shape = (sequences, nodes)
    narrow = tuple(torch.empty(shape, dtype=torch.int32, device=device) for _ in range(3))
    mask = torch.empty(shape, dtype=torch.int64, device=device)
    sigma = torch.empty(shape, dtype=torch.float32, device=device)
    counts = (torch.empty if nodes else torch.zeros)(sequences, dtype=torch.int32, device=device)
    if sequences and nodes:
        ranks = table(depth, nodes, device)
        rows = ranks.shape[1]
        block, places = triton.next_power_of_2(rows), max(16, triton.next_power_of_2(nodes))
        found = max(2 * places, 128)
        scratch = torch.empty((sequences, found + places), dtype=torch.int64, device=device)
        _tree_build[(sequences,)](
            logprobs, tokens, budgets, caps, ranks, scratch, *narrow, mask, sigma, counts, width, rows,
            DEPTH=depth, NODES=nodes, BLOCK=block, FOUND=found, PLACES=places, FIELDS=FIELDS,
            WIDE=width >= nodes, num_warps=warps_for(block), **followed(),
        )  # fmt: skip
    return Trees(narrow[0], narrow[1], narrow[2], mask, sigma, counts)


def warps_for(block: int) -> int:
    return min(max(block // 512, 4), 16)
