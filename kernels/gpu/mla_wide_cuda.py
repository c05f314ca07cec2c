"""The launcher of mla_prefix_wide.cu: `prefix_wide` (mla_prefix_wide.py) with warpgroups that do different things.

While one has a block's softmax the matrix unit serves the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_int, c_void_p

import torch

from kernels.gpu.cuda import kernel, tensor_map

LATENT, ROPE, TILE = 512, 64, 64  # what it is written for
THREADS, SHARED = 384, 227 * 1024


def prefix_wide_cuda(
    q: torch.Tensor,
    cache: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    latent: int,
    programs: int,
    splits: int,
    early: bool,
) -> bool:
    """Launches it and returns True; False where it is not there: other widths, no NVRTC, no card.

    tensors: page table, prefix lengths, first rows, widths; the workspace's sums, scalars, open terms, open sums.
    """
    rows, heads, width = q.shape
    if not q.is_cuda or (latent, width - latent) != (LATENT, ROPE):
        return False
    made = kernel("mla_prefix_wide", q.device.index, THREADS, SHARED)
    if made is None:
        return False
    batch, stride = len(tensors[1]), tensors[0].stride(0)
    maps = [tensor_map(flat.view(-1, width), TILE, groups) for flat in (q, cache) for groups in (4, 1)]
    sizes = map(c_int, (batch, programs, heads, stride, splits, early))
    most = max(programs, rows * heads // TILE + batch)
    made.launch(most, [*maps, *(c_void_p(t.data_ptr()) for t in tensors), *sizes])
    return True
