"""What a forward pass is asked to compute, and what it gives back. The one description shared by model and engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True)
class SequenceRows:
    """The rows of one sequence in one step.

    Row r holds `tokens[r]`, stands at position `prefix + depth(r)`, sees the first `prefix` cached tokens, its
    ancestors by `parents` and itself, and writes its latent into slot `prefix + r` of the sequence's pages.
    A chain (plain decoding, prefill, replay) has parents -1, 0, 1, ...; a tree's row 0 is the anchor.

    Raises nothing: the engine builds it from what it has validated.
    """

    prefix: int
    pages: Sequence[int]  # page numbers that cover slots 0 .. prefix + len(tokens) - 1
    tokens: Sequence[int]  # [rows]
    parents: Sequence[int]  # [rows]; parents before children; -1: the row stands right after the prefix
    want_logits: Sequence[int]  # rows whose logits are needed, ascending; may be empty (a prefill chunk)
    prompt: bool = False  # a chunk of the prompt, a chain: path P; an engine may have another attention for it
    limit: int = 0  # most tokens that the session will ever have, the same in all its steps; 0: the model's positions


class ForwardOutput(NamedTuple):
    """Logits of the wanted rows and features of all rows, sequence by sequence in the batch's order."""

    logits: torch.Tensor  # [wanted rows, vocabulary] float32
    features: torch.Tensor  # [rows, layers tapped * hidden] float32
