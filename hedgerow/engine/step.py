"""One step of the whole running batch, as the design reads: plan, draft, verify."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor
from dataclasses import replace
from typing import Protocol

from hedgerow.engine.drafter import DrafterEngine
from hedgerow.engine.fed import FedVerifier
from hedgerow.engine.types import DraftAnswer, DraftBatch, StepResult, Update
from hedgerow.engine.verifier import VerifierEngine


class Drafter(Protocol):
    """Whoever proposes trees: a service across the network, or an engine in this process."""

    async def draft(self, batch: DraftBatch) -> DraftAnswer | None:
        """One step's trees; None where there is no drafter or it is too late. Raises nothing."""


class LocalDrafter:
    """A DrafterEngine in this process: its trees are made in the step's own thread."""

    def __init__(self, engine: DrafterEngine) -> None:
        self.engine = engine

    async def draft(self, batch: DraftBatch) -> DraftAnswer | None:
        return self.propose(batch)

    def propose(self, batch: DraftBatch) -> DraftAnswer | None:
        """What `draft` gives; blocks."""
        return self.engine.draft(batch)

    def made(self) -> None:
        """A step's trees were made on the device, without a batch."""


class NoDrafter:
    """No drafter: every sequence decodes plainly."""

    async def draft(self, batch: DraftBatch) -> DraftAnswer | None:
        return None

    def propose(self, batch: DraftBatch) -> DraftAnswer | None:
        return None


async def step(engine: VerifierEngine, drafter: Drafter, worker: Executor | None = None) -> StepResult | None:
    """Runs the next step; None when there is nothing to do.

    The forward pass blocks: with a `worker` (one thread) the event loop stays free for what arrives meanwhile.
    """
    if worker is not None and isinstance(drafter, LocalDrafter):
        return await asyncio.get_running_loop().run_in_executor(worker, step_here, engine, drafter)
    plan = engine.plan()
    if plan is None:
        return None
    answer = await drafter.draft(plan.draft) if plan.draft.works or plan.draft.release else None
    if worker is None:
        return engine.verify(plan, answer)
    return await asyncio.get_running_loop().run_in_executor(worker, engine.verify, plan, answer)


def step_here(engine: VerifierEngine, drafter: LocalDrafter | NoDrafter) -> StepResult | None:
    """The whole step in the caller's thread, for drafters that need no event loop.

    Nothing that it gives is changed by later steps, so that these may run while it is told.
    """
    if isinstance(engine, FedVerifier) and isinstance(drafter, LocalDrafter):
        result = engine.step(drafter)
    else:
        result = _step_apart(engine, drafter)
    return None if result is None else replace(result, updates=[_apart(update) for update in result.updates])


def _step_apart(engine: VerifierEngine, drafter: LocalDrafter | NoDrafter) -> StepResult | None:
    plan = engine.plan()
    if plan is None:
        return None
    asked = plan.draft.works or plan.draft.release
    return engine.verify(plan, drafter.propose(plan.draft) if asked else None)


def _apart(update: Update) -> Update:
    """Without what belongs to its sequence, which goes on."""
    if update.timings is None:
        return update
    return replace(update, timings=replace(update.timings), chunks=tuple(update.chunks))
