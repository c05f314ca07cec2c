"""Configuration of the drafter service."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from hedgerow.rpc.server import ServerConfig


@dataclass(frozen=True, kw_only=True)
class DrafterServiceConfig(ServerConfig):
    """What `python -m services.drafter` takes, as HEDGEROW_<FIELD>."""

    model_path: Path = field(metadata={"help": "folder of the DFlash checkpoint"})
    target_path: Path = field(metadata={"help": "folder of the target, for its embedding and head"})
    engine: str = field(
        default="auto",
        metadata={
            "choices": ("auto", "compiled", "torch"),
            "help": "what computes a block: C compiled for this CPU, torch, or (auto) torch where C does not work",
        },
    )
    threads: int | None = field(
        default=None,
        metadata={
            "min": 1,
            "max": 256,
            "help": "most threads of one forward pass, used while they pay; empty: the cores, at most 2",
        },
    )
    max_sequences: int = field(
        default=64, metadata={"min": 1, "max": 65536, "help": "sequences whose state is kept, for each verifier"}
    )
    max_budget: int = field(default=63, metadata={"min": 0, "max": 63, "help": "most nodes of a tree"})
    max_verifiers: int = field(default=4, metadata={"min": 1, "max": 1024, "help": "Draft streams open at once"})

    @property
    def threads_used(self) -> int:
        """`threads`, or what this machine has for them."""
        return self.threads or min(2, os.cpu_count() or 1)
