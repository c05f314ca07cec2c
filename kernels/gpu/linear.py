"""Dense products whose rows depend on nothing but themselves.

    y[r, h, n] = scale * sum_k x[s(r), h, k] w[h, n, k],   s(r) = rows[r], or r where there is no `rows`

x [R', H, K], w [H, N, K] -> y [R, H, N], summed in float32 and rounded once; H is 1 for the two-dimensional form.

A row's sum is a chain of MMA steps of 16 products, ascending in k, whatever the tile; where K is long and N small, it
is eight chains of an eighth of K each, added in their order (`parts_of`: by the layer's shape alone). Programs compute
them side by side for few rows, one after another for many. Tiles of 16 and of 64 rows give equal bits (mma.sync and
wgmma were compared on 3.7 M sums on sm_90), so the row count may choose between them; nothing is tuned at run time.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.gpu.follow import fetch_ahead, follow, followed
from kernels.gpu.linear_held import held_for, multiply_held, whole_lines
from kernels.gpu.shapes import check

TEST_SHAPES = [  # (R, H, N, K)
    (1, 1, 32, 16), (5, 1, 160, 96), (17, 4, 16, 32), (70, 1, 96, 64), (33, 8, 128, 32), (3, 1, 40, 4096),
]  # fmt: skip
BLOCK_N = 32
MOST_APART = 64  # rows whose parts of K have programs of their own
FEW_ROWS, MANY_ROWS, WIDE_FROM = 16, 64, 128  # tiles of rows, and the row count from which the large one serves


def reference(x: torch.Tensor, w: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
    """[R, H, N] float32."""
    x = x if rows is None else x.index_select(0, rows)
    return torch.einsum("rhk,hnk->rhn", x.float(), w.float())


@triton.jit
def chain(
    x, w, live, n, first, N: tl.constexpr, K: tl.constexpr, SPAN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """[BM, BN]: one chain, over columns `first` .. of SPAN."""
    acc = tl.zeros((BM, BN), tl.float32)
    for begin in range(0, SPAN, BK):
        k = first + begin + tl.arange(0, BK)
        if SPAN % BK == 0:  # masks along k would make loads narrow
            a = tl.load(x + k[None, :], mask=live[:, None], other=0.0)
            b = tl.load(w + k[:, None], mask=(n < N)[None, :], other=0.0)
        else:
            a = tl.load(x + k[None, :], mask=live[:, None] & (k < K)[None, :], other=0.0)
            b = tl.load(w + k[:, None], mask=(n < N)[None, :] & (k < K)[:, None], other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["count"])
def _linear(
    x, rows, w, out, count, N: tl.constexpr, K: tl.constexpr,
    x_row, x_head, out_row, out_head, out_part, scale,
    GATHER: tl.constexpr, PARTS: tl.constexpr, APART: tl.constexpr, AHEAD: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    SPAN: tl.constexpr = K // PARTS
    head, part = tl.program_id(2), 0
    if APART:
        head, part = tl.program_id(2) // PARTS, tl.program_id(2) % PARTS
    if PDL and AHEAD > 0:
        fetch_ahead(w + (head * N + n).to(tl.int64) * K + part * SPAN, n < N, AHEAD)
    follow(PDL)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    live = m < count
    source = tl.load(rows + m, mask=live, other=0) if GATHER else m
    x += head * x_head + source[:, None].to(tl.int64) * x_row
    w += (head * N + n[None, :]).to(tl.int64) * K
    acc = chain(x, w, live, n, part * SPAN, N, K, SPAN, BM, BN, BK)
    if not APART:
        for p in range(1, PARTS):
            acc += chain(x, w, live, n, p * SPAN, N, K, SPAN, BM, BN, BK)
    out += head * out_head + part * out_part + m[:, None].to(tl.int64) * out_row + n[None, :]
    tl.store(out, (acc * scale).to(out.dtype.element_ty), mask=live[:, None] & (n < N)[None, :])


@triton.jit
def joined(parts, at, live, PARTS: tl.constexpr, part_stride):
    """The sum of a product's parts at these places, in their order."""
    acc = tl.load(parts + at, mask=live, other=0.0).to(tl.float32)
    for p in tl.static_range(1, PARTS):
        acc += tl.load(parts + p * part_stride + at, mask=live, other=0.0).to(tl.float32)
    return acc


@triton.jit
def _add_parts(
    parts, out, part_stride, out_row, scale,
    N: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    follow(PDL)
    r = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    acc = joined(parts, r * N + n, n < N, PARTS, part_stride)
    tl.store(out + r * out_row + n, (acc * scale).to(out.dtype.element_ty), mask=n < N)


class Cut(NamedTuple):
    """How a product is divided among programs. No bit depends on it."""

    bm: int  # rows of a program
    bn: int
    bk: int
    stages: int
    warps: int = 4
    ahead: int = 0  # columns of w that are fetched while the kernel before still runs


def parts_of(n: int, k: int) -> int:
    """Parts that K is summed in, by the layer's shape alone: a long K of few columns would be read by few programs."""
    return 8 if k >= 4096 and n <= 4096 and k % 512 == 0 else 1


def apart(rows: int, n: int, k: int) -> int:
    """Parts that `linear_parts` leaves to be added: of many rows it adds them itself."""
    return parts_of(n, k) if rows <= MOST_APART else 1


# (N, K) of a K2.6 rank at TP=8: for up to 16 rows, for more. Found on an H200, cold weights.
CUTS = {
    (2112, 7168): (Cut(16, 64, 64, 5), Cut(64, 64, 128, 3, ahead=256)),  # q_a and kv_a
    (1536, 1536): (Cut(16, 16, 256, 5, ahead=256), Cut(64, 16, 128, 5, ahead=512)),  # q_b
    (512, 128): (Cut(16, 32, 64, 3, ahead=128), Cut(64, 32, 64, 3, ahead=128)),  # W_UK
    (128, 512): (Cut(16, 32, 256, 3, ahead=256), Cut(16, 32, 256, 3, ahead=256)),  # W_UV
    (7168, 1024): (Cut(16, 64, 256, 4, ahead=256), Cut(64, 64, 128, 4, 8, ahead=256)),  # o
    (896, 7168): (Cut(16, 64, 128, 5), Cut(64, 64, 64, 5)),  # shared expert's gate and up, router
    (7168, 256): (Cut(16, 64, 64, 5, ahead=256), Cut(64, 64, 64, 5, ahead=256)),  # its down
    (4608, 7168): (Cut(16, 32, 128, 5), Cut(64, 64, 128, 4, 8)),  # layer 0
    (7168, 2304): (Cut(16, 64, 128, 5), Cut(64, 32, 128, 4, ahead=256)),
    (20480, 7168): (Cut(16, 64, 64, 5), Cut(64, 64, 64, 4)),  # lm_head
}


def cut_of(rows: int, n: int, k: int, shared: int = 1 << 20) -> Cut:
    """By a fixed table; with as many stages as go into `shared` bytes of a program's memory."""
    if (n, k) not in CUTS:
        return Cut(FEW_ROWS if rows < WIDE_FROM else MANY_ROWS, BLOCK_N, min(64, triton.next_power_of_2(k)), 3)
    few, more = CUTS[n, k]
    cut = few if rows <= FEW_ROWS else more
    return cut._replace(stages=max(2, min(cut.stages, shared // ((cut.bm + cut.bn) * cut.bk * 2))))


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes that one program may have, less what a kernel needs beside its stages."""
    if device.type != "cuda":
        return 1 << 20
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"]) - 4096


def cut_for(device: torch.device, rows: int, n: int, k: int) -> Cut:
    """`cut_of` with the memory of a program there."""
    return cut_of(rows, n, k, shared_memory(device))


def linear(
    x: torch.Tensor,
    w: torch.Tensor,
    out: torch.Tensor,
    rows: torch.Tensor | None = None,
    tile: int | None = None,
    scale: float = 1.0,
    eager: bool = False,
) -> torch.Tensor:
    """Fills out [R, N] from x [R', K] and w [N, K], or out [R, H, N] from x [R', H, K] and w [H, N, K].

    x and out may be parts of wider rows; `rows` int32 [R] picks x's. `tile` forces a tile of rows, for tests. `eager`:
    the next launch may begin before this one's turn (linear_held.py says what it must not do).
    ValueError names what does not fit.
    """
    given = out
    if x.dim() == 2:
        x, w, out = x.unsqueeze(1), w.unsqueeze(0), out.unsqueeze(1)
    heads, n, k = w.shape
    count = out.shape[0]
    check("w", w, (heads, n, k), x.dtype)
    if tuple(x.shape[1:]) != (heads, k) or x.stride(2) != 1:
        raise ValueError(f"x has shape {list(x.shape)} and strides {list(x.stride())}, rows of [{heads}, {k}] expected")
    if tuple(out.shape) != (count, heads, n) or out.stride(2) != 1:
        raise ValueError(
            f"out has shape {list(out.shape)}, strides {list(out.stride())}, rows of [{heads}, {n}] expected"
        )
    if rows is None and x.shape[0] < count:
        raise ValueError(f"x has {x.shape[0]} rows, out has {count}")
    if rows is not None:
        check("rows", rows, (count,), torch.int32)
    parts = apart(count, n, k)
    if parts == 1:
        multiply(x, w, out.unsqueeze(0), rows, scale, tile, eager=eager)
        return given
    made = torch.empty(parts, count, 1, n, device=out.device)
    multiply(x, w, made, rows, 1.0, tile)
    _add_parts[(triton.cdiv(n, 512), count)](
        made, out, count * n, out.stride(0), scale, N=n, PARTS=parts, BLOCK=512, num_warps=4, **followed()
    )
    return given


def linear_parts(x: torch.Tensor, w: torch.Tensor, room: torch.Tensor, eager: bool = False) -> torch.Tensor:
    """The product of x [R, K] and w [N, K] in parts [P, R, N] float32, in the memory of `room`; `joined` adds them.

    Their sum has the bits of `linear`. ValueError where `room` is too small.
    """
    (rows, k), n = x.shape, w.shape[0]
    parts = apart(rows, n, k)
    if room.numel() < parts * rows * n or room.dtype != torch.float32:
        raise ValueError(f"room is {room.numel()} of {room.dtype}, {parts * rows * n} float32 were expected")
    check("room", room, (None,) * room.dim())
    check("x", x, (rows, k))
    check("w", w, (n, k), x.dtype)
    out = room.view(-1)[: parts * rows * n].view(parts, rows, n)
    multiply(x.unsqueeze(1), w.unsqueeze(0), out.unsqueeze(2), eager=eager)
    return out


def room_of_parts(rows: int, n: int, k: int) -> int:
    """Elements of the room that `linear_parts` needs for up to `rows` rows."""
    return n * max(rows, parts_of(n, k) * min(rows, MOST_APART))


def multiply(
    x: torch.Tensor,
    w: torch.Tensor,
    out: torch.Tensor,
    rows: torch.Tensor | None = None,
    scale: float = 1.0,
    tile: int | None = None,
    cut: Cut | None = None,
    eager: bool = False,
) -> None:
    """x [R', H, K], w [H, N, K] -> out [P, R, H, N], P all parts of K or one; as `cut`, or as the table says."""
    (heads, n, k), (spread, count) = w.shape, out.shape[:2]
    if cut is None and tile is None and rows is None and whole_lines(x) and whole_lines(w):
        held = held_for(x.device, count, n, k // spread, k, shared_memory(x.device))
        if held:
            multiply_held(x, w, out, scale, held, eager)
            return
    cut = cut or cut_for(x.device, count, n, k)
    bm = tile or cut.bm
    _linear[(triton.cdiv(n, cut.bn), triton.cdiv(count, bm), heads * spread)](
        x, x if rows is None else rows, w, out, count, n, k,
        x.stride(0), x.stride(1), out.stride(1), out.stride(2), out.stride(0), scale,
        GATHER=rows is not None, PARTS=parts_of(n, k), APART=spread > 1, AHEAD=cut.ahead,
        BM=bm, BN=cut.bn, BK=cut.bk, num_warps=cut.warps, num_stages=cut.stages, **followed(),
    )  # fmt: skip
