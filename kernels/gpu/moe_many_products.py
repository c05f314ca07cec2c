"""The experts' products for many rows (moe_many.py), with the bits of moe_gate_up.py and moe_down.py.

gate_up's four chains (K columns 64 c .. 64 c + 63 of every 256) come one after another, not from four warps side by
side. Their sum waits in shared memory: ((c0 + c1) + c2) + c3, from -0, to which every float adds as itself. down has
one chain. On Hopper both have a form in CUDA C++ (moe_many.cu), which serves where it can be built.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.gpu.moe_fragments import FLAT, apart, places, round_two
from kernels.gpu.moe_many import (
    COPY,
    columns,
    eights_of,
    fetch,
    fetch_pairs,
    gathered,
    group_starts,
    starts_of,
    zeros_of,
)
from kernels.gpu.moe_many_cuda import many_cuda
from kernels.gpu.moe_pack import Ordered
from kernels.gpu.moe_tiles import Tiles

ROOMY = (9, 10)  # compute capabilities
OWN = 14  # times 256 rows that a program of down has


@gluon.jit
def _add(sums, acc, N: gl.constexpr):
    """sums + acc, every thread its own: all are read before one is written, so that one barrier is enough."""
    out = (_four_of(acc, 0) + sums.index(0).load(COPY),)
    for k in gl.static_range(1, 4 * N):
        out += (_four_of(acc, k) + sums.index(k).load(COPY),)  # type: ignore[assignment]
    for k in gl.static_range(4 * N):
        sums.index(k).store(out[k])


@gluon.jit
def _four_of(acc, k: gl.constexpr):
    v = gl.join(gl.join(acc[4 * k], acc[4 * k + 2]), gl.join(acc[4 * k + 1], acc[4 * k + 3]))
    return gl.convert_layout(gl.reshape(v, (128, 4)), COPY, assert_trivial=True)


@gluon.jit
def _gate_up(x, starts, words, scales, hidden, pairs, part, H: gl.constexpr, N: gl.constexpr):
    """words, scales: the program's first chunk."""
    CHUNKS: gl.constexpr = H // 256
    ws = gl.allocate_shared_memory(gl.int32, [3, 512, 4], FLAT)
    ss = gl.allocate_shared_memory(gl.int32, [3, 128, 2], FLAT)
    xs = gl.allocate_shared_memory(gl.int32, [2, 512, 4], FLAT)
    os = gl.allocate_shared_memory(gl.float32, [2, 64, 4], FLAT)
    sums = gl.allocate_shared_memory(gl.float32, [4 * N, 128, 4], FLAT)  # (eight, slab), (warp, lane)
    x, real = gathered(x, pairs, 8, H // 2)
    starts, begun = starts_of(starts, pairs, 8, H // 32)
    fetch(words, scales, ws.index(0), ss.index(0), CHUNKS, True)
    fetch_pairs(x, real, starts, begun, xs.index(0), os.index(0), 0)
    async_copy.commit_group()
    fetch(words + 2048, scales + 256, ws.index(1), ss.index(1), CHUNKS, True)
    async_copy.commit_group()
    for k in gl.static_range(4 * N):
        sums.index(k).store(gl.full([128, 4], -0.0, gl.float32, COPY))
    at = 0  # of three stages
    into = 2
    for c in range(4):
        acc = zeros_of(N)
        for i in range(CHUNKS):
            step = c * CHUNKS + i
            async_copy.wait_group(1)  # all but the next step's weights
            gl.thread_barrier()
            nx = step + 1
            move = nx % CHUNKS * 8 + nx // CHUNKS * 2  # groups
            fetch_pairs(x, real, starts, begun, xs.index(nx % 2), os.index(nx % 2), move)
            async_copy.commit_group()
            nx = step + 2
            chunk = nx % CHUNKS * 4 + nx // CHUNKS
            fetch(words + chunk * 512, scales + chunk * 64, ws.index(into), ss.index(into), CHUNKS, True)
            async_copy.commit_group()
            acc = columns(ws.index(at), ss.index(at), xs.index(step % 2), os.index(step % 2), acc, N)
            into = at
            at = gl.where(at == 2, 0, at + 1)
        _add(sums, acc, N)
    async_copy.wait_group(0)
    warp, g, t = places()
    column = part * 128 + warp * 32 + g
    for k in gl.static_range(N):
        pa = gl.load(pairs + k * 8 + 2 * t)
        pb = gl.load(pairs + k * 8 + 2 * t + 1)
        ya = hidden + pa.to(gl.int64) * 256 + column
        yb = hidden + pb.to(gl.int64) * 256 + column
        for q in gl.static_range(4):
            v = apart(gl.reshape(sums.index(k * 4 + q).load(COPY), (4, 32, 4)), 4)
            gl.store(ya + q * 8, (v[0] / (1.0 + gl.exp(-v[0])) * v[2]).to(gl.bfloat16), mask=pa >= 0)
            gl.store(yb + q * 8, (v[1] / (1.0 + gl.exp(-v[1])) * v[3]).to(gl.bfloat16), mask=pb >= 0)


@gluon.jit
def gate_up_many(
    x,  # [R, H] bfloat16, as int32
    starts,  # [R, H / 32] float32: group_starts
    words,
    scales,
    hidden,  # [R * 8, 256]
    expert,
    pairs,  # [most tiles, 64]
    count,
    H: gl.constexpr,
):
    """grid (2, most tiles)"""
    gdc_wait()
    gdc_launch_dependents()
    part = gl.program_id(0)
    tile = gl.program_id(1)
    if tile >= gl.load(count):
        return
    pairs += tile * 64
    first = ((gl.load(expert + tile) * 8 + part * 4) * (H // 256)).to(gl.int64)
    words += first * 2048
    scales += first * 256
    n = eights_of(pairs)
    if n > 7:
        _gate_up(x, starts, words, scales, hidden, pairs, part, H, 8)
    elif n == 7:
        _gate_up(x, starts, words, scales, hidden, pairs, part, H, 7)
    elif n == 6:
        _gate_up(x, starts, words, scales, hidden, pairs, part, H, 6)
    elif n == 5:
        _gate_up(x, starts, words, scales, hidden, pairs, part, H, 5)
    elif n > 2:
        _gate_up(x, starts, words, scales, hidden, pairs, part, H, 4)
    else:
        _gate_up(x, starts, words, scales, hidden, pairs, part, H, 2)


@gluon.jit
def _down(hidden, starts, words, scales, y, pairs, first, H: gl.constexpr, OWN: gl.constexpr, N: gl.constexpr):
    """OWN times 256 rows. Of their weights four times 64 columns are on their way."""
    ws = gl.allocate_shared_memory(gl.int32, [4, 512, 4], FLAT)
    ss = gl.allocate_shared_memory(gl.int32, [4, 128, 2], FLAT)
    hs = gl.allocate_shared_memory(gl.int32, [4, 512, 4], FLAT)
    os = gl.allocate_shared_memory(gl.float32, [4, 64, 4], FLAT)
    hidden, real = gathered(hidden, pairs, 1, 128)
    starts, begun = starts_of(starts, pairs, 1, 8)
    for j in gl.static_range(4):
        fetch_pairs(hidden, real, starts, begun, hs.index(j), os.index(j), 2 * j)
    for j in gl.static_range(3):
        fetch(words + j * 512, scales + j * 64, ws.index(j), ss.index(j), 1, True)
        async_copy.commit_group()
    warp, g, t = places()
    for i in range(OWN):
        acc = zeros_of(N)
        for quarter in range(4):
            async_copy.wait_group(2)
            gl.thread_barrier()
            nx = i * 4 + quarter + 3
            at = nx // 4 * (4 * 2048) + nx % 4 * 512
            fetch(words + at, scales + at // 8, ws.index(nx % 4), ss.index(nx % 4), 1, nx < 4 * OWN)
            async_copy.commit_group()
            acc = columns(ws.index(quarter), ss.index(quarter), hs.index(quarter), os.index(quarter), acc, N)
        to = y + ((first + i) * 4 + warp) * 32 + g
        for k in gl.static_range(N):
            pa = gl.load(pairs + k * 8 + 2 * t)
            pb = gl.load(pairs + k * 8 + 2 * t + 1)
            ya = to + pa.to(gl.int64) * (H // 2)
            yb = to + pb.to(gl.int64) * (H // 2)
            for q in gl.static_range(4):
                gl.store(ya + q * 8, round_two(acc[k * 16 + q * 4], acc[k * 16 + q * 4 + 2]), mask=pa >= 0)
                gl.store(yb + q * 8, round_two(acc[k * 16 + q * 4 + 1], acc[k * 16 + q * 4 + 3]), mask=pb >= 0)


@gluon.jit
def down_many(
    hidden,  # [R * 8, 256] bfloat16, as int32
    starts,  # [R * 8, 8] float32
    words,
    scales,
    y,  # [R * 8, H] bfloat16, as int32
    expert,
    pairs,  # [most tiles, 64]
    count,
    H: gl.constexpr,
    OWN: gl.constexpr,
):
    """grid (H / 256 / OWN, most tiles)"""
    gdc_wait()
    gdc_launch_dependents()
    first = gl.program_id(0) * OWN
    tile = gl.program_id(1)
    if tile >= gl.load(count):
        return
    pairs += tile * 64
    at = (gl.load(expert + tile) * (H // 64) + first * 4).to(gl.int64)
    words += at * 2048
    scales += at * 256
    n = eights_of(pairs)
    if n > 7:
        _down(hidden, starts, words, scales, y, pairs, first, H, OWN, 8)
    elif n == 7:
        _down(hidden, starts, words, scales, y, pairs, first, H, OWN, 7)
    elif n == 6:
        _down(hidden, starts, words, scales, y, pairs, first, H, OWN, 6)
    elif n == 5:
        _down(hidden, starts, words, scales, y, pairs, first, H, OWN, 5)
    elif n > 2:
        _down(hidden, starts, words, scales, y, pairs, first, H, OWN, 4)
    else:
        _down(hidden, starts, words, scales, y, pairs, first, H, OWN, 2)


def many_fit(device: torch.device) -> bool:
    """Whether gate_up's sums and stages, 109 KB, fit into a processor's shared memory there."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] in ROOMY


def many(
    x: torch.Tensor,
    gate_up: Ordered,
    down: Ordered,
    tiles: Tiles,
    hidden: torch.Tensor,
    y: torch.Tensor,
    starts: torch.Tensor,
    *,
    H: int,
    **how: Any,
) -> None:
    """Fills hidden and y for all pairs of `tiles`. starts: room for H / 32 floats a row."""
    made = many_cuda(x.device)
    rows, most = len(x), len(tiles.expert)
    xs, hs, ys = (tensor.view(torch.int32) for tensor in (x, hidden, y))
    group_starts[(triton.cdiv(rows, 8), H // 256)](xs, starts, rows, K=H, **how)
    if made is not None:
        made.gate_up(x, starts, gate_up, hidden, tiles)
    else:
        gate_up_many[(2, most)](xs, starts, *gate_up, hidden, *tiles, H=H, **how)
    group_starts[(rows, 1)](hs, starts, rows * 8, K=256, **how)
    if made is not None:
        made.down(hidden, starts, down, y, tiles)
    else:
        down_many[(H // 256 // OWN, most)](hs, starts, *down, ys, *tiles, H=H, OWN=OWN, **how)
