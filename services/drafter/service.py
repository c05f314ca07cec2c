"""The drafter process: loads the drafter and the target's embedding and head, then drafts until it is told to stop."""

from __future__ import annotations

import asyncio
import os
from functools import partial

import torch

from hedgerow.engine.drafter import DrafterConfig, DrafterEngine
from hedgerow.model.interface import waited
from hedgerow.rpc.health import Health
from hedgerow.rpc.server import serve
from hedgerow.rpc.work import serve_while
from services.drafter.config import DrafterServiceConfig
from services.drafter.convert import Limits, description
from services.drafter.loading import load
from services.drafter.metrics import watch_device
from services.drafter.servicer import DrafterServicer, Loaded

SERVICE = "hedgerow.v1.DrafterService"
MODEL = "model"


async def run(config: DrafterServiceConfig) -> None:
    """Serves until SIGTERM. Raises HedgerowError with file and field for a checkpoint that cannot be used."""
    torch.set_num_threads(config.threads_used)
    health = Health([SERVICE])
    health.report(MODEL, "its weights are being loaded")
    servicer = DrafterServicer(health.draining, config.max_verifiers)
    await serve_while(serve("drafter", servicer.register, config, health), _load(config, servicer, health))


async def _load(config: DrafterServiceConfig, servicer: DrafterServicer, health: Health) -> None:
    made = await asyncio.to_thread(load, config)
    watch_device(partial(waited, made.model))
    limits = Limits(made.model.vocab_size, made.model.feature_width, config.max_budget, config.max_sequences)
    most = DrafterConfig(config.max_sequences, config.max_budget)
    servicer.loaded = Loaded(
        description(made, limits, os.urandom(16)), limits, partial(DrafterEngine, made.drafts, most)
    )
    told = {"model": made.name, "drafter": config.kind, "features": made.features, "trees": made.trees}
    health.facts |= {name: fact for name, fact in told.items() if fact}
    health.report(MODEL, None)
