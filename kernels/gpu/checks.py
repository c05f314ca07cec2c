"""What every launcher asks of a tensor before a kernel reads its pointer, each refusal with the argument's name."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton

INTERPRETED = bool(triton.knobs.runtime.interpret)  # on the CPU, for tests: no inline assembly, no launch attributes

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def expect(
    name: str, tensor: torch.Tensor, dtype: torch.dtype | Sequence[torch.dtype], shape: Sequence[int | None]
) -> None:
    """ValueError unless `tensor` is of `dtype` (one of them) and `shape` (None: any size) and contiguous."""
    allowed = (dtype,) if isinstance(dtype, torch.dtype) else tuple(dtype)
    if tensor.dtype not in allowed:
        raise ValueError(f"{name} is {tensor.dtype}, expected {' or '.join(str(one) for one in allowed)}")
    if tensor.dim() != len(shape) or any(
        want is not None and got != want for got, want in zip(tensor.shape, shape, strict=False)
    ):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected ({wanted})")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} has strides {tensor.stride()}, expected it contiguous")
    if not (tensor.is_cuda or INTERPRETED):
        raise ValueError(f"{name} is on {tensor.device}, expected a CUDA device")


def at_most(name: str, value: int, limit: int) -> None:
    """ValueError above `limit`."""
    if value > limit:
        raise ValueError(f"{name} is {value}, at most {limit} is possible")
