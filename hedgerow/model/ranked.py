"""One rank's model, by the engine that computes it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from hedgerow.model.compiled import CompiledK2
from hedgerow.model.k2 import K2Model
from kernels.collectives import Backend, Ranks

if TYPE_CHECKING:
    from hedgerow.model.cuda_ranked import RankedK2

RankEngine = Literal["torch", "compiled", "cuda"]


def backend_of(engine: RankEngine) -> Backend:
    """What carries the ranks' parts."""
    return "nccl" if engine == "cuda" else "gloo"


def load_rank(
    engine: RankEngine, folder: Path, feature_layers: Sequence[int], threads: int, ranks: Ranks, place: int = 0
) -> K2Model | CompiledK2 | RankedK2:
    """The one rank of `ranks` that is this process's. All of them tap the same layers: what is asked of the last one
    decides which sums are made. `place`: the how manieth rank of its host; with "cuda" that is its device.

    Raises ConfigError or CheckpointError; with "compiled" also BuildError.
    """
    if engine == "cuda":
        from hedgerow.model.cuda_ranked import RankedK2  # its kernels need triton

        return RankedK2.of(folder, feature_layers, torch.device("cuda", place), ranks)
    if engine == "compiled":
        return CompiledK2.load(folder, feature_layers, threads, ranks=ranks)
    return K2Model.load(folder, feature_layers, ranks=ranks)
