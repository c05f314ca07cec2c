"""The drafter process: loads the drafter and the target's embedding and head, then drafts until it is told to stop."""

from __future__ import annotations

import asyncio
import os
from functools import partial
from typing import cast

import torch

from hedgerow.engine.drafter import DrafterConfig, DrafterEngine
from hedgerow.model.devices import Device
from hedgerow.model.select import Engine, load_drafter
from hedgerow.rpc.health import Health
from hedgerow.rpc.server import serve
from hedgerow.rpc.work import serve_while
from services.drafter.config import DrafterServiceConfig
from services.drafter.convert import Limits, description
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
    read = partial(
        load_drafter,
        config.model_path,
        config.target_path,
        cast(Engine, config.engine),
        config.threads_used,
        device=cast(Device, config.device),
    )
    model = await asyncio.to_thread(read)
    limits = Limits(model.vocab_size, model.feature_width, config.max_budget, config.max_sequences)
    described = description(config.model_path.name, model, limits, os.urandom(16))
    servicer.loaded = Loaded(
        described, limits, partial(DrafterEngine, model, DrafterConfig(config.max_sequences, config.max_budget))
    )
    health.facts["model"] = config.model_path.name
    health.report(MODEL, None)
