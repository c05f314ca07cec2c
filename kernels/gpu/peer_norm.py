"""The end of a block whose parts are on several GPUs: each rank writes its part where the others read it.

The same sum and norm as `rank_norm`, bit for bit. Program r writes row r of its rank's part into every other rank's
inbox (NVLink or PCIe peer access) and reads the others' from its own: one way over the wire, where reading theirs
there would take two, and a flag beside a part a wait for the part to be there first. No flag is needed: a value says
itself that it has come, for an inbox holds ABSENT, the bits of -0.0, which nobody sends. A part's -0.0 goes as 0.0:
the sum begins with 0.0, and is the same. Whoever has read a row puts ABSENT there again.

Two inboxes take turns, row for row. A row of the first is written again when its writer has got that row of the second,
which the reader sent behind the launch that had read, and emptied, the first. So nobody counts, and nothing is reset.

Many rows of more than two ranks go in two shots, for a wire would carry every row n - 1 times otherwise: row r's parts
go to rank r % n alone, which adds them, and sends the norm, and the row itself where it is tapped, to the others. Then
only that rank's x has the new row; the others' keeps what it was. A rank that waits for the norm of a row has sent its
part before. What comes from the owner lies in rows of its own, which hold GONE, the bits of a NaN that no sum makes.
"""

from __future__ import annotations

from typing import Protocol

import torch
import triton
import triton.language as tl

from kernels.gpu.follow import follow, followed
from kernels.gpu.rank_norm import close_row
from kernels.gpu.shapes import check, check_rows

ABSENT = tl.constexpr(-(1 << 15))  # of int16: -0.0 in bfloat16
GONE = tl.constexpr(-1)  # of int16 and int32: a NaN's bits, in bfloat16 and float32, that arithmetic does not give
HOP_BYTES = 2 << 20  # what a wire carries while a second shot is on its way, with room: 4 us at 400 GB/s are 1.6 MB


@triton.jit
def _collect(
    inbox, mine, most, r, i, live, H: tl.constexpr, RANKS: tl.constexpr, RANK: tl.constexpr, BLOCK: tl.constexpr
):
    """The sum of row r's parts in rank order, once all have come; the inbox is empty afterwards."""
    total = tl.zeros((BLOCK,), tl.float32)
    missing = 1
    while missing > 0:
        total = tl.zeros((BLOCK,), tl.float32)
        absent = tl.zeros((BLOCK,), tl.int32)
        for rank in tl.static_range(RANKS):
            come = mine
            if rank != RANK:
                come = tl.load(inbox + (rank * most + r) * H + i, mask=live, other=0, volatile=True)
                absent |= (come == ABSENT).to(tl.int32)
            total += come.to(tl.bfloat16, bitcast=True).to(tl.float32)
        missing = tl.max(absent, 0)
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            tl.store(inbox + (rank * most + r) * H + i, tl.full((BLOCK,), ABSENT, tl.int16), mask=live)
    return total


@triton.jit
def _sent(base, places, rank, offset, i, v, live):
    """Writes v [BLOCK] into another rank's memory, which begins `places[rank]` elements behind this one's."""
    # a multiple of 128, or the stores would be narrow
    tl.store(base + tl.multiple_of(tl.load(places + rank), 128) + offset + i, v, mask=live)


@triton.jit
def _received(row, i, live, BLOCK: tl.constexpr):
    """What the owner of a row sent, once it is whole; GONE lies there again afterwards."""
    come = tl.load(row + i, mask=live, other=0, volatile=True)
    while tl.max((come == GONE).to(tl.int32), 0) > 0:
        come = tl.load(row + i, mask=live, other=0, volatile=True)
    tl.store(row + i, tl.full((BLOCK,), GONE, row.dtype.element_ty), mask=live)
    return come


@triton.jit
def _peer_norm(
    x, part, inbox, places, w, out, tap, tap_row, eps, most,
    H: tl.constexpr, RANKS: tl.constexpr, RANK: tl.constexpr, TAP: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    follow(PDL)
    r = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    live = i < H
    mine = tl.load(part + r * H + i, mask=live, other=0)
    mine = tl.where(mine == ABSENT, 0, mine).to(tl.int16)
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            _sent(inbox, places, rank, (RANK * most + r) * H, i, mine, live)
    v = tl.load(x + r * H + i, mask=live, other=0.0)
    scale = tl.load(w + i, mask=live, other=0.0).to(tl.float32)
    v += _collect(inbox, mine, most, r, i, live, H, RANKS, RANK, BLOCK)
    close_row(x, v, scale, out, tap, tap_row, r, i, live, eps, H, TAP)


@triton.jit
def _peer_norm_twice(
    x, part, inbox, normed, tapped, places, w, out, tap, tap_row, eps, most,
    H: tl.constexpr, RANKS: tl.constexpr, RANK: tl.constexpr, TAP: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    follow(PDL)
    r = tl.program_id(0).to(tl.int64)
    owner = (r % RANKS).to(tl.int32)
    i = tl.arange(0, BLOCK)
    live = i < H
    mine = tl.load(part + r * H + i, mask=live, other=0)
    mine = tl.where(mine == ABSENT, 0, mine).to(tl.int16)
    if owner == RANK:
        v = tl.load(x + r * H + i, mask=live, other=0.0)
        scale = tl.load(w + i, mask=live, other=0.0).to(tl.float32)
        v += _collect(inbox, mine, most, r, i, live, H, RANKS, RANK, BLOCK)
        y = close_row(x, v, scale, out, tap, tap_row, r, i, live, eps, H, TAP)
        for rank in tl.static_range(RANKS):
            if rank != RANK:
                _sent(normed, places, rank, r * H, i, y.to(tl.int16, bitcast=True), live)
                if TAP:
                    _sent(tapped, places + RANKS, rank, r * H, i, v.to(tl.int32, bitcast=True), live)
    else:
        _sent(inbox, places, owner, (RANK * most + r) * H, i, mine, live)
        if TAP:
            row = _received(tapped + r * H, i, live, BLOCK)
            tl.store(tap + r * tap_row + i, row.to(tl.float32, bitcast=True), mask=live)
        theirs = _received(normed + r * H, i, live, BLOCK)
        tl.store(out + r * H + i, theirs.to(tl.bfloat16, bitcast=True), mask=live)


class Peers(Protocol):
    """An inbox of each rank, and where it is: `kernels.gpu.peers` makes it."""

    rank: int
    count: int
    part: torch.Tensor  # [most rows, H] bfloat16: this rank's
    inbox: torch.Tensor  # [n, most rows, H] int16: this rank's, ABSENT wherever nothing has come
    normed: torch.Tensor  # [most rows, H] int16: what owners of rows send, GONE wherever nothing has come
    tapped: torch.Tensor  # [most rows, H] int32: the same of tapped rows
    places: (
        torch.Tensor
    )  # [2, n] int64: from this rank's to every rank's, in elements of int16, int32; multiples of 128


def two_shots(rows: int, hidden: int, ranks: int) -> bool:
    """Whether a second way costs less than what it saves on the wires: a rank sends (n - 1) R rows in one shot, and
    2 (n - 1) / n R in two."""
    return rows * hidden * 2 * (ranks - 1) * (ranks - 2) >= HOP_BYTES * ranks


def peer_norm(
    x: torch.Tensor, peers: Peers, w: torch.Tensor, out: torch.Tensor, eps: float, tap: torch.Tensor | None = None
) -> None:
    """Every rank calls it with as many rows, after it has made its part of them in `peers.part`; calls with two `peers`
    take turns. It waits on the device for the others; nothing bounds that there. In two shots x is new in this rank's
    rows alone, those r with r % n = rank. ValueError names what does not fit."""
    rows, hidden = x.shape
    check("x", x, (rows, hidden), torch.float32)
    check("part", peers.part, (None, hidden), torch.bfloat16)
    check("inbox", peers.inbox, (peers.count, len(peers.part), hidden), torch.int16)
    check("w", w, (hidden,))
    check("out", out, (rows, hidden))
    if rows > len(peers.part):
        raise ValueError(f"x has {rows} rows, the ranks have room for {len(peers.part)}")
    if tap is not None:
        check_rows("tap", tap, hidden)
    what = (x, peers.part.view(torch.int16), peers.inbox)
    rest = (peers.places, w, out, x if tap is None else tap, 0 if tap is None else tap.stride(0), eps, len(peers.part))
    how = {"H": hidden, "RANKS": peers.count, "RANK": peers.rank, "TAP": tap is not None,
           "BLOCK": triton.next_power_of_2(hidden), "num_warps": 8, **followed()}  # fmt: skip
    if two_shots(rows, hidden, peers.count):
        check("normed", peers.normed, (len(peers.part), hidden), torch.int16)
        check("tapped", peers.tapped, (len(peers.part), hidden), torch.int32)
        _peer_norm_twice[(rows,)](*what, peers.normed, peers.tapped, *rest, **how)
    else:
        _peer_norm[(rows,)](*what, *rest, **how)
