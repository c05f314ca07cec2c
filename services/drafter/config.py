"""Configuration of the drafter service."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from hedgerow.rpc.computing import ComputingConfig


@dataclass(frozen=True, kw_only=True)
class DrafterServiceConfig(ComputingConfig):
    """What `python -m services.drafter` takes, as HEDGEROW_<FIELD>."""

    kind: str = field(
        default="dflash",
        metadata={
            "choices": ("dflash", "lookup"),
            "help": "what drafts: a DFlash model, or a look at the session's own text, which needs no weights",
        },
    )
    model_path: Path | None = field(default=None, metadata={"help": "folder of the DFlash checkpoint, for kind dflash"})
    target_path: Path = field(metadata={"help": "folder of the target: its embedding, its head, and what must agree"})
    features: str = field(
        default="hidden",
        metadata={
            "choices": ("hidden", "projected"),
            "help": "what a DFlash model is sent: the target's hidden states, or those after its fc, which the "
            "verifier then applies (its features=projected)",
        },
    )
    trees: str = field(
        default="auto",
        metadata={
            "choices": ("auto", "conditional", "marginal"),
            "help": "of a DFlash model: by its selector, each token after the one before it, or by every position's "
            "own probabilities; conditional trees bring more tokens a step and take longer to build; auto: conditional "
            "where there is a selector and the compiled engine",
        },
    )
    yarn_amplitude: float | None = field(
        default=None,
        metadata={
            "min": 0.1,
            "max": 10.0,
            "help": "what multiplies cos and sin of a DFlash model with YaRN; empty: what its config.json says, as "
            "Hugging Face reads it",
        },
    )
    lookup_depth: int = field(
        default=16, metadata={"min": 1, "max": 63, "help": "levels of a tree, at most, for kind lookup"}
    )
    max_sequences: int = field(
        default=64, metadata={"min": 1, "max": 65536, "help": "sequences whose state is kept, for each verifier"}
    )
    max_budget: int = field(default=63, metadata={"min": 0, "max": 63, "help": "most nodes of a tree"})
    max_verifiers: int = field(default=4, metadata={"min": 1, "max": 1024, "help": "Draft streams open at once"})
