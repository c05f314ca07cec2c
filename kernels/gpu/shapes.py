"""What the model's launchers ask of their tensors. A complaint names the argument, what it is and what it should be."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def check(name: str, tensor: torch.Tensor, shape: Sequence[int | None], *dtypes: torch.dtype) -> None:
    """ValueError unless `tensor` is contiguous, of `shape` (None: any size) and of one of `dtypes` (none: any)."""
    if tensor.dim() != len(shape) or any(
        want is not None and have != want for have, want in zip(tensor.shape, shape, strict=True)
    ):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} has shape {list(tensor.shape)}, [{wanted}] was expected")
    if dtypes and tensor.dtype not in dtypes:
        raise ValueError(f"{name} is {tensor.dtype}, one of {', '.join(map(str, dtypes))} was expected")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} has strides {list(tensor.stride())}, a contiguous tensor was expected")


def check_rows(name: str, tensor: torch.Tensor, width: int) -> None:
    """ValueError unless `tensor` is [rows, width] whose rows are whole, at any distance from each other."""
    if tensor.dim() != 2 or tensor.shape[1] != width:
        raise ValueError(f"{name} has shape {list(tensor.shape)}, [any, {width}] was expected")
    if tensor.stride(1) != 1:
        raise ValueError(f"{name} has strides {list(tensor.stride())}, neighbours in a row were expected")
