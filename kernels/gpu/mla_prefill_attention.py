"""Chunks of a prompt in one pass, causal, over the paged MLA cache. Words and shapes: mla_tree_attention.py.

No model uses it: a tile's keys are one program's work, so few rows behind many keys take long. Prompts go through
mla_tree_attention.py, as chains (hedgerow/model/cuda_plan.py); of thousands of rows this is the form to compare with.

A row's bits are a function of its query and of the keys 0 .. p alone: blocks of 64 keys from position 0 on, one pass,
whatever chunk, batch and pages it comes in. A block that a row does not see leaves its state as it is, to the bit; so
the rows of a tile need not begin or end together.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from kernels.gpu.mla_device import LOWEST, MASKED, follow, tile_of
from kernels.gpu.mla_launch import check, descriptors, has_wgmma
from kernels.gpu.mla_portable import LINES, WARPS, prefill_portable
from kernels.gpu.mla_reference import prefill_attention_reference
from kernels.gpu.mla_wide import begin, queue, rooms, turn, weigh

TILE = 64  # lines


def mla_prefill_attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    page_table: torch.Tensor,
    prefix_lens: torch.Tensor,
    row_start: torch.Tensor,
    out: torch.Tensor,
    portable: bool | None = None,
) -> None:
    """Writes out. As `mla_tree_attention`, but each sequence's rows are a chain, of any length: row row_start[b] + j
    stands at position prefix_lens[b] + j and sees the slots 0 .. prefix_lens[b] + j.

    q [R, H, C+P] bf16, cache [pages, 64, C+P] bf16, page_table [B, n] int32, prefix_lens [B] int32, row_start [B+1]
    int32, out [R, H, C] bf16. No host sync, no allocation. Padding rows come out as zeros. On a CPU the reference runs.
    `portable`: which form runs, where the card does not decide; the two have different bits, each the same always.
    """
    check(q, cache, page_table, prefix_lens, row_start, out)
    if not q.is_cuda:
        out.copy_(prefill_attention_reference(q, cache, page_table, prefix_lens, row_start, out.shape[-1]))
        return
    portable = not has_wgmma(q.device) if portable is None else portable
    launch(q, cache, page_table, prefix_lens, row_start, out, portable)


def launch(
    q: torch.Tensor,
    cache: torch.Tensor,
    page_table: torch.Tensor,
    prefix_lens: torch.Tensor,
    row_start: torch.Tensor,
    out: torch.Tensor,
    portable: bool,
) -> None:
    """The kernel: a program a tile."""
    rows, heads, width = q.shape
    batch, latent = len(prefix_lens), out.shape[-1]
    tile = LINES if portable else TILE
    tiles = rows * heads // tile + batch + 1  # at most: a part of a tile a sequence, and one of padding
    about = (page_table, prefix_lens, row_start, out, batch, rows * heads, heads, page_table.stride(0))
    fixed = {"C": latent, "P": width - latent, "BP": triton.next_power_of_2(batch)}
    if portable:
        prefill_portable[(tiles,)](q, cache, *about, **fixed, num_warps=WARPS, launch_pdl=True)
        return
    boxes = descriptors(q, cache, latent, TILE)
    _prefill[(tiles,)](*boxes, *about, **fixed, num_warps=8, launch_pdl=True)


@gluon.jit
def _masked(s, first, step, H, pos0, S: gl.constexpr):
    """Scores [64 lines, 64 keys]: line i stands at position first + (step + i) // H."""
    position = first + (step + gl.arange(0, 64, gl.SliceLayout(1, S))) // H
    key = pos0 + gl.arange(0, 64, gl.SliceLayout(0, S))
    return gl.where(key[None, :] <= position[:, None], s, MASKED)


@gluon.jit
def _clear(kb, live, C: gl.constexpr):
    """Zeros rows live .. 63 of a page: nothing was written there yet, and 0 times NaN is NaN."""
    Z: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    keep = gl.arange(0, 64, gl.SliceLayout(1, Z)) < live
    for c in gl.static_range(C // 64):
        part = kb.slice(c * 64, 64, dim=1)
        part.store(gl.where(keep[:, None], part.load(Z), 0.0))


@gluon.jit(do_not_specialize=["B", "lines", "H", "pt_stride"])
def _prefill(
    q_latents,
    q_ropes,
    latents,
    ropes,
    PAGES,
    LENS,
    ROWS,
    OUT,
    B,
    lines,
    H,
    pt_stride,
    C: gl.constexpr,
    P: gl.constexpr,
    BP: gl.constexpr,
):
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16])  # [64 lines, 64 keys]
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, C // 2, 16])  # [64 lines, C columns]
    LINE: gl.constexpr = gl.SliceLayout(1, S)
    OLINE: gl.constexpr = gl.SliceLayout(1, ACC)
    pid = gl.program_id(0)
    follow(pid)
    # long tiles first: the last program has the last tile
    b, tile, line0, count, prefix = tile_of(gl.num_programs(0) - 1 - pid, ROWS, LENS, B, H, lines, 64, BP, 8)
    left = count - tile * 64  # lines of this tile and of those after it
    last = prefix + (tile * 64 + gl.minimum(left, 64) - 1) // H  # position of the last line
    n = gl.where(left > 0, last // 64 + 1, 0)
    seen_by_all = (prefix + tile * 64 // H + 1) // 64  # blocks that need no mask

    q, qe, kb, keb, pbuf, bar = rooms(C, P)
    oline = gl.arange(0, 64, OLINE)
    column = gl.arange(0, C, gl.SliceLayout(0, ACC))
    target = OUT + line0.to(gl.int64) * C + oline[:, None] * C + column[None, :]
    page = PAGES + b * pt_stride
    if n > 0:
        begin(page, n, line0, q_latents, q_ropes, latents, ropes, q, qe, kb, keb, bar, C, P)
        zs = gl.zeros([64, 64], gl.float32, S)
        acc = gl.zeros([64, C], gl.float32, ACC)
        m = gl.full([64], LOWEST, gl.float32, LINE)
        lc = gl.zeros([64, 64], gl.float32, S)
        s = warpgroup_mma_wait(0, deps=[queue(0, 0, q, qe, kb, keb, bar, zs)])
        for i in range(n - 1):
            row2 = gl.load(page + i + 2, mask=i + 2 < n, other=0) * 64
            if i >= seen_by_all:
                s = _masked(s, prefix, tile * 64, H, i * 64, S)
            s, m, lc, acc = turn(i, n, row2, s, m, lc, acc, latents, ropes, q, qe, kb, keb, pbuf, bar, zs, OLINE, C, P)
        cur = (n - 1) & 1
        s = _masked(s, prefix, tile * 64, H, (n - 1) * 64, S)
        if last % 64 != 63:
            _clear(kb.index(cur), last % 64 + 1, C)
        m, lc, acc = weigh(s, m, lc, acc, pbuf, OLINE)
        pv = warpgroup_mma(pbuf, kb.index(cur), acc, is_async=True)
        scale = gl.convert_layout(1.0 / gl.sum(lc, 1), OLINE)
        acc = warpgroup_mma_wait(0, deps=[pv])
        gl.store(target, (acc * scale[:, None]).to(gl.bfloat16), mask=(oline < left)[:, None])
    else:
        # a tile of padding, or none at all
        gl.store(target, gl.zeros([64, C], gl.bfloat16, ACC), mask=(oline < -left)[:, None])
