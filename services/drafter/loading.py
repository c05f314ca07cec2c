"""What drafts, by the configuration."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import cast

from hedgerow.model.card import AcceptanceCard
from hedgerow.model.config import K2Config
from hedgerow.model.devices import Device
from hedgerow.model.interface import Draft, Prepares
from hedgerow.model.lookup import Lookup
from hedgerow.model.proposer import Proposer
from hedgerow.model.select import Engine, load_drafter
from hedgerow.model.selector import FromPairs, Trees, drafts
from hedgerow.rpc.config import ConfigError, variable_of
from services.drafter.config import DrafterServiceConfig


@dataclass(frozen=True)
class Made:
    """A drafter, and what is said of it."""

    name: str
    drafts: Draft | Proposer
    model: Draft | Lookup
    features: str  # hidden, projected or tokens
    card: AcceptanceCard | None = None
    trees: str = ""  # conditional or marginal; empty: of neither kind


def load(config: DrafterServiceConfig) -> Made:
    """Blocks for as long as reading a checkpoint takes. Raises HedgerowError with file and field, ConfigError with the
    variable."""
    if config.kind == "lookup":
        target = K2Config.from_folder(config.target_path)
        lookup = Lookup(target.vocab_size, target.max_position_embeddings, config.lookup_depth)
        return Made("lookup", lookup, lookup, "tokens")
    if config.model_path is None:
        raise ConfigError(variable_of("model_path"), "nothing", "it must be set where kind is dflash")
    return dflash(config, config.model_path)


def dflash(config: DrafterServiceConfig, folder: Path) -> Made:
    model = load_drafter(
        folder,
        config.target_path,
        cast(Engine, config.engine),
        config.threads_used,
        device=cast(Device, config.device),
        amplitude=config.yarn_amplitude,
        projected=config.features == "projected",
    )
    card = AcceptanceCard.from_folder(folder, model.vocab_size)
    made = drafts(model, folder, cast(Trees, config.trees))
    kind = "conditional" if isinstance(made, FromPairs) else "marginal"
    if config.trees not in ("auto", kind):
        raise ConfigError(variable_of("trees"), config.trees, f"{folder} has no selector")
    if isinstance(model, Prepares):  # so that no request waits for a compiler; by now it knows of which trees
        model.prepare(config.max_sequences, config.max_budget)
    return Made(folder.name, made, model, config.features, card, kind)
