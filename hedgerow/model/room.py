"""What fits into the memory that there is: the weights, asked before the first is read; then pages of the cache."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import torch

from hedgerow.errors import InvalidRequest
from hedgerow.model.config import K2Config
from hedgerow.model.draft_config import DraftConfig
from hedgerow.model.draft_tensors import tensors as draft_tensors
from hedgerow.model.folder import parameters
from hedgerow.model.headers import CheckpointError
from hedgerow.model.interface import Target, least_free
from hedgerow.model.memory import USABLE, on_card, weights
from hedgerow.model.tensors import tensors

log = logging.getLogger(__name__)
PAGE = 64  # tokens
CPU_SHARE = 0.25  # of free memory that the cache takes where nobody says how much
MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


def check_room(
    folder: Path, c: K2Config, device: torch.device | None = None, compiled: bool = False, here: int = 1,
    ranks: int = 1, pages: int | None = None, steps: int = 0,
) -> None:  # fmt: skip
    """Raises CheckpointError where the model does not fit: on a CPU not even its weights, in float32; on a device
    weights as it has them, `pages` of the cache (None: one) and the bytes that `steps` need.

    `compiled`: the compiled engine's weights are beside the reference's. `here` of all `ranks` are on this machine; a
    device has one of them.
    """
    what = "for the weights alone"
    if device is None:
        needed = here * (cpu_bytes(c, ranks) + compiled * weights(c, ranks))
        found, where = free_memory(), "memory"
    else:
        found, where = int(torch.cuda.mem_get_info(device)[0]), f"memory on {device}"
        parts = on_card(c, ranks), (pages or 1) * page_bytes(c, "cuda"), steps
        needed, (read, cache, buffers) = sum(parts), (f"{part / 1e9:.1f}" for part in parts)
        what = f"for {read} of weights, {cache} of cache ({pages or 1} pages of {PAGE} tokens) and {buffers} for steps"
    _refuse(folder, needed, found, f"{where}, {what}")


def check_draft_room(folder: Path, c: DraftConfig, device: torch.device | None = None, projected: bool = False) -> None:
    """As `check_room`, of the drafter in `folder`: its weights and its target's embedding and head, in float32 on a CPU
    and bfloat16 on a device. Contexts come on top; `projected`: fc is not here."""
    shapes = [wanted.shape for wanted in draft_tensors(c) if not (projected and wanted.name == "fc.weight")]
    count, where = sum(map(math.prod, shapes)) + 2 * c.vocab_size * c.hidden_size, "memory"
    found = free_memory() if device is None else int(torch.cuda.mem_get_info(device)[0])
    if device is not None:  # all layers' keys and values are there side by side as well
        count += 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * c.hidden_size
        where = f"memory on {device}"
    what = "for the drafter's weights and its target's embedding and head"
    _refuse(folder, (4 if device is None else 2) * count, found, f"{where}, {what}")


def _refuse(folder: Path, needed: int, found: int | None, what: str) -> None:
    """Raises CheckpointError where there is less than is needed."""
    if found is not None and needed > found:
        raise CheckpointError(folder, "", f"{needed / 1e9:.1f} GB of free {what}", f"{found / 1e9:.1f} GB")


def cpu_bytes(c: K2Config, ranks: int = 1) -> int:
    """Of one rank. PyTorch on a CPU computes in float32, experts unpacked."""
    parts = (wanted._replace(shape=wanted.part(ranks)) for wanted in tensors(c))
    return 4 * sum(parameters(wanted, "I32" if wanted.dtypes == ("I32",) else "") for wanted in parts)


def page_bytes(c: K2Config, architecture: str) -> int:
    """Of a page in all layers: bfloat16 on a device; float32 on a CPU, latents twice in the compiled engine."""
    if architecture.startswith("cuda"):
        return PAGE * c.num_hidden_layers * c.latent_width * 2
    twice = 0 if architecture == "cpu-torch" else c.kv_lora_rank
    return PAGE * c.num_hidden_layers * (c.latent_width + twice) * 4


def kept_for_steps(total: int, grows: int) -> int:
    """Bytes that a cache of any size leaves of a device of `total`, where steps' buffers are to grow by `grows`."""
    half = math.ceil((1 - USABLE) * total / 2)
    return half + max(half, grows)


def cache_pages(
    model: Target, given: int | None, usual: int, copies: int = 1, grows: int = 0
) -> int | None:  # fmt: skip
    """`given` pages if there is memory for them; as many as leave room for everything else, where the `usual` ones do
    not; else None, for the usual ones.

    `copies`: ranks on this machine, each with all pages. `grows`: bytes by which steps' buffers on a device will.
    Raises InvalidRequest where `given` or one does not fit.
    """
    page, free = page_bytes(model.config, model.architecture) * copies, free_memory()
    most = None if free is None else int(free * CPU_SHARE) // page
    if model.architecture.startswith("cuda"):
        free, total = torch.cuda.mem_get_info()
        other = least_free(model)
        free = free if other is None else min(free, other)
        most = (free - kept_for_steps(total, grows)) // page
    if most is None or free is None:
        return given
    if given is not None and given * page > free:
        raise InvalidRequest("cache_pages", given, f"at most {free // page}: {free / 1e9:.1f} GB of memory are free")
    if given is None and most < 1:
        raise InvalidRequest("cache_pages", None, f"{page / 1e9:.3f} GB for one page; {free / 1e9:.1f} GB are free")
    if given is None and most < usual:
        log.warning("the cache has %d pages of 64 tokens, not %d: more memory is not free", most, usual)
        return most
    return given


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
