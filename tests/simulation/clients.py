"""Clients: the shipped SDK, and users who wait, cancel, leave, are slow, or ask twice."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from hedgerow.client import AsyncClient, Retry
from hedgerow.errors import DeadlineExceeded, HedgerowError, LostSuffix, Overloaded, Unavailable
from tests.simulation.checker import Checker, View
from tests.simulation.world import World


class Client:
    """One user with one generation. `done`: there is nothing that he still waits for."""

    def __init__(self, world: World, checker: Checker, chance: random.Random, number: int) -> None:
        self.name = f"c{number}"
        self._world, self._checker, self._chance = world, checker, chance
        self.process = world.client(self.name)
        self.views: list[View] = []
        self.done = False
        self.cancelled = self.left = False
        self._begin = chance.choice((0.0, chance.uniform(0, 0.5)))
        self._slow = chance.choice((0.0, 0.0, chance.uniform(0, 0.2)))
        self._plan = chance.choices(("finish", "cancel", "leave"), (8, 1, 1))[0]
        self._act = chance.uniform(0, 0.5)
        self.deadline = chance.choice((None, None, None, chance.uniform(0.05, 2.0)))
        self._prompt = [chance.choice(b"abcdefgh") for _ in range(chance.choice((1, 2, 5)))]
        self._options: dict[str, Any] = {
            "max_tokens": chance.randint(1, 20),
            "temperature": 0.0,
            "idempotency_key": f"{self.name}-{chance.random()}",
            "detach": False,
        }
        if chance.random() < 0.3:
            self._options["stop"] = [chance.choice(("ab", "sea", "ß", "h h"))]
        if chance.random() < 0.4:
            self._options["ignore_eos"] = True
        if chance.random() < 0.5:
            self._options["seed"] = chance.getrandbits(40)
        if self.deadline is not None:
            self._options["deadline"] = self.deadline

    def begin(self) -> None:
        """Start the user."""
        self._world.loop.spawn(self.process, self._live())

    def progress(self) -> str:
        """How far he came."""
        last = self.views[-1] if self.views else None
        return f"{len(self.views)} views, {len(last.tokens) if last else 0} tokens, {last.error if last else None!r}"

    async def _live(self) -> None:
        try:
            await asyncio.sleep(self._begin)
            await self._generate()
        finally:
            self.done = True
            self._world.note(self.name, f"is done: {self.progress()}")

    async def _generate(self) -> None:
        addresses = self._world.addresses("g")
        at = self._chance.randrange(len(addresses))
        self._asked_at = self._world.loop.time()
        for _ in range(1000):
            async with AsyncClient(addresses[at], retry=Retry.never()) as client:
                view = View(self._checker, f"{self.name}.{len(self.views)}")
                self.views.append(view)
                self._world.note(self.name, f"asks {addresses[at]}")
                stream = client.generate(self._prompt, **self._options)
                acting = asyncio.create_task(self._later(client, stream))
                try:
                    async with stream:
                        async for event in stream.events():
                            view.event(event)
                            self._world.note(self.name, f"{type(event).__name__} {len(view.tokens)}")
                            if self._slow:
                                await asyncio.sleep(self._slow)
                except HedgerowError as error:
                    view.failed(error)
                    self._world.note(self.name, f"{error!r}")
                finally:
                    acting.cancel()
            if view.finished or self.left:
                return
            assert view.error is not None
            if not self._may_try_again(view, view.error):
                return
            at = (at + 1) % len(addresses)
            await asyncio.sleep(self._chance.uniform(0.1, 1.0))

    def _may_try_again(self, view: View, error: HedgerowError) -> bool:
        """Whether it is worth it; an error that must not be is a violation."""
        late = self.deadline is not None and self._world.loop.time() >= self._asked_at + self.deadline
        if isinstance(error, Unavailable | Overloaded):
            return "idempotency key" not in error.message and not late
        lost = isinstance(error, LostSuffix) and self._world.lost > 0
        if not lost and not (isinstance(error, DeadlineExceeded) and late):
            self._checker.fail(f"{view.name}: {error!r}")
        return False

    async def _later(self, client: AsyncClient, stream: Any) -> None:
        await asyncio.sleep(self._act)
        if self._plan == "leave":
            self.left = True
            self._world.note(self.name, "leaves")
            await stream.aclose()
        if self._plan == "cancel":
            while not stream.session_id:  # noqa: ASYNC110  the SDK has no event for it
                await asyncio.sleep(0.01)
            self.cancelled = True
            self._world.note(self.name, "cancels")
            try:
                await client.cancel(stream.session_id)
            except HedgerowError as error:
                self._world.note(self.name, f"cancel: {error!r}")
