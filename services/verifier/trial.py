"""A drafter without a card is tried with its neighbours' layers, beside whatever else runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import partial

from hedgerow.engine.types import DraftAnswer, DraftBatch
from hedgerow.rpc.logs import get_log
from services.verifier.agreement import Described
from services.verifier.hosted import HostedDrafter
from services.verifier.loop import StepLoop
from services.verifier.neighbours import Drafts, Text, try_layers
from services.verifier.probe import AcceptanceProbe

DONE = object()
log = get_log(__name__)


class Hosted:
    """A drafter in this process, asked between two steps: it is the step's thread's."""

    def __init__(self, steps: StepLoop, drafter: HostedDrafter) -> None:
        self._steps, self._drafter = steps, drafter

    async def draft(self, batch: DraftBatch) -> DraftAnswer | None:
        return await self._steps.aside(partial(self._drafter.propose, batch))


class LayerTrial:
    """`passes` add what is drafted to a list, each in the steps' thread between two steps, and once; `told` hears when
    the probe has a word to say."""

    def __init__(
        self,
        probe: AcceptanceProbe,
        steps: StepLoop,
        drafter: Drafts,
        passes: Callable[[list[Text]], Iterator[None]],
        told: Callable[[], None],
    ) -> None:
        self._probe, self._steps, self._drafter, self._told = probe, steps, drafter, told
        self._texts = list[Text]()
        self._passes: Iterator[None] | None = passes(self._texts)
        self._task: asyncio.Task[None] | None = None

    def connected(self, drafter: Described) -> None:
        """A drafter that fits is there."""
        if self._probe.lacks_card(drafter) and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._run(drafter))

    async def _run(self, drafter: Described) -> None:
        try:
            while self._passes is not None:
                if await self._steps.aside(partial(next, self._passes, DONE)) is DONE:
                    self._passes = None
            tried = await try_layers(self._drafter, self._texts, min(drafter.block_size - 1, drafter.max_budget))
        except Exception as error:  # noqa: BLE001  a trial is for the log alone
            log.error("the drafter's layers could not be tried", exception=error)
            return
        if tried is not None:
            self._probe.tried(drafter, tried)
            self._told()
