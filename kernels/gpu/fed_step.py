"""What stands between a draft, its verification and the next draft where all of it stays on the GPU: three launches.

    pack    trees and anchors        -> the rows of the verify step, sequence by sequence
    follow_on  walks and the step's rows -> the next step's anchors, positions and context rows, and a line for the host
    pick    the walks' features      -> the rows that the next draft's context begins with

A sequence takes part while it is `live` and asked for (ask >= 0: nodes of its tree at most). It stops being live when
its draw failed, when nobody asks for it, and when its next anchor would stand behind `last`: so no row is ever written
behind the pages that were reserved. One that does not take part has no rows, an empty context and no line.

The host reads the trees when they have been verified already. So that nothing in them can lead a kernel astray, a
token out of the vocabulary counts as 0 and a parent that does not come before its node as the anchor.

Line of the host: length, bonus, then the path's rows (kernels/gpu/tree_accept.py); length 0: it did not take part.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.gpu.checks import expect
from kernels.gpu.follow import follow, followed
from kernels.gpu.tree_accept import MOST_ROWS

LINE = 2  # words of a line before its path


class Rows(NamedTuple):
    """A verify step's rows as `pack` fills them, all int32; what is behind the last sequence's rows is padding."""

    tokens: torch.Tensor  # [R]
    parents: torch.Tensor  # [R], within the sequence
    seq: torch.Tensor  # [R]; -1: padding
    first: torch.Tensor  # [S]
    starts: torch.Tensor  # [S + 1]


class Places(NamedTuple):
    """Where sequences stand; int32. `follow_on` moves all of it but `last`, which is the last anchor's position."""

    live: torch.Tensor  # [S] 0 or 1
    anchor: torch.Tensor  # [S] the last token
    prefix: torch.Tensor  # [S] its position
    draws: torch.Tensor  # [S] the position that the anchor's row draws for
    last: torch.Tensor  # [S]


class Contexts(NamedTuple):
    """What a draft reads, int32; `follow_on` moves all but `begin` and `pages`. B: its block."""

    tokens: torch.Tensor  # [S * B]; the first of each block is the anchor
    position: torch.Tensor  # [S * B]
    start: torch.Tensor  # [S] of the context
    end: torch.Tensor  # [S]
    anchor: torch.Tensor  # [S] its position
    begin: torch.Tensor  # [S] where the context starts while the sequence is live; -1: it drafts nothing
    pages: torch.Tensor  # [S, P]
    slot: torch.Tensor  # [S * B] of rows that the next draft appends; -1: none
    at: torch.Tensor  # [S * B] their positions
    source: torch.Tensor  # [S * B] the step's rows that they come from; -1: none


def pack_reference(
    trees: list[tuple[list[int], list[int]]], live: list[int], ask: list[int], anchor: list[int], vocabulary: int
) -> list[tuple[list[int], list[int]]]:
    """Tokens and parents of each sequence's rows; trees as (tokens, parents)."""
    out = list[tuple[list[int], list[int]]]()
    for (tokens, parents), lives, most, token in zip(trees, live, ask, anchor, strict=True):
        if not lives or most < 0:
            out.append(([], []))
            continue
        own = [t if 0 <= t < vocabulary else 0 for t in tokens[:most]]
        up = [p if -1 <= p < n else -1 for n, p in enumerate(parents[:most])]
        out.append(([token, *own], [-1, *(p + 1 for p in up)]))
    return out


@triton.jit(do_not_specialize=["sequences", "rows"])
def _pack(
    live_ptr, ask_ptr, anchor_ptr, trees_ptr, tokens_ptr, parents_ptr, seq_ptr, first_ptr, starts_ptr,
    vocabulary, sequences, rows,
    NODES: tl.constexpr, SEQUENCES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    follow(PDL)
    s = tl.program_id(0)
    j = tl.arange(0, SEQUENCES)
    asked = tl.load(ask_ptr + j, mask=j < sequences, other=-1)
    on = (tl.load(live_ptr + j, mask=j < sequences, other=0) != 0) & (asked >= 0)
    count = tl.zeros([SEQUENCES], tl.int32)
    if NODES:
        count += tl.load(trees_ptr + j * (3 * NODES + 1) + 3 * NODES, mask=on, other=0)
    count = tl.minimum(tl.maximum(count, 0), tl.minimum(asked, NODES)) + 1
    count = tl.where(on, count, 0)
    begin = tl.sum(tl.where(j < s, count, 0), 0)
    i = tl.arange(0, BLOCK)
    tl.store(starts_ptr + s, begin)
    if s == sequences:  # the last program: padding
        while begin < rows:
            tl.store(seq_ptr + begin + i, tl.full([BLOCK], -1, tl.int32), mask=begin + i < rows)
            tl.store(tokens_ptr + begin + i, tl.zeros([BLOCK], tl.int32), mask=begin + i < rows)
            tl.store(parents_ptr + begin + i, tl.full([BLOCK], -1, tl.int32), mask=begin + i < rows)
            begin += BLOCK
    else:
        tl.store(first_ptr + s, begin)
        mine = tl.sum(tl.where(j == s, count, 0), 0)
        token = tl.where(i == 0, tl.load(anchor_ptr + s), 0)
        parent = tl.full([BLOCK], -1, tl.int32)
        if NODES:
            node = (i > 0) & (i < mine)
            line = trees_ptr + s * (3 * NODES + 1) + i - 1
            one = tl.load(line, mask=node, other=0)
            token = tl.where(node & (one >= 0) & (one < vocabulary), one, token)
            up = tl.load(line + NODES, mask=node, other=-1)
            parent = tl.where(node, tl.where((up >= 0) & (up < i - 1), up, -1) + 1, parent)
        tl.store(tokens_ptr + begin + i, token, mask=i < mine)
        tl.store(parents_ptr + begin + i, parent, mask=i < mine)
        tl.store(seq_ptr + begin + i, tl.zeros([BLOCK], tl.int32) + s, mask=i < mine)


def pack(
    trees: torch.Tensor | None, places: Places, ask: torch.Tensor, rows: Rows, vocabulary: int, first: bool = False
) -> None:
    """trees [S, 3 N + 1] int32: tokens, parents, what is not read, count; None: anchors alone. ask [S] int32.

    R must hold all that is asked for: not checked here. `first`: no kernel, or one of PyTorch's, stands before it.
    """
    sequences, count = len(ask), len(rows.tokens)
    nodes = 0 if trees is None else trees.shape[1] // 3
    if trees is not None:
        expect("trees", trees, torch.int32, (sequences, 3 * nodes + 1))
    for name in ("live", "anchor"):
        expect(name, getattr(places, name), torch.int32, (sequences,))
    for name in ("tokens", "parents", "seq"):
        expect(name, getattr(rows, name), torch.int32, (count,))
    expect("first", rows.first, torch.int32, (sequences,))
    expect("starts", rows.starts, torch.int32, (sequences + 1,))
    _pack[(sequences + 1,)](
        places.live, ask, places.anchor, ask if trees is None else trees, *rows, vocabulary, sequences, count,
        NODES=nodes, SEQUENCES=triton.next_power_of_2(sequences), BLOCK=triton.next_power_of_2(nodes + 1),
        num_warps=1, **followed(first),
    )  # fmt: skip


@triton.jit
def _follow_on(
    walks_ptr, starts_ptr, live_ptr, anchor_ptr, prefix_ptr, draws_ptr, last_ptr,
    tokens_ptr, position_ptr, start_ptr, end_ptr, place_ptr, begin_ptr, pages_ptr, slot_ptr, at_ptr, source_ptr,
    told_ptr,
    WALK: tl.constexpr, DEEPEST: tl.constexpr, PAGES: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr,
    DRAFTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    follow(PDL)
    s = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    inside = i < B
    first = tl.load(starts_ptr + s)
    took = tl.load(starts_ptr + s + 1) > first
    walk = walks_ptr + s * WALK
    length = tl.where(took, tl.load(walk + DEEPEST), 0)
    bonus = tl.where(took, tl.load(walk + DEEPEST + 1), -1)
    path = tl.load(walk + i, mask=inside & (i < length), other=-1)
    told = told_ptr + s * (B + 2)
    tl.store(told, length)
    tl.store(told + 1, bonus)
    tl.store(told + 2 + i, path, mask=inside)
    base = tl.load(prefix_ptr + s)
    now = base + length
    on = took & (bonus >= 0) & (now <= tl.load(last_ptr + s))
    now = tl.where(on, now, 0)
    token = tl.where(on, bonus, 0)
    tl.store(live_ptr + s, on.to(tl.int32))
    tl.store(anchor_ptr + s, token)
    tl.store(prefix_ptr + s, now)
    tl.store(draws_ptr + s, now + 1)
    if DRAFTS:
        begin = tl.load(begin_ptr + s)
        drafts = on & (begin >= 0)
        takes = drafts & inside & (i < length)
        at = base + i
        page = tl.load(pages_ptr + s * PAGES + at // 64 - begin // 64, mask=takes, other=0)
        tl.store(slot_ptr + s * B + i, tl.where(takes, page * 64 + at % 64, -1), mask=inside)
        tl.store(at_ptr + s * B + i, tl.where(takes, at, 0), mask=inside)
        tl.store(source_ptr + s * B + i, tl.where(takes, first + path, -1), mask=inside)
        tl.store(tokens_ptr + s * B, token)
        tl.store(position_ptr + s * B + i, now + i, mask=inside)
        tl.store(start_ptr + s, tl.where(drafts, begin, 0))
        tl.store(end_ptr + s, tl.where(drafts, now, 0))
        tl.store(place_ptr + s, tl.where(drafts, now, 0))


def follow_on(
    walks: torch.Tensor, starts: torch.Tensor, places: Places, contexts: Contexts | None, told: torch.Tensor
) -> None:
    """walks [S, 64 + 2] int32: path, length, bonus; told [S, 2 + B] int32. No walk has more than B rows: not checked.

    contexts None: nothing is drafted, and B is 1.
    """
    sequences, block = told.shape[0], told.shape[1] - LINE
    expect("walks", walks, torch.int32, (sequences, MOST_ROWS + 2))
    expect("starts", starts, torch.int32, (sequences + 1,))
    expect("told", told, torch.int32, (sequences, None))
    for name, tensor in places._asdict().items():
        expect(name, tensor, torch.int32, (sequences,))
    if contexts is not None:
        for name, tensor in contexts._asdict().items():
            whole = name in ("tokens", "position", "slot", "at", "source")
            shape = (sequences, None) if name == "pages" else (sequences * (block if whole else 1),)
            expect(f"contexts.{name}", tensor, torch.int32, shape)
    of = contexts or Contexts(*[starts] * 10)
    _follow_on[(sequences,)](
        walks, starts, *places, *of, told, WALK=walks.shape[1], DEEPEST=MOST_ROWS,
        PAGES=1 if contexts is None else contexts.pages.shape[1], B=block, BLOCK=triton.next_power_of_2(block),
        DRAFTS=contexts is not None, num_warps=1, **followed(),
    )  # fmt: skip


@triton.jit
def _pick(features_ptr, source_ptr, out_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    follow(PDL)
    r = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(source_ptr + r).to(tl.int64)
    live = (i < WIDTH) & (row >= 0)
    tl.store(out_ptr + r * WIDTH + i, tl.load(features_ptr + row * WIDTH + i, mask=live, other=0.0), mask=live)


def pick(features: torch.Tensor, source: torch.Tensor, out: torch.Tensor) -> None:
    """out[r] = features[source[r]]; nothing is written where that is -1. features [R, W], out [N, W], float32."""
    count, width = out.shape
    expect("features", features, torch.float32, (None, width))
    expect("source", source, torch.int32, (count,))
    expect("out", out, torch.float32, (count, width))
    block = min(triton.next_power_of_2(width), 1024)
    _pick[(count, -(-width // block))](
        features, source, out, WIDTH=width, BLOCK=block, num_warps=4, **followed()
    )  # fmt: skip
