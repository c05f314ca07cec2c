"""The step loop: runs steps while there is work, and sleeps while there is none."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from hedgerow.engine.step import Drafter, LocalDrafter, NoDrafter, step, step_here
from hedgerow.engine.types import StepResult
from hedgerow.engine.verifier import VerifierEngine
from hedgerow.errors import Internal
from hedgerow.rpc.logs import bind
from hedgerow.rpc.work import computing_thread

T = TypeVar("T")
STUCK = 30.0  # seconds; the longest step, a full prefill chunk on a busy laptop, takes one or two
STUCK_ON_DEVICE = 8.0  # every shape of step has been met by then, and takes tens of ms; known within 10, as in a group


class StepLoop:
    """Drives one engine. `deliver` gets every result, in the loop's thread, and must not block.

    ahead: a step begins before the result of the one before it is delivered. For a model on a device, whose steps do
    not compete with messages for the cores, and with a drafter that needs no event loop: others are asked as usual.
    """

    def __init__(
        self, engine: VerifierEngine, drafter: Drafter, deliver: Callable[[StepResult], None], ahead: bool = False
    ) -> None:
        self._engine, self._drafter, self._deliver = engine, drafter, deliver
        self._here = drafter if ahead and isinstance(drafter, LocalDrafter | NoDrafter) else None
        self._stuck = STUCK_ON_DEVICE if ahead else STUCK
        self._wake = asyncio.Event()
        self._began: float | None = None
        self._worker = computing_thread("verify")

    async def aside(self, work: Callable[[], T]) -> T:
        """What `work` gives, in the thread of the steps and between two of their parts; it must be short."""
        return await asyncio.get_running_loop().run_in_executor(self._worker, work)

    def wake(self) -> None:
        """There may be work: something was started, cancelled or committed."""
        self._wake.set()

    def trouble(self) -> str | None:
        """For health: a step that takes longer will not end, whatever it is that hangs."""
        taken = 0.0 if self._began is None else time.monotonic() - self._began
        return None if taken < self._stuck else f"a step has taken {taken:.0f} s"

    async def run(self) -> None:
        """Until cancelled. Raises Internal when a step failed, once its updates are delivered."""
        try:
            coming = self._begin()
            while True:
                result = await coming
                self._began = None
                bind(step=result.step_id if result is not None else "")
                if result is None:
                    await self._sleep()
                    coming = self._begin()
                    continue
                failed = self._engine.load().faults
                if self._here is not None and not failed:
                    coming = self._begin()
                self._deliver(result)
                if failed:
                    raise Internal(f"step {result.step_id} failed")
                if self._here is None:
                    # The messages leave before the next step's forward pass competes for the cores.
                    await asyncio.sleep(0)
                    coming = self._begin()
        finally:
            # Not awaited: a step that hangs would keep the process.
            self._worker.shutdown(wait=False, cancel_futures=True)

    def _begin(self) -> Awaitable[StepResult | None]:
        self._began = time.monotonic()
        if self._here is None:
            return step(self._engine, self._drafter, self._worker)
        return asyncio.get_running_loop().run_in_executor(self._worker, step_here, self._engine, self._here)

    async def _sleep(self) -> None:
        """Until somebody wakes the loop, or a deadline passes."""
        self._wake.clear()
        if self._engine.has_work():
            return
        deadline = self._engine.next_deadline()
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            async with asyncio.timeout(timeout):
                await self._wake.wait()
        except TimeoutError:
            return
