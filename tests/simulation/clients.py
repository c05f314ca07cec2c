"""Clients: the shipped SDK, and users who wait, cancel, leave, come back, are slow, ask twice or are gone for good."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from typing import Any

from hedgerow.client import AsyncClient, Finished, Retry
from hedgerow.errors import (
    Cancelled,
    DeadlineExceeded,
    Fenced,
    HedgerowError,
    LostSuffix,
    NotFound,
    Overloaded,
    SessionFailed,
    Unavailable,
)
from tests.simulation.checker import Checker
from tests.simulation.processes import KILLED, Process
from tests.simulation.views import View
from tests.simulation.world import World

PLANS = {"finish": 12, "cancel": 2, "leave": 1, "away": 3, "vanish": 2, "delete": 1}
"""To the end; `cancel` by id; `aclose`; detach and come back later; die, and another process comes back; delete."""


class Client:
    """One user with one generation. `done`: there is nothing that he still waits for."""

    def __init__(self, world: World, checker: Checker, chance: random.Random, number: int, key: str) -> None:
        self.name = f"c{number}"
        self._world, self._checker, self._chance = world, checker, chance
        self.process = world.client(self.name)
        self.views: list[View] = []
        self.done = False
        self.wants_end = False
        self._begin = chance.choice((0.0, chance.uniform(0, 0.5)))
        self._slow = chance.choice((0.0, 0.0, chance.uniform(0, 0.2)))
        self.plan = chance.choices(list(PLANS), list(PLANS.values()))[0]
        self._act = chance.choice((chance.uniform(0, 0.5), chance.uniform(0, 3.0)))
        self._away = chance.choice((chance.uniform(0, 2.0), chance.uniform(0, 60.0)))
        self._looks_again = chance.random() < 0.25
        self.deadline = chance.choice((None, None, None, chance.uniform(0.05, 2.0), chance.uniform(1.0, 20.0)))
        self._addresses = world.addresses("g")
        chance.shuffle(self._addresses)
        self._retry = Retry(attempts=4, first_delay=0.05, last_delay=2.0, total=chance.choice((5.0, 60.0)))
        self._prompt = [chance.choice(b"abcdefgh") for _ in range(chance.choice((1, 2, 5)))]
        self.options = self._options(chance, key)
        self._asked_at = 0.0

    def _options(self, chance: random.Random, key: str) -> dict[str, Any]:
        options: dict[str, Any] = {"max_tokens": chance.randint(1, 20), "temperature": 0.0, "idempotency_key": key}
        options["detach"] = chance.random() < 0.8 or self.plan in ("away", "vanish")
        options["leave_running"] = self.plan == "away"
        if chance.random() < 0.3:
            options["stop"] = [chance.choice(("ab", "sea", "ß", "h h"))]
        if chance.random() < 0.4:
            options["ignore_eos"] = True
        if chance.random() < 0.5:
            options["seed"] = chance.getrandbits(40)
        if self.deadline is not None:
            options["deadline"] = self.deadline
        options["return_steps"] = chance.random() < 0.4
        return options

    def same_as(self, other: Client) -> None:
        """Ask for what another one asks for, under his key."""
        self._prompt, self.options, self.deadline = other._prompt, dict(other.options), other.deadline

    def begin(self) -> None:
        """Start the user."""
        self._spawn(self.process, self._live())

    def _spawn(self, process: Process, user: Coroutine[Any, Any, None]) -> None:
        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                self._checker.fail(f"{self.name} failed: {error!r}")

        self._world.loop.spawn(process, user).add_done_callback(ended)

    def progress(self) -> str:
        """How far he came."""
        last = self.views[-1] if self.views else None
        tokens, error = (len(last.tokens), last.error) if last else (0, None)
        return f"{self.plan}, {len(self.views)} views, {tokens} tokens, {error!r}"

    async def _live(self) -> None:
        try:
            await asyncio.sleep(self._begin)
            self._asked_at = self._world.loop.time()
            view = self._view()
            async with self._client() as client:
                self._world.note(self.name, f"asks {self._addresses}: {self.plan} {self.options}")
                acting = asyncio.create_task(self._act_later(client, view))
                try:
                    await self._read(client, view, client.generate(self._prompt, **self.options))
                finally:
                    acting.cancel()
                if self._looks_again and view.finished is not None and self.plan != "delete":
                    await self._look_again(client, view)
            self._finish()
        except HedgerowError as error:
            self._checker.fail(f"{self.name}: {error!r} from a call that was to close")
            self._finish()

    def _finish(self) -> None:
        self.done = True
        self._world.note(self.name, f"is done: {self.progress()}")

    def _view(self) -> View:
        view = View(self._checker, f"{self.name}.{len(self.views)}")
        self.views.append(view)
        return view

    def _client(self) -> AsyncClient:
        return AsyncClient(self._addresses, retry=self._retry)

    async def _read(self, client: AsyncClient, view: View, stream: Any) -> None:
        """Follow a stream to its end, over errors that say that it may go on."""
        for _ in range(1000):
            view.stream = stream
            try:
                async for event in stream.events():
                    view.event(event)
                    self._world.note(view.name, f"{type(event).__name__} {len(view.tokens)}")
                    if self._slow and not isinstance(event, Finished):
                        await asyncio.sleep(self._slow)
            except HedgerowError as error:
                self._world.note(view.name, f"{error!r}")
                view.error = error
            if view.finished is not None or view.left:
                return
            if view.error is None:
                self._checker.fail(f"{view.name}: the stream ended without an end")
                return
            if not self._may_try_again(view, view.error):
                return
            view.error = None
            await asyncio.sleep(self._chance.uniform(0.1, 1.0))
            if stream.session_id:
                position = stream.position._replace(session_id=stream.session_id)
                view.resumed = True
                stream = client.resume(
                    *position, detach=self.options["detach"], leave_running=self.options["leave_running"]
                )
            else:
                view.resumed = False
                stream = client.generate(self._prompt, **self.options)

    def _may_try_again(self, view: View, error: HedgerowError) -> bool:
        """Whether it is worth it; an error that must not be is a violation."""
        # On the wire a deadline is whole milliseconds, rounded down.
        late = self.deadline is not None and self._world.loop.time() >= self._asked_at + self.deadline - 0.001
        if isinstance(error, Unavailable | Overloaded | Fenced) and not late:
            return True
        allowed = (
            isinstance(error, Unavailable | Overloaded | Fenced)
            or (isinstance(error, DeadlineExceeded) and (late or self._jumped()))
            or (isinstance(error, LostSuffix) and view.started is not None and view.known.is_lost)
            or (isinstance(error, NotFound) and self._may_be_gone(view))
            or (isinstance(error, SessionFailed) and (not self.options["detach"] or self._was_refused(view)))
            or (isinstance(error, Cancelled) and view.left)
        )
        if not allowed:
            self._checker.fail(f"{view.name}: {error!r}")
        return False

    def _jumped(self) -> bool:
        """Whether a gateway's clock may say that the deadline has passed: it is recorded as a time of day."""
        return self.deadline is not None and self._checker.jumps

    def _was_refused(self, view: View) -> bool:
        """Whether nobody told him that his session had found no place; had he asked with its key, it would be new."""
        return view.resumed and view.known.failed

    def _may_be_gone(self, view: View) -> bool:
        """Whether the session may be deleted, or its record lost; of one that has not started, by its other user."""
        if view.started is None:
            return self._world.lost > 0 or self._world.deletes
        return view.known.is_gone

    async def _look_again(self, client: AsyncClient, view: View) -> None:
        """A session that has ended is there to be read, from its beginning or from where its reader stands."""
        assert view.started is not None
        await asyncio.sleep(self._away)
        again = self._view()
        again.resumed = True
        self._world.note(again.name, "looks again")
        await self._read(client, again, client.resume(view.started.session_id))
        if again.finished is not None and view.finished is not None:
            before, now = (view.finished.reason, view.tokens), (again.finished.reason, again.tokens)
            if before != now and not self._world.lost:
                self._checker.fail(f"{again.name}: {now}, and it was {before}")

    async def _act_later(self, client: AsyncClient, view: View) -> None:
        if self.plan == "finish":
            return
        await asyncio.sleep(self._act)
        while not view.stream.session_id and self.plan != "leave":  # noqa: ASYNC110  the SDK has no event for it
            await asyncio.sleep(0.01)
        self._world.note(self.name, f"acts: {self.plan}")
        if self.plan == "leave":
            view.left = True
            self._world.cancels.add(self.options["idempotency_key"])
            await view.stream.aclose()
        elif self.plan == "away":
            view.left = True
            position = await view.stream.detach()
            if not position.session_id:  # it never started, or failed
                view.left = False
                return
            self._spawn(self.process, self._come_back(self.process, view, position))
        elif self.plan == "vanish":
            position = view.stream.position._replace(session_id=view.stream.session_id)
            another = self._world.client(f"{self.name}b")
            self._spawn(another, self._come_back(another, view, position))
            self._world.loop.soon(None, self._world.kill, self.name)
        else:
            self._world.cancels.add(self.options["idempotency_key"])
            try:
                if self.plan == "cancel":
                    await client.cancel(view.stream.session_id)
                    self._checker.cancelled(view.stream.session_id)
                else:
                    self._world.deletes = True
                    self._checker.sessions[view.stream.session_id].deleting = True
                    await client.delete_session(view.stream.session_id)
                    self._checker.cancelled(view.stream.session_id)
            except HedgerowError as error:
                self._world.note(self.name, f"{self.plan}: {error!r}")

    async def _come_back(self, process: Process, before: View, position: Any) -> None:
        """Go on with a session that was left, as if nothing had been; the process that left it may be dead."""
        await asyncio.sleep(self._away)
        if process is self.process and process.state is KILLED:
            return
        view = self._view()
        view.tokens, view.text, view.started = list(before.tokens), before.text, before.started
        view.begin, view.resumed = len(view.tokens), True
        self._world.note(view.name, f"comes back to {position.token_offset}")
        async with self._client() as client:
            await self._read(client, view, client.resume(*position))
        self._finish()
