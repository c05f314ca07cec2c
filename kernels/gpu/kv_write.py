"""New latents into the paged cache on the GPU.

    cache[slots[r]] = values[r]        slot = page * 64 + offset; -1: a row of padding, not written

cache [.., W] (pages of 64 slots, or flat slots), slots [R] int64, distinct, values [R, W] of its dtype; in place.
Slots are 64 bits wide and so is what they are multiplied by: a pool may hold more than 2^31 elements.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.checks import FLOATS, expect

TEST_SHAPES = [(128, 1, 48), (256, 9, 160), (192, 3, 576)]  # (slots, R, W)
BENCH_SHAPES = [(16, 576), (128, 576), (512, 576)]  # (R, W)


def reference(cache: torch.Tensor, slots: torch.Tensor, values: torch.Tensor) -> None:
    """The same by torch ops; in place."""
    real = slots >= 0
    cache.view(-1, cache.shape[-1])[slots[real]] = values[real]


@triton.jit
def _kv_write(cache_ptr, slots_ptr, values_ptr, width, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    slot = tl.load(slots_ptr + r)  # int64
    w = tl.arange(0, BLOCK)
    real = (w < width) & (slot >= 0)
    value = tl.load(values_ptr + r.to(tl.int64) * width + w, mask=real, other=0.0)
    tl.store(cache_ptr + slot * width + w, value, mask=real)


def kv_write(cache: torch.Tensor, slots: torch.Tensor, values: torch.Tensor) -> None:
    """One launch, no host sync; writes into `cache`. Slots must lie in the cache."""
    width = cache.shape[-1]
    expect("cache", cache, FLOATS, (None,) * (cache.dim() - 1) + (width,))
    expect("slots", slots, torch.int64, (None,))
    expect("values", values, cache.dtype, (len(slots), width))
    if len(slots):
        block = triton.next_power_of_2(width)
        _kv_write[(len(slots),)](cache, slots, values, width, BLOCK=block, num_warps=min(max(block // 256, 1), 4))
