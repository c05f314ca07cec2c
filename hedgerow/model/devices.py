"""Where a model is computed. A GPU that was asked for and cannot serve is an error that says what is missing."""

from __future__ import annotations

import importlib.util
from typing import Literal

import torch

from hedgerow.errors import InvalidRequest

Device = Literal["cpu", "cuda"]
LEAST_CAPABILITY = (9, 0)  # the law's MMA sums were compared on this


def pci_address(index: int) -> str:
    """Of a CUDA device, as Linux writes it; "" where torch does not say."""
    properties = torch.cuda.get_device_properties(index)
    parts = [getattr(properties, f"pci_{what}_id", None) for what in ("domain", "bus", "device")]
    if None in parts:
        return ""
    domain, bus, device = parts
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


def cuda_device() -> torch.device:
    """The first CUDA device. InvalidRequest, naming the setting and what is missing, where it cannot serve."""
    if torch.version.cuda is None:
        where = "in a checkout HEDGEROW_TORCH chooses one (README.md), the image hedgerow-gpu has one"
        raise InvalidRequest("device", "cuda", f"needs a torch built for CUDA; {torch.__version__} is not: {where}")
    if importlib.util.find_spec("triton") is None:
        raise InvalidRequest("device", "cuda", "needs the package triton, which is not installed")
    if not torch.cuda.is_available():
        raise InvalidRequest("device", "cuda", "needs a CUDA device that torch can see: there is none, or no driver")
    capability = torch.cuda.get_device_capability(0)
    if capability < LEAST_CAPABILITY:
        least = ".".join(map(str, LEAST_CAPABILITY))
        raise InvalidRequest(
            "device", "cuda", f"needs a device of compute capability {least} or more; this has {capability}"
        )
    return torch.device("cuda", 0)
