"""A drafter's `fc`, for whoever applies it: the drafter, or the verifier, which then has less to send."""

from __future__ import annotations

from pathlib import Path

import torch

from hedgerow.model.draft_config import DraftConfig
from hedgerow.model.loader import Checkpoint, checkpoint_hash
from kernels.rmsnorm import rmsnorm


class FeatureProjection:
    """What a drafter makes of a position's features before its layers: RMSNorm(fc h), [n, F * hidden] -> [n, hidden].

    Whoever applies it on the verifier's side sends a drafter one layer's width instead of F (for Kimi's, 28 KB a
    position instead of 172).
    """

    def __init__(self, config: DraftConfig, checkpoint: Checkpoint, device: torch.device | None = None) -> None:
        c = config
        self.layers, self.width, self.eps = c.target_layer_ids, c.hidden_size, c.rms_norm_eps
        stored = checkpoint.dense("fc.weight", (c.hidden_size, c.feature_width), device or "cpu")
        self.fc = stored.float().T.contiguous()
        self.norm = checkpoint.weight("hidden_norm.weight", c.hidden_size).to(device)
        self.device = device
        self.hash = ""

    @classmethod
    def load(cls, folder: Path, device: torch.device | None = None) -> FeatureProjection:
        """Of a drafter's folder. Raises ConfigError or CheckpointError."""
        read = cls(DraftConfig.from_folder(folder), Checkpoint(folder), device)
        read.hash = checkpoint_hash(folder)
        return read

    @torch.inference_mode()
    def __call__(self, features: torch.Tensor) -> torch.Tensor:
        there = features if self.device is None else features.to(self.device)
        return rmsnorm(there @ self.fc, self.norm, self.eps).to(features.device)
