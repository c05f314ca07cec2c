"""New calls while no verifier takes sessions: they wait, so many, for so long, until their deadline, and no longer."""

from __future__ import annotations

import asyncio

import pytest

from hedgerow.errors import DeadlineExceeded, InvalidRequest, Overloaded, Unavailable
from services.gateway.types import Model
from services.gateway.waiting import Patient, Waiting
from tests.polling import soon
from tests.unit.gateway_peers import Clock, RecordingEngine

OTHER = Model("other", RecordingEngine().model.fingerprint, 4096, 4096, max_budget=63, default_budget=8)  # type: ignore[union-attr]


class Rig:
    """One verifier that has been there, and went."""

    def __init__(self, seconds: float = 5.0, most: int = 3) -> None:
        self.verifier, self.clock, self.running = RecordingEngine(), Clock(), 0
        self.waiting = Waiting([self.verifier], seconds, most, lambda: self.running, self.clock)
        self.waiting.wake()
        self.verifier.attached = False

    async def call(self, name: str = "", seconds: float | None = None) -> Model:
        deadline = None if seconds is None else self.clock() + seconds
        return await self.waiting.opened(name, deadline)

    def calls(self, count: int) -> list[asyncio.Task[Model]]:
        return [asyncio.create_task(self.call()) for _ in range(count)]


async def test_calls_wait_and_all_go_on_when_a_verifier_comes() -> None:
    rig = Rig()
    calls = rig.calls(3)
    await soon(lambda: len(rig.waiting) == 3)
    rig.waiting.wake()
    await asyncio.sleep(0)
    assert not any(call.done() for call in calls), "none is there yet"
    rig.verifier.attached, rig.verifier.model = True, OTHER
    rig.waiting.wake()
    assert {(await call).name for call in calls} == {"other"}, "the model that came, not the one that went"
    assert not len(rig.waiting)


async def test_a_verifier_that_drains_takes_no_new_calls() -> None:
    rig = Rig()
    rig.verifier.attached = rig.verifier.draining = True
    (call,) = rig.calls(1)
    await soon(lambda: len(rig.waiting) == 1)
    rig.verifier.draining = False
    rig.waiting.wake()
    assert (await call).name == "m"


async def test_a_verifier_that_comes_and_goes_again_wakes_nobody_for_nothing() -> None:
    rig = Rig()
    (call,) = rig.calls(1)
    await soon(lambda: len(rig.waiting) == 1)
    rig.verifier.attached = True
    rig.waiting.wake()
    rig.verifier.attached = False
    await asyncio.sleep(0)
    await soon(lambda: len(rig.waiting) == 1)
    assert not call.done()
    rig.verifier.attached = True
    rig.waiting.wake()
    await call


async def test_of_several_models_one_has_to_be_named() -> None:
    """A request that named none got whichever came first, and one whose group restarted was told of the other."""
    rig, other = Rig(), RecordingEngine("v2")
    other.model = OTHER
    both = Waiting([rig.verifier, other], 5.0, 3, lambda: 0, rig.clock)
    both.wake()
    for name in ("", "gpt-7"):
        with pytest.raises(InvalidRequest) as refused:
            await both.opened(name, None)
        assert (refused.value.field, refused.value.value, refused.value.limit) == ("model", name, "one of: m, other")
    assert (await both.opened("other", None)).name == "other"
    call = asyncio.create_task(both.opened("m", None))  # whose group restarts
    await soon(lambda: len(both) == 1)
    both.wake()
    await asyncio.sleep(0)
    assert not call.done()
    rig.verifier.attached = True
    both.wake()
    assert (await call).name == "m"


async def test_a_call_that_waits_for_a_model_is_told_when_another_one_came_in_its_place() -> None:
    rig = Rig()
    call = asyncio.create_task(rig.call("m"))
    await soon(lambda: len(rig.waiting) == 1)
    rig.verifier.attached, rig.verifier.model = True, OTHER
    rig.waiting.wake()
    with pytest.raises(InvalidRequest, match="one of: other"):
        await call


async def test_after_the_bound_a_call_gets_a_hint_to_come_again() -> None:
    rig = Rig(seconds=0.05)
    with pytest.raises(Unavailable, match=r"none has taken sessions for 0\.05 s") as refused:
        await rig.call()
    assert refused.value.retry_after
    assert not len(rig.waiting)


async def test_a_deadline_ends_the_wait_before_the_bound() -> None:
    rig = Rig()
    with pytest.raises(DeadlineExceeded):
        await rig.call(seconds=0.05)
    with pytest.raises(DeadlineExceeded):
        await rig.call(seconds=-1.0)
    assert not len(rig.waiting)


async def test_no_more_wait_than_may_run() -> None:
    rig = Rig(most=3)
    rig.running = 1
    calls = rig.calls(2)
    await soon(lambda: len(rig.waiting) == 2)
    with pytest.raises(Overloaded, match="3 of 3"):
        await rig.call()
    calls[0].cancel()
    await soon(lambda: len(rig.waiting) == 1)
    calls.append(asyncio.create_task(rig.call()))
    await soon(lambda: len(rig.waiting) == 2)
    rig.verifier.attached = True
    rig.waiting.wake()
    done = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(each) for each in done] == [asyncio.CancelledError, Model, Model]


async def test_none_begins_to_wait_where_verifiers_were_away_for_the_bound() -> None:
    """Such a gateway is not ready: another one may have what it lacks."""
    rig = Rig(seconds=5.0)
    rig.clock.now += 5.0
    with pytest.raises(Unavailable):
        await asyncio.wait_for(rig.call(), 10)


@pytest.mark.parametrize("seconds", [0.0, 5.0])
async def test_none_waits_where_no_verifier_was_ever_seen_or_the_bound_is_nothing(seconds: float) -> None:
    rig = Rig(seconds)
    new = Waiting([rig.verifier], seconds, 3, lambda: 0, rig.clock) if seconds else rig.waiting
    with pytest.raises(Unavailable):
        await asyncio.wait_for(new.opened("", None), 10)
    assert new.known().name == "m", "for what needs no verifier"
    rig.verifier.model = None
    with pytest.raises(Unavailable):
        new.known()


async def test_a_gateway_that_drains_sends_its_waiting_calls_elsewhere() -> None:
    rig = Rig()
    calls = rig.calls(2)
    await soon(lambda: len(rig.waiting) == 2)
    rig.waiting.close(Unavailable("gateway", "it is draining", 0.0))
    for call in calls:
        with pytest.raises(Unavailable, match="draining"):
            await call
    with pytest.raises(Unavailable, match="draining"):
        await rig.call()


async def test_health_is_patient_with_a_peer_that_was_well() -> None:
    told: list[str | None] = []
    patient = Patient(told.append, 0.05)
    patient("not reached yet")
    assert told == ["not reached yet"], "a start is no restart"
    patient(None)
    patient("refused")
    patient(None)
    await asyncio.sleep(0.1)
    assert told == ["not reached yet", None, None], "it was back in time"
    patient("refused")
    patient("refused again")
    assert told[-1] is None
    await soon(lambda: told[-1] == "refused again", 30)
    patient("still")
    assert told[-1] == "still", "what is known to be wrong is told at once"
    patient(None)
    assert told[-1] is None


async def test_a_verifier_that_went_right_after_a_call_is_waited_for() -> None:
    """Whoever asked found it there, though nothing had looked at it since the gateway began."""
    verifier, clock = RecordingEngine(), Clock()
    waiting = Waiting([verifier], 5.0, 3, lambda: 0, clock)
    assert waiting.model() is not None
    verifier.attached = False
    call = asyncio.create_task(waiting.opened("", None))
    await soon(lambda: len(waiting) == 1)
    verifier.attached = True
    waiting.wake()
    assert (await call).name == "m"
