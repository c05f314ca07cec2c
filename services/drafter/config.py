"""Configuration of the drafter service."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from hedgerow.rpc.computing import ComputingConfig


@dataclass(frozen=True, kw_only=True)
class DrafterServiceConfig(ComputingConfig):
    """What `python -m services.drafter` takes, as HEDGEROW_<FIELD>."""

    model_path: Path = field(metadata={"help": "folder of the DFlash checkpoint"})
    target_path: Path = field(metadata={"help": "folder of the target, for its embedding and head"})
    max_sequences: int = field(
        default=64, metadata={"min": 1, "max": 65536, "help": "sequences whose state is kept, for each verifier"}
    )
    max_budget: int = field(default=63, metadata={"min": 0, "max": 63, "help": "most nodes of a tree"})
    max_verifiers: int = field(default=4, metadata={"min": 1, "max": 1024, "help": "Draft streams open at once"})
