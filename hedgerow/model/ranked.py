"""One rank's model, by the engine that computes it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from hedgerow.model.compiled import CompiledK2
from hedgerow.model.k2 import K2Model
from kernels.collectives import Ranks

RankEngine = Literal["torch", "compiled"]


def load_rank(
    engine: RankEngine, folder: Path, feature_layers: Sequence[int], threads: int, ranks: Ranks
) -> K2Model | CompiledK2:
    """The one rank of `ranks` that is this process's. All of them tap the same layers: what is asked of the last one
    decides which sums are made. Raises ConfigError or CheckpointError; with "compiled" also BuildError.
    """
    if engine == "compiled":
        return CompiledK2.load(folder, feature_layers, threads, ranks=ranks)
    return K2Model.load(folder, feature_layers, ranks=ranks)
