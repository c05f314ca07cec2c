"""The launcher of moe_few_tiles.cu: what `expert_tiles` (moe_tiles.py) makes of up to 512 pairs, in one program.

Few pairs take no longer to count than a launch takes; what its Triton form needs for a histogram and sums over all
experts, a program with shared memory that it may add to by expert does not.
"""

from __future__ import annotations

from ctypes import c_int, c_void_p

import torch

from kernels.gpu.cuda import Kernel, kernel

MOST = 512  # pairs, and experts
THREADS, SHARED = MOST, (MOST // 32 + 2) * MOST * 4 + MOST // 32 * 4  # bits, pairs and places of experts, warps' sums
ARCHITECTURE = 9  # compute capability that it is built for


def few_tiles(device: torch.device) -> Kernel | None:
    """None where it is not there: no card, another one, no NVRTC. The first time not while a graph is captured."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != ARCHITECTURE:
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    return kernel("moe_few_tiles", index, THREADS, SHARED)


def few_tiles_cuda(
    chosen: torch.Tensor, experts: int, capacity: int, tiles: tuple[torch.Tensor, ...], halves: bool, width: int
) -> bool:
    """Launches it and returns True; False where it is not there, or is not for as many pairs or experts."""
    total = chosen.numel()
    if max(total, experts) > MOST or width != 16 or capacity & (capacity - 1):
        return False
    made = few_tiles(chosen.device)
    if made is None:
        return False
    places = [c_void_p(t.data_ptr()) for t in (chosen, *tiles)]
    made.launch(1, [*places, c_int(total), c_int(capacity.bit_length() - 1), c_int(halves)])
    return True
