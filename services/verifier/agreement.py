"""What a drafter must agree with, and what is read for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from hedgerow.engine.reads import Hidden, Projected, Reads, Tokens
from hedgerow.errors import HedgerowError
from hedgerow.model.card import CARD, AcceptanceCard
from hedgerow.model.draft_config import DraftConfig
from hedgerow.model.interface import Target as Model
from hedgerow.model.projection import FeatureProjection
from hedgerow.rpc.config import ConfigError, variable_of
from services.verifier.config import VerifierServiceConfig


@dataclass(frozen=True)
class Target:
    """What a drafter must agree with. What is 0 or empty here, or not said by the drafter, is not compared."""

    vocab_size: int
    feature_layers: tuple[int, ...]
    feature_width: int
    max_sequences: int  # that may be in one request
    head_hash: str  # of the embedding and head, as `load_embedding_and_head` forms it
    features: str = "hidden"
    hidden_size: int = 0
    layers: int = 0
    rope_theta: float = 0.0
    end_tokens: frozenset[int] = frozenset()
    drafter_hash: str = ""  # of the checkpoint whose fc is applied here


@dataclass(frozen=True)
class Described:
    """What a drafter says of itself; the fields of DrafterServiceDescribeResponse."""

    vocab_size: int
    feature_layers: tuple[int, ...]
    feature_width: int
    max_sequences: int
    head_hash: str
    block_size: int
    max_budget: int
    features: str = "hidden"
    hidden_size: int = 0
    layers: int = 0
    rope_theta: float = 0.0
    mask_token: int | None = None
    checkpoint_hash: str = ""
    card: AcceptanceCard | None = None


class Wanted(NamedTuple):
    """What a drafter says it reads."""

    features: str
    layers: tuple[int, ...]
    has_card: bool = False  # of its acceptance; False also where that is not known


class Disagreement(HedgerowError):
    """The drafter was made for another target."""

    reason = "DRAFTER_MISMATCH"


def check(drafter: Described, target: Target) -> None:
    """Raises Disagreement, with both values, unless the drafter was made for this target."""
    pairs: dict[str, tuple[object, object]] = {
        "features": (drafter.features, target.features),
        "vocab_size": (drafter.vocab_size, target.vocab_size),
        "feature_width": (drafter.feature_width, target.feature_width),
    }
    if target.features != "tokens":
        pairs["feature_layer_ids"] = drafter.feature_layers, target.feature_layers
        pairs["target_head_hash"] = drafter.head_hash, target.head_hash
    if_said = {
        "hidden_size": (drafter.hidden_size, target.hidden_size),
        "num_target_layers": (drafter.layers, target.layers),
        "rope_theta": (drafter.rope_theta, target.rope_theta),
        "checkpoint_hash": (drafter.checkpoint_hash, target.drafter_hash),
    }
    pairs |= {name: both for name, both in if_said.items() if all(both)}
    for name, (theirs, ours) in pairs.items():
        if theirs != ours:
            raise Disagreement(f"{name}: the drafter has {theirs}, the target {ours}", metadata={"field": name})
    _check_sizes(drafter, target)


def _check_sizes(drafter: Described, target: Target) -> None:
    mask = drafter.mask_token
    if mask is not None and (mask >= target.vocab_size or mask in target.end_tokens):
        limit = f"a vocabulary of {target.vocab_size}, and ends {sorted(target.end_tokens)}"
        raise Disagreement(f"mask_token_id: the drafter has {mask}, the target {limit}")
    if drafter.block_size < 2:
        raise Disagreement(f"block_size: {drafter.block_size} leaves no position to draft")
    if drafter.max_sequences < target.max_sequences:
        raise Disagreement(f"max_sequences: the drafter keeps {drafter.max_sequences} of {target.max_sequences}")


def configured(config: VerifierServiceConfig) -> Wanted | None:
    """What the configuration says; None where the drafter must be asked. Raises ConfigError."""
    if config.drafter is None:
        return Wanted("hidden", config.layers)
    if config.hosts_drafter:
        return _hosted(config)
    if config.features == "tokens":
        return Wanted("tokens", ())
    if config.features == "projected":
        if config.drafter_path is None:
            raise ConfigError(variable_of("drafter_path"), "nothing", "it must be set where features is projected")
        return Wanted("projected", DraftConfig.from_folder(config.drafter_path).target_layer_ids)
    return Wanted("hidden", config.layers) if config.layers else None


def _hosted(config: VerifierServiceConfig) -> Wanted:
    if config.drafter_path is None:
        raise ConfigError(variable_of("drafter_path"), "nothing", "it must be set where drafter is in-process")
    if config.features not in ("auto", "hidden"):
        raise ConfigError(
            variable_of("features"), config.features, "must be auto or hidden where drafter is in-process"
        )
    layers = config.layers or DraftConfig.from_folder(config.drafter_path).target_layer_ids
    return Wanted("hidden", layers, (config.drafter_path / CARD).exists())


def reads(config: VerifierServiceConfig, wanted: Wanted, model: Model) -> tuple[Reads, str]:
    """What the engine keeps for the drafter, and the hash of the checkpoint whose fc that takes."""
    if wanted.features == "tokens":
        return Tokens(), ""
    if wanted.features != "projected":
        return Hidden(model.feature_width), ""
    if config.drafter_path is None:
        raise ConfigError(
            variable_of("drafter_path"), "nothing", "it must be set: the drafter reads projected features"
        )
    place = torch.device("cuda", 0) if config.device == "cuda" else None
    project = FeatureProjection.load(config.drafter_path, place)
    return Projected(project.width, project), project.hash
