"""What the launcher of attention needs on the host: checks of the arguments, and descriptors for the copy engine."""

from __future__ import annotations

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.gpu.mla_reference import PAGE

MOST_SEQUENCES = 64
WIDTHS = ((512, 64), (128, 32))  # (C, P) that the kernels are compiled for


def has_wgmma(device: torch.device) -> bool:
    """Whether the Hopper forms run there; if not, those of mla_portable.py do."""
    return torch.cuda.get_device_capability(device)[0] == 9


def check(
    q: torch.Tensor,
    cache: torch.Tensor,
    page_table: torch.Tensor,
    prefix_lens: torch.Tensor,
    row_start: torch.Tensor,
    out: torch.Tensor,
    **more: tuple[torch.Tensor, int, torch.dtype],
) -> None:
    """ValueError that names the tensor, for what the kernels do not read right. `more`: vectors and their length."""
    rows, heads, width = q.shape
    batch, latent = len(prefix_lens), out.shape[-1]
    expected = {
        "q": (q, (rows, heads, width), torch.bfloat16),
        "cache": (cache, (len(cache), PAGE, width), torch.bfloat16),
        "page_table": (page_table, (batch, page_table.shape[-1]), torch.int32),
        "prefix_lens": (prefix_lens, (batch,), torch.int32),
        "row_start": (row_start, (batch + 1,), torch.int32),
        "out": (out, (rows, heads, latent), torch.bfloat16),
    } | {name: (tensor, (length,), dtype) for name, (tensor, length, dtype) in more.items()}
    for name, (tensor, shape, dtype) in expected.items():
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            raise ValueError(f"{name} must be {shape} {dtype}, not {tuple(tensor.shape)} {tensor.dtype}")
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous; its strides are {tensor.stride()}")
    if (latent, width - latent) not in WIDTHS:
        raise ValueError(
            f"out and q must have one of the widths {WIDTHS} (latent, rope), not {(latent, width - latent)}"
        )
    if not 1 <= batch <= MOST_SEQUENCES:
        raise ValueError(f"prefix_lens must have 1 to {MOST_SEQUENCES} sequences, not {batch}")


def descriptors(q: torch.Tensor, cache: torch.Tensor, latent: int, lines: int) -> list[TensorDescriptor]:
    """q's latent and rope columns in boxes of `lines` lines, the cache's in boxes of a page."""
    width = q.shape[-1]
    rope = width - latent
    wide, slim = gl.NVMMASharedLayout(128, 16, rank=2), gl.NVMMASharedLayout(2 * rope, 16, rank=2)
    flat, slots = q.view(-1, width), cache.view(-1, width)
    return [
        TensorDescriptor.from_tensor(flat, [lines, latent], wide),
        TensorDescriptor.from_tensor(flat, [lines, rope], slim),
        TensorDescriptor.from_tensor(slots, [PAGE, latent], wide),
        TensorDescriptor.from_tensor(slots, [PAGE, rope], slim),
    ]
