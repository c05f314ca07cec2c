"""Whether a model runs on this GPU, and fits there: asked of config.json and the device, before a weight is read."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from hedgerow.model.config import K2Config
from hedgerow.model.cuda_ranked import share_of
from hedgerow.model.cuda_step_room import Room
from hedgerow.model.cuda_weights import check_sizes
from hedgerow.model.room import check_room, kept_for_steps
from kernels.gpu.int4_moe_gemm import Workspace as Experts
from kernels.gpu.int4_moe_gemm import supports
from kernels.gpu.mla_tree_attention import Workspace as Attention
from kernels.gpu.mla_tree_attention import most_splits

LEAST_ROWS = 512  # of a step's buffers
NOWHERE = torch.device("meta")  # tensors there have a size and no memory


class Asked(NamedTuple):
    """What a model is loaded for."""

    rows: int = LEAST_ROWS  # of its largest step
    pages: int | None = None  # of the cache; None: as many as there is memory for


def check_device(folder: Path, c: K2Config, device: torch.device, asked: Asked, taps: int, shards: int = 1) -> None:
    """Raises ConfigError for a size that the GPU's ops have no code for, on one of `shards` ranks; CheckpointError
    where weights, cache and what steps need, or must be left to them, are more than the device's free memory."""
    check_sizes(c, folder / "config.json", shards)
    steps = step_bytes(c, taps, asked.rows, shards)
    if asked.pages is None:  # what the cache must then leave free: asked for here, not when the weights have been read
        kept = kept_for_steps(torch.cuda.mem_get_info(device)[1], growth(c, taps, asked.rows, shards))
        steps = step_bytes(c, taps, LEAST_ROWS, shards) + kept
    check_room(folder, c, device, ranks=shards, pages=asked.pages, steps=steps)


def growth(c: K2Config, taps: int, rows: int, shards: int = 1) -> int:
    """By how many bytes a rank's buffers grow from those that loading makes to those of steps of `rows` rows."""
    return step_bytes(c, taps, rows, shards) - step_bytes(c, taps, LEAST_ROWS, shards)


def step_bytes(c: K2Config, taps: int, rows: int, shards: int = 1) -> int:
    """What steps of up to `rows` rows need on one rank's device, beside weights and cache: its buffers."""
    rows, dtype = max(rows, LEAST_ROWS), torch.bfloat16
    mine, top_k = share_of(c, shards), c.num_experts_per_tok
    made: list[object] = [
        Room(mine, c.vocab_size, taps, rows, NOWHERE, dtype),
        Attention(rows, mine.num_attention_heads, c.kv_lora_rank, most_splits(c.max_position_embeddings), "meta"),
    ]
    if supports(c.hidden_size, mine.moe_intermediate_size, top_k, torch.device("cuda"), dtype):
        made.append(Experts(rows, c.n_routed_experts, NOWHERE))
    tensors = [value for one in made for value in vars(one).values() if isinstance(value, torch.Tensor)]
    sums = 0 if shards == 1 else 2 * (shards + 4) * rows * c.hidden_size * dtype.itemsize  # parts, and what others send
    return sum(tensor.nbytes for tensor in tensors) + sums
