"""DFlash 2's convolution around both halves of a drafter's layer on a GPU: convolution.py over fixed buffers.

It reads the rows of a block and nothing before them, so a context holds nothing of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hedgerow.model.convolution import stored_halves
from hedgerow.model.cuda_weights import Reader
from hedgerow.model.draft_config import DraftConfig
from kernels.gpu.grouped_convolution import grouped_convolution
from kernels.gpu.linear import linear_parts, room_of_parts


class ConvolutionRoom:
    """The buffers of passes of up to `rows` rows of blocks: one half's at a time."""

    def __init__(self, c: DraftConfig, rows: int, device: torch.device, dtype: torch.dtype) -> None:
        assert c.convolution is not None
        taps, group = c.convolution
        hidden, self.block = c.hidden_size, c.block_size
        size = room_of_parts(rows, 2 * taps * (hidden // group), hidden)
        self.dynamic = torch.zeros(size, device=device)
        self.into = torch.zeros(rows, hidden, device=device, dtype=dtype)
        self.out_of = torch.zeros(rows, hidden, device=device)


@dataclass(frozen=True)
class CudaConvolution:
    """Of one half of a layer."""

    base: torch.Tensor  # [2, taps, hidden]: into the half, out of it
    projection: torch.Tensor  # [2 * taps * groups, hidden]

    @classmethod
    def both(cls, r: Reader, base: str, c: DraftConfig) -> tuple[CudaConvolution, ...]:
        """Around attention and MLP; none where the drafter has none."""
        return tuple(
            cls(r.dense((half.base, half.base_shape)), r.dense((f"{half.projection}.weight", half.projection_shape)))
            for half in stored_halves(base, c)
        )

    def before(self, y: torch.Tensor, room: ConvolutionRoom) -> tuple[torch.Tensor, torch.Tensor]:
        """What goes in, of normed rows y [R, hidden], and the kernel of both sides."""
        dynamic = linear_parts(y, self.projection, room.dynamic)
        into = room.into[: len(y)]
        grouped_convolution(y, self.base, dynamic, into, room.block, 0)
        return into, dynamic

    def after(self, out: torch.Tensor, dynamic: torch.Tensor, room: ConvolutionRoom) -> torch.Tensor:
        """What comes out, of rows `out` [R, hidden] float32."""
        convolved = room.out_of[: len(out)]
        grouped_convolution(out, self.base, dynamic, convolved, room.block, 1)
        return convolved
