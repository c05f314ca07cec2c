"""Whether a model's weights fit into the memory that there is: asked before the first of them is read."""

from __future__ import annotations

from pathlib import Path

import torch

from hedgerow.model.config import K2Config
from hedgerow.model.folder import parameters
from hedgerow.model.headers import CheckpointError
from hedgerow.model.memory import weights
from hedgerow.model.tensors import tensors

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


def check_room(folder: Path, c: K2Config, device: torch.device | None = None, compiled: bool = False) -> None:
    """Raises CheckpointError where not even the weights fit: on a CPU in float32, on a device in their stored types.

    `compiled`: the compiled engine's weights are beside the reference's.
    """
    if device is None:
        needed, found, where = cpu_bytes(c) + compiled * weights(c, 1), free_memory(), "memory"
    else:
        needed, found, where = weights(c, 1), int(torch.cuda.mem_get_info(device)[0]), f"memory on {device}"
    if found is not None and needed > found:
        raise CheckpointError(
            folder, "", f"{needed / 1e9:.1f} GB of free {where}, for the weights alone", f"{found / 1e9:.1f} GB"
        )


def cpu_bytes(c: K2Config) -> int:
    """PyTorch on a CPU computes in float32, experts unpacked."""
    return 4 * sum(parameters(wanted, "I32" if wanted.dtypes == ("I32",) else "") for wanted in tensors(c))


def free_memory(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> int | None:
    """Bytes that this process may still use, by the machine and by its container; None where nobody says."""
    found = []
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        found.append(int(lines["MemAvailable"].split()[0]) * 1024)
    except (OSError, KeyError, ValueError):
        pass
    try:
        most = int((cgroup / "memory.max").read_text())  # "max": no limit
        used = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        found.append(most - int(used["anon"]))
    except (OSError, KeyError, ValueError):
        pass
    return min(found, default=None)
