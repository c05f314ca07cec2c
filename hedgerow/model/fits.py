"""Whether a drafter was made for a target: what can be read of both folders, before any weight is."""

from __future__ import annotations

from pathlib import Path

from hedgerow.model.config import K2Config, Rope
from hedgerow.model.draft_config import DraftConfig
from hedgerow.model.draft_tensors import check_tensors
from hedgerow.model.fields import ConfigError


def check_fit(folder: Path, target_folder: Path) -> None:
    """ConfigError, with the drafter's value and the target's, for the first thing in which they disagree;
    CheckpointError for a tensor of the drafter's that is not as its configuration says, or that there is no code for.

    A drafter for another model of the same shape passes: whoever runs both compares what they loaded, and features of
    the wrong layers show in the acceptance alone.
    """
    c, t = DraftConfig.from_folder(folder), K2Config.from_folder(target_folder)
    file = folder / "config.json"

    def same(name: str, ours: object, theirs: object) -> None:
        if ours != theirs:
            raise ConfigError(file, name, ours, f"the target's, {theirs}")

    same("vocab_size", c.vocab_size, t.vocab_size)
    same("hidden_size", c.hidden_size, t.hidden_size)
    if c.num_target_layers is not None:
        same("num_target_layers", c.num_target_layers, t.num_hidden_layers)
    layers = t.num_hidden_layers
    if any(not 0 <= layer < layers for layer in c.target_layer_ids):
        raise ConfigError(file, "target_layer_ids", c.target_layer_ids, f"layers of the target, which has {layers}")
    if c.mask_token_id in t.eos_token_ids:
        ends = f"no end token of the target's, {t.eos_token_ids}"
        raise ConfigError(file, "mask_token_id", c.mask_token_id, ends)
    check_rope(file, c.rope, t.rope)
    check_tensors(folder, c)


def check_rope(file: Path, ours: Rope, theirs: Rope) -> None:
    """Bases are equal, and so is the scaling where both have it; a drafter may be made without."""
    if ours.theta != theirs.theta:
        raise ConfigError(file, "rope_theta", ours.theta, f"the target's, {theirs.theta}")
    if ours.yarn is None or theirs.yarn is None:
        return
    for name in ("factor", "original", "beta_fast", "beta_slow"):
        mine, other = getattr(ours.yarn, name), getattr(theirs.yarn, name)
        if mine != other:
            raise ConfigError(file, f"rope_scaling.{name}", mine, f"the target's, {other}")
