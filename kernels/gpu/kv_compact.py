"""Latents of the accepted paths, moved on the GPU to where plain decoding would have put them: all layers, one launch.

    cache[layer, slots[first + i]] = cache[layer, slots[first + path[s, i]]]      first = row_start[s], i < length[s]

`path` is ascending and path[s, i] >= i, as kernels/gpu/tree_accept.py gives it. A program holds some columns of all the
rows of a path in registers before it stores the first, so sources and targets may overlap; no other touches these.

cache [layers, .., W] in place, slots [R] int64 or int32, row_start [S + 1] int32, path [S, D] int32, length [S] int32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.checks import FLOATS, at_most, expect
from kernels.gpu.follow import followed

TEST_SHAPES = [(3, 128, 48, 2, 8), (2, 256, 160, 1, 64), (1, 192, 576, 3, 5)]  # (layers, slots, W, S, D)
BENCH_SHAPES = [(61, 576, 1, 16), (61, 576, 2, 8), (61, 576, 64, 8)]  # (layers, W, S, D)
MOST_ROWS = 64
WORDS = 32  # of 8 bytes, a program's columns


def reference(
    cache: torch.Tensor, slots: torch.Tensor, row_start: torch.Tensor, path: torch.Tensor, length: torch.Tensor
) -> None:
    """The same by torch ops, sequence by sequence; in place."""
    flat = cache.view(cache.shape[0], -1, cache.shape[-1])
    for s, (first, count) in enumerate(zip(row_start.tolist(), length.tolist(), strict=False)):
        source = slots[first + path[s, :count].long()]
        flat[:, slots[first : first + count]] = flat[:, source]


@triton.jit
def _kv_compact(
    cache_ptr, slots_ptr, row_start_ptr, path_ptr, length_ptr, layer_words, words, deepest,
    ROWS: tl.constexpr, WORDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:  # and launches nothing ahead: these programs fill the device, and waiting ones would take their room
        tl.extra.cuda.gdc_wait()
    part, layer, s = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    i = tl.arange(0, ROWS)
    w = part * WORDS + tl.arange(0, WORDS)
    first = tl.load(row_start_ptr + s)
    row = tl.load(path_ptr + s * deepest + i, mask=i < tl.load(length_ptr + s), other=-1)
    moves = row > i  # the others stay where they are
    source = tl.load(slots_ptr + first + row, mask=moves, other=0).to(tl.int64)
    target = tl.load(slots_ptr + first + i, mask=moves, other=0).to(tl.int64)
    mask = moves[:, None] & (w < words)[None, :]
    here = cache_ptr + layer * layer_words + w[None, :]
    values = tl.load(here + source[:, None] * words, mask=mask, other=0)
    tl.debug_barrier()  # all is read before anything is written
    tl.store(here + target[:, None] * words, values, mask=mask)


def kv_compact(
    cache: torch.Tensor, slots: torch.Tensor, row_start: torch.Tensor, path: torch.Tensor, length: torch.Tensor
) -> None:
    """One launch, no host sync; moves latents within `cache`. D = path's width, 64 at most, the longest path there is.

    W rows must be multiples of 8 bytes. A path of one row, or one that stands where it should, costs no traffic.
    """
    expect("cache", cache, FLOATS, (None,) * cache.dim())
    expect("slots", slots, (torch.int64, torch.int32), (None,))
    sequences, deepest = path.shape
    expect("path", path, torch.int32, (sequences, deepest))
    expect("row_start", row_start, torch.int32, (sequences + 1,))
    expect("length", length, torch.int32, (sequences,))
    at_most("the longest path", deepest, MOST_ROWS)
    bytes_of_row = cache.shape[-1] * cache.element_size()
    if bytes_of_row % 8:
        raise ValueError(f"cache has rows of {bytes_of_row} bytes, expected a multiple of 8")
    words = bytes_of_row // 8
    flat = cache.view(torch.int64)
    if sequences and cache.shape[0]:
        rows = max(triton.next_power_of_2(deepest), 2)
        grid = (-(-words // WORDS), cache.shape[0], sequences)
        _kv_compact[grid](
            flat, slots, row_start, path, length, flat[0].numel(), words, deepest, ROWS=rows, WORDS=WORDS,
            num_warps=min(max(rows // 8, 1), 8), **followed(),
        )  # fmt: skip
