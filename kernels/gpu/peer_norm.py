"""The end of a block whose parts are on several GPUs: each rank writes its part where the others read it.

The same sum and norm as `rank_norm`, bit for bit. Program r writes row r of its rank's part into every other rank's
inbox (NVLink or PCIe peer access) and reads the others' from its own: one way over the wire, where reading theirs
there would take two, and a flag beside a part a wait for the part to be there first. No flag is needed: a value says
itself that it has come, for an inbox holds ABSENT, the bits of -0.0, which nobody sends. A part's -0.0 goes as 0.0:
the sum begins with 0.0, and is the same. Whoever has read a row puts ABSENT there again.

Two inboxes take turns, row for row. A row of the first is written again when its writer has got that row of the second,
which the reader sent behind the launch that had read, and emptied, the first. So nobody counts, and nothing is reset.
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
            # a multiple of 128, or the stores would be narrow
            theirs = inbox + tl.multiple_of(tl.load(places + rank), 128)
            tl.store(theirs + (RANK * most + r) * H + i, mine, mask=live)
    v = tl.load(x + r * H + i, mask=live, other=0.0)
    scale = tl.load(w + i, mask=live, other=0.0).to(tl.float32)
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
    v += total
    close_row(x, v, scale, out, tap, tap_row, r, i, live, eps, H, TAP)


class Peers(Protocol):
    """An inbox of each rank, and where it is: `kernels.gpu.peers` makes it."""

    rank: int
    count: int
    part: torch.Tensor  # [most rows, H] bfloat16: this rank's
    inbox: torch.Tensor  # [n, most rows, H] int16: this rank's, ABSENT wherever nothing has come
    places: torch.Tensor  # [n] int64: from it to every rank's, in elements; multiples of 128


def peer_norm(
    x: torch.Tensor, peers: Peers, w: torch.Tensor, out: torch.Tensor, eps: float, tap: torch.Tensor | None = None
) -> None:
    """Every rank calls it with as many rows, after it has made its part of them in `peers.part`; calls with two `peers`
    take turns. It waits on the device for the others; nothing bounds that there. ValueError names what does not fit."""
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
    _peer_norm[(rows,)](
        x, peers.part.view(torch.int16), peers.inbox, peers.places, w, out, x if tap is None else tap,
        0 if tap is None else tap.stride(0), eps, len(peers.part), H=hidden, RANKS=peers.count, RANK=peers.rank,
        TAP=tap is not None, BLOCK=triton.next_power_of_2(hidden), num_warps=8, **followed(),
    )  # fmt: skip
