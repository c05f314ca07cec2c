"""New calls while no verifier takes sessions: so many of them wait, for so long.

A group that restarts is away for as long as its model loads. Nothing is recorded of a call that waits: the model that
comes back is the one that it is checked against and gets, whatever the one before was.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence

from hedgerow.errors import DeadlineExceeded, HedgerowError, InvalidRequest, Overloaded, Unavailable
from services.gateway.limits import brief
from services.gateway.ports import Verifier
from services.gateway.types import Model

RETRY = 2.0  # seconds: the hint of a refusal


class Waiting:
    """`seconds`: how long a call waits, and how long verifiers may be away before none begins to; `most` of them,
    together with the sessions that `running` counts. Nothing waits here but calls: `wake` is to be called several times
    a second.
    """

    def __init__(
        self,
        verifiers: Sequence[Verifier],
        seconds: float,
        most: int,
        running: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._verifiers, self._seconds, self.most, self._running = verifiers, seconds, most, running
        self._clock = clock
        self._calls: set[asyncio.Future[None]] = set()
        self._seen = -math.inf  # when there last was one that takes sessions
        self._closed: HedgerowError | None = None

    def __len__(self) -> int:
        return len(self._calls)

    def check(self, name: str) -> None:
        """Raises InvalidRequest for a name that no verifier has, and for none where there are several."""
        names = sorted({v.model.name for v in self._verifiers if v.model})
        if names and name not in names and (name or len(names) > 1):
            raise InvalidRequest("model", brief(name), f"one of: {', '.join(names)}")

    def model(self, name: str = "") -> Model | None:
        """The model of this name, or any, where a verifier of it takes sessions."""
        open_ = [v.model for v in self._verifiers if v.model and v.attached and not v.draining]
        if open_:
            self._seen = self._clock()
        return next((model for model in open_ if name in ("", model.name)), None)

    def known(self, name: str = "") -> Model:
        """As `model`; where there is none, what one served before it went. Raises Unavailable where none was seen."""
        before = [v.model for v in self._verifiers if v.model]
        found = self.model(name) or next(
            (model for model in before if model.name == name), before[0] if before else None
        )
        if found is None:
            raise _away()
        return found

    async def opened(self, name: str, deadline: float | None) -> Model:
        """As `model`, now or when there is one. `deadline` by the clock.

        Raises InvalidRequest as `check` does; Unavailable, Overloaded, DeadlineExceeded.
        """
        self.check(name)
        if (model := self.model(name)) is not None:
            return model
        now = self._clock()
        if self._closed is not None:
            raise self._closed
        if now - self._seen >= self._seconds:
            raise _away()
        count = self._running() + len(self._calls)
        if count >= self.most:
            raise Overloaded("the gateway", count, self.most, RETRY)
        left = math.inf if deadline is None else deadline - now
        try:
            async with asyncio.timeout(min(left, self._seconds)):
                while (model := self.model(name)) is None:
                    await self._wait()
                    self.check(name)  # it may be another model that came back
        except TimeoutError:
            if left <= self._seconds:
                raise DeadlineExceeded("no verifier took sessions before the deadline") from None
            raise _away(f" for {self._seconds:g} s") from None
        return model

    def wake(self) -> None:
        """Let calls go on, where a verifier takes sessions."""
        if self.model() is not None:
            for call in self._calls:
                if not call.done():
                    call.set_result(None)

    def close(self, error: HedgerowError) -> None:
        """No call waits any more, nor will one: each gets `error`."""
        self._closed = error
        for call in self._calls:
            if not call.done():
                call.set_exception(error)

    async def _wait(self) -> None:
        call = asyncio.get_running_loop().create_future()
        self._calls.add(call)
        try:
            await call
        finally:
            self._calls.discard(call)


class Patient:
    """Passes on what is wrong with a peer: at once while it never was well, else when it was wrong for `seconds`."""

    def __init__(self, report: Callable[[str | None], None], seconds: float) -> None:
        self._report, self._seconds = report, seconds
        self._why: str | None = None
        self._at_once = True
        self._timer: asyncio.TimerHandle | None = None

    def __call__(self, why: str | None) -> None:
        """None: it is well."""
        self._why = why
        if why is None and self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if why is None or self._at_once:
            self._at_once = why is not None
            self._report(why)
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self._late)

    def _late(self) -> None:
        self._timer, self._at_once = None, True
        self._report(self._why)


def _away(how_long: str = "") -> Unavailable:
    return Unavailable("verifier", f"none has taken sessions{how_long}; it restarts, or all of them drain", RETRY)
