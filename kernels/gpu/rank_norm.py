"""The end of a block that several ranks share: their parts are added in rank order, and the next block's input normed.

    x[r] += ((p_0[r] + p_1[r]) + ...) + p_n-1[r]                 float32; p_i is rank i's part
    y[r] = x[r] * rsqrt(mean(x[r]^2) + eps) * w                  rounded once

x [R, H] float32 in place, w [H] -> y [R, H]; `tap` [R, H], a part of wider rows, gets x. A part is rounded once, to the
model's type: that is what goes over the wire. Every rank adds all parts itself, so that all have equal bits, whichever
way the parts came: `rank_norm` reads them side by side (one process's, or gathered), `peer_norm` where the ranks made
them, in their own memory (NVLink or PCIe peer access): one launch instead of a collective and a norm.

`peer_norm`, program r: tells every rank that its row r is there (release), waits until theirs are (acquire) and reads
them. The launch before it made the part. Two buffers take turns, each with flags of its own: whoever writes the first
again was told, in the launch of the second, that all ranks were through with the launch of the first.
"""

from __future__ import annotations

from typing import Protocol

import torch
import triton
import triton.language as tl

from kernels.gpu.follow import follow, followed
from kernels.gpu.shapes import check, check_rows

TEST_SHAPES = [(1, 32, 2), (5, 96, 3), (9, 384, 8)]  # (R, H, n)


def reference(x: torch.Tensor, parts: torch.Tensor, w: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The new x, and y in float32; parts [n, R, H]."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    x = x + total
    return x, x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * w.float()


@triton.jit
def _wait(flags, turn):
    """Until every flag is at `turn` or past it; they count on, and over."""
    tl.inline_asm_elementwise(
        """{
        .reg .pred early;
        .reg .b32 seen;
        again:
        ld.acquire.sys.global.u32 seen, [$1];
        sub.s32 seen, seen, $2;
        setp.lt.s32 early, seen, 0;
        @early bra again;
        mov.u32 $0, seen;
        }""",
        "=r,l,r", [flags, turn], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _rank_norm(
    x, parts, part_offsets, flags, flag_offsets, turns, w, out, tap, part_stride, tap_row, eps, most,
    H: tl.constexpr, RANKS: tl.constexpr, RANK: tl.constexpr, PEERS: tl.constexpr, LANES: tl.constexpr,
    TAP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    follow(PDL)
    row = tl.program_id(0)
    r = row.to(tl.int64)
    i = tl.arange(0, BLOCK)
    live = i < H
    if PEERS:
        turn = tl.load(turns + row) + 1
        lane = tl.minimum(tl.arange(0, LANES), RANKS - 1)
        theirs = flags + tl.load(flag_offsets + lane) + RANK * most + row
        value = tl.zeros((LANES,), tl.int32) + turn
        tl.atomic_xchg(theirs, value, mask=tl.arange(0, LANES) < RANKS, sem="release", scope="sys")
    v = tl.load(x + r * H + i, mask=live, other=0.0)
    scale = tl.load(w + i, mask=live, other=0.0).to(tl.float32)
    if PEERS:
        _wait(flags + lane * most + row, value)
        tl.debug_barrier()  # a thread waited for one rank alone, and may be the last to have read `turns`
        tl.store(turns + row, turn)
    total = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(RANKS):
        # a multiple of 128, or the loads would be narrow
        part = parts + (tl.multiple_of(tl.load(part_offsets + rank), 128) if PEERS else rank * part_stride)
        total += tl.load(part + r * H + i, mask=live, other=0.0).to(tl.float32)
    v += total
    tl.store(x + r * H + i, v, mask=live)
    if TAP:
        tl.store(tap + r * tap_row + i, v, mask=live)
    y = v * tl.rsqrt(tl.sum(v * v, 0) / H + eps) * scale
    tl.store(out + r * H + i, y.to(out.dtype.element_ty), mask=live)


class Peers(Protocol):
    """One buffer of each rank, and where it is: `kernels.gpu.peers` makes it."""

    rank: int
    count: int
    part: torch.Tensor  # [most rows, H]: this rank's
    part_offsets: torch.Tensor  # [n] int64: from it to every rank's, in elements; multiples of 128
    flags: torch.Tensor  # [n, most rows] int32: this rank's, which the others set
    flag_offsets: torch.Tensor  # [n] int64: from them to every rank's, in elements
    turns: torch.Tensor  # [most rows] int32: how often a row was added


def rank_norm(
    x: torch.Tensor,
    parts: torch.Tensor,
    w: torch.Tensor,
    out: torch.Tensor,
    eps: float,
    tap: torch.Tensor | None = None,
) -> None:
    """Parts [n, R, H]. ValueError names what does not fit."""
    rows, hidden = x.shape
    if parts.dim() != 3 or tuple(parts.shape[1:]) != (rows, hidden) or parts.stride()[1:] != (hidden, 1):
        raise ValueError(f"parts are {list(parts.shape)}, [any, {rows}, {hidden}] with whole rows was expected")
    _launch(x, parts, (x, x, x, x), parts.stride(0), w, out, eps, tap, RANKS=len(parts), RANK=0, PEERS=False, LANES=2)


def peer_norm(
    x: torch.Tensor, peers: Peers, w: torch.Tensor, out: torch.Tensor, eps: float, tap: torch.Tensor | None = None
) -> None:
    """Every rank calls it with as many rows, after it has made its part of them in `peers.part`. It waits on the device
    for the others; nothing bounds that there. ValueError names what does not fit."""
    rows, hidden = x.shape
    check("part", peers.part, (None, hidden))
    if rows > len(peers.part):
        raise ValueError(f"x has {rows} rows, the ranks have room for {len(peers.part)}")
    where = peers.part_offsets, peers.flags, peers.flag_offsets, peers.turns
    lanes = max(2, triton.next_power_of_2(peers.count))
    _launch(x, peers.part, where, 0, w, out, eps, tap, RANKS=peers.count, RANK=peers.rank, PEERS=True, LANES=lanes)


def _launch(
    x: torch.Tensor,
    parts: torch.Tensor,
    where: tuple[torch.Tensor, ...],
    stride: int,
    w: torch.Tensor,
    out: torch.Tensor,
    eps: float,
    tap: torch.Tensor | None,
    **form: int,
) -> None:
    rows, hidden = x.shape
    check("x", x, (rows, hidden), torch.float32)
    check("w", w, (hidden,))
    check("out", out, (rows, hidden))
    if tap is not None:
        check_rows("tap", tap, hidden)
    _rank_norm[(rows,)](
        x, parts, *where, w, out, x if tap is None else tap, stride, 0 if tap is None else tap.stride(0), eps,
        where[3].shape[0], H=hidden, TAP=tap is not None, BLOCK=triton.next_power_of_2(hidden), num_warps=8, **form,
        **followed(first=not form["PEERS"]),  # what stands before it may be a collective
    )  # fmt: skip


@triton.jit
def _rank_part(delta, partials, out, H: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    follow(PDL)
    r = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = i < H
    v = tl.load(delta + r * H + i, mask=live, other=0.0)
    routed = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(SLOTS):
        routed += tl.load(partials + (r * SLOTS + j) * H + i, mask=live, other=0.0)
    v += routed
    tl.store(out + r * H + i, v.to(out.dtype.element_ty), mask=live)


def rank_part(delta: torch.Tensor, partials: torch.Tensor, out: torch.Tensor) -> None:
    """out[r] = delta[r] + sum_j partial[r, j], j ascending, rounded once: a rank's part of a sparse block.

    delta [R, H], partials [R, J, H] float32 -> out [R, H]. ValueError names what does not fit.
    """
    rows, hidden = out.shape
    check("delta", delta, (rows, hidden), torch.float32)
    check("partials", partials, (rows, None, hidden), torch.float32)
    check("out", out, (rows, hidden))
    block = min(1024, triton.next_power_of_2(hidden))
    _rank_part[(rows, triton.cdiv(hidden, block))](
        delta, partials, out, H=hidden, SLOTS=partials.shape[1], BLOCK=block, num_warps=4,
        **followed(),
    )  # fmt: skip
