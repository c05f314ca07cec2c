"""The launchers of moe_many.cu: `gate_up_many` and `down_many` (moe_many_products.py) with fewer instructions."""

from __future__ import annotations

from ctypes import c_void_p
from typing import NamedTuple

import torch

from kernels.gpu.cuda import Kernel, kernel
from kernels.gpu.moe_pack import Ordered
from kernels.gpu.moe_tiles import Tiles

ARCHITECTURE = 9  # compute capability that it is built for
GATE_UP = 256, 3 * 27136 + 512 + 131072  # threads; bytes: three stages, the list, the sums of chains
DOWN = 128, 32768 + 2048 + 256 + 4 * 4 * 2304  # hidden, starts, the list, four places of weights a warp
PARTS = 2  # programs of down a tile


class Many(NamedTuple):
    """Both products on one device."""

    first: Kernel
    second: Kernel

    def gate_up(
        self, x: torch.Tensor, starts: torch.Tensor, weights: Ordered, hidden: torch.Tensor, tiles: Tiles
    ) -> None:
        self.first.launch(len(tiles.expert), _places(x, starts, *weights, hidden, *tiles))

    def down(self, hidden: torch.Tensor, starts: torch.Tensor, weights: Ordered, y: torch.Tensor, tiles: Tiles) -> None:
        self.second.launch(PARTS * len(tiles.expert), _places(hidden, starts, *weights, y, *tiles))


def many_cuda(device: torch.device) -> Many | None:
    """None where they are not there: no card, another one, no NVRTC."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != ARCHITECTURE:
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    first = kernel("moe_many", index, *GATE_UP, "moe_many_gate_up")
    second = kernel("moe_many", index, *DOWN, "moe_many_down")
    return None if first is None or second is None else Many(first, second)


def _places(*tensors: torch.Tensor) -> list[c_void_p]:
    return [c_void_p(tensor.data_ptr()) for tensor in tensors]
