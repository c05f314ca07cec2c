"""The step loop and the servicer behind it, in this process, over a small random model."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import grpc.aio
import pytest

from hedgerow.engine.config import EngineConfig
from hedgerow.engine.step import NoDrafter
from hedgerow.engine.types import Finish, Sampling, Start, StepResult
from hedgerow.engine.verifier import VerifierEngine
from hedgerow.errors import Internal
from hedgerow.model.batch import ForwardOutput, SequenceRows
from hedgerow.model.cache import LatentCache
from hedgerow.model.k2 import K2Model
from hedgerow.v1 import common_pb2, verifier_pb2
from services.verifier.convert import description
from services.verifier.loop import StepLoop
from services.verifier.servicer import Loaded, VerifierServicer
from tests.attach import TestGateway
from tests.polling import soon
from tests.stack import Models

PROMPT = [1, 2, 3]


class FailingModel(K2Model):
    """Computes as many steps as it is told to; the next one fails, as a device would."""

    left = 1 << 30

    def forward(self, rows: Sequence[SequenceRows], cache: LatentCache) -> ForwardOutput:
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("the device is gone")
        return super().forward(rows, cache)


@pytest.fixture
def model(tiny: Models) -> FailingModel:
    return FailingModel.load(tiny.target, ())  # type: ignore[return-value]


@pytest.fixture
def engine(model: FailingModel) -> VerifierEngine:
    return VerifierEngine(model, EngineConfig(default_budget=0), [b"x"] * model.config.vocab_size, frozenset())


@asynccontextmanager
async def looping(engine: VerifierEngine, results: list[StepResult], ahead: bool = False) -> AsyncIterator[StepLoop]:
    loop = StepLoop(engine, NoDrafter(), results.append, ahead)
    task = asyncio.create_task(loop.run())
    try:
        yield loop
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def start(session: str, tokens: int, deadline: float | None = None) -> Start:
    return Start(session, 1, 1, PROMPT, Sampling(max_tokens=tokens, ignore_eos=True), deadline=deadline)


async def test_it_sleeps_until_it_is_woken_and_sleeps_again(engine: VerifierEngine) -> None:
    results: list[StepResult] = []
    async with looping(engine, results) as loop:
        for round_ in (1, 2):
            await asyncio.sleep(0.05)
            assert engine.load().steps == 5 * (round_ - 1), "a step ran without work"
            engine.start(start(f"session-{round_}", 5))
            loop.wake()
            await soon(lambda: results and results[-1].updates[-1].finish is Finish.LENGTH)
            await soon(lambda: not engine.has_work())
            assert engine.load().steps == 5 * round_
            results.clear()


async def test_a_deadline_wakes_a_loop_in_which_everything_is_held(model: FailingModel) -> None:
    """Nothing runs and nobody calls: only the clock can end the sequence."""
    config = EngineConfig(default_budget=0, run_ahead=4)
    engine = VerifierEngine(model, config, [b"x"] * model.config.vocab_size, frozenset())
    results: list[StepResult] = []
    async with looping(engine, results) as loop:
        began = time.monotonic()
        engine.start(start("held", 1000, deadline=began + 0.4))
        loop.wake()
        await soon(lambda: results and results[-1].updates[-1].finish is Finish.DEADLINE)
        assert time.monotonic() - began >= 0.4
        assert engine.load().tokens == 4


@pytest.mark.parametrize(("bound", "ahead"), [("STUCK", False), ("STUCK_ON_DEVICE", True)])
async def test_a_step_that_hangs_is_trouble(
    engine: VerifierEngine, model: FailingModel, monkeypatch: pytest.MonkeyPatch, bound: str, ahead: bool
) -> None:
    """The process that answers health must not say that all is well while its steps do not end."""
    for name in ("STUCK", "STUCK_ON_DEVICE"):
        monkeypatch.setattr(f"services.verifier.loop.{name}", 0.2 if name == bound else 1e9)
    gate = threading.Event()
    forward = model.forward

    def slow(rows: Sequence[SequenceRows], cache: LatentCache) -> ForwardOutput:
        gate.wait(20)
        return forward(rows, cache)

    monkeypatch.setattr(model, "forward", slow)
    async with looping(engine, [], ahead) as loop:
        engine.start(start("session", 2))
        loop.wake()
        assert loop.trouble() is None
        await soon(lambda: loop.trouble() is not None)
        gate.set()
        await soon(lambda: loop.trouble() is None)


async def test_a_step_that_fails_ends_the_loop_after_its_updates(engine: VerifierEngine, model: FailingModel) -> None:
    results: list[StepResult] = []
    loop = StepLoop(engine, NoDrafter(), results.append)
    model.left = 3
    engine.start(start("session", 100))
    with pytest.raises(Internal, match="step 4 failed"):
        await asyncio.wait_for(loop.run(), 20)
    assert [update.finish for result in results for update in result.updates] == [Finish.NONE] * 3 + [Finish.ERROR]


@pytest.mark.parametrize("ahead", [False, True])
async def test_a_step_runs_while_the_one_before_it_is_told(engine: VerifierEngine, ahead: bool) -> None:
    """Where that is asked for. What is told is that step's own, whatever the next ones do to the sequence."""
    results, later, told = list[StepResult](), list[int](), list[str]()

    def deliver(result: StepResult) -> None:
        told.append(str(result))
        end = time.monotonic() + 5
        while ahead and len(results) < 5 and engine.load().steps == result.step_id and time.monotonic() < end:
            time.sleep(0.001)
        later.append(engine.load().steps - result.step_id)
        results.append(result)

    loop = StepLoop(engine, NoDrafter(), deliver, ahead)
    engine.start(start("session", 6))
    running = asyncio.create_task(loop.run())
    await soon(lambda: results and results[-1].updates[-1].finish is Finish.LENGTH)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert later == [int(ahead)] * 5 + [0]
    assert [update.offset for result in results for update in result.updates] == list(range(6))
    if ahead:
        assert [str(result) for result in results] == told
        first, last = (results[n].updates[0].timings for n in (0, -1))
        assert first is not None
        assert last is not None
        assert first.verify_ns == 0 < first.prefill_ns == last.prefill_ns
        assert last.verify_ns > 0


async def test_a_failed_step_is_told_and_none_is_begun_after_it(engine: VerifierEngine, model: FailingModel) -> None:
    results: list[StepResult] = []
    loop = StepLoop(engine, NoDrafter(), results.append, ahead=True)
    model.left = 3
    engine.start(start("session", 100))
    with pytest.raises(Internal, match="step 4 failed"):
        await asyncio.wait_for(loop.run(), 20)
    assert [update.finish for result in results for update in result.updates] == [Finish.NONE] * 3 + [Finish.ERROR]
    assert engine.load().steps == 4


async def test_a_failed_engine_tells_every_gateway_before_its_stream_ends(
    engine: VerifierEngine, model: FailingModel
) -> None:
    """Running and waiting sequences alike: whoever started one hears that it is over, and may go elsewhere."""
    servicer = VerifierServicer(outgoing_limit=100, orphan_seconds=0.05)
    loop = StepLoop(engine, NoDrafter(), servicer.deliver)
    servicer.loaded = Loaded(description("x", model, engine, b"i" * 16, {}), engine, loop.wake, loop.trouble, 8)
    server = grpc.aio.server()
    servicer.register(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    sampling = common_pb2.SamplingParams(max_tokens=1000, ignore_eos=True)
    async with TestGateway(f"127.0.0.1:{port}") as gateway:
        running = asyncio.create_task(loop.run())
        for n in range(3):
            await gateway.start(f"session-{n}", PROMPT, sampling)
        await gateway.seen("session-2", 2)
        model.left = 0
        with pytest.raises(Internal) as failed:
            await running
        servicer.fail(failed.value)
        await servicer.flushed(5)
        await gateway.finished([f"session-{n}" for n in range(3)])
        for update in gateway.last.values():
            assert update.error.reason == "INTERNAL"
        await asyncio.wait_for(gateway.ended.wait(), 5)
    await server.stop(0)


async def test_the_load_is_told_while_a_step_hangs_and_its_steps_stand_still(
    engine: VerifierEngine, model: FailingModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway that hears nothing asks; the answer must tell a verifier that works from one that hangs."""
    gate, forward = threading.Event(), model.forward

    def held(rows: Sequence[SequenceRows], cache: LatentCache) -> ForwardOutput:
        gate.wait(60)
        return forward(rows, cache)

    monkeypatch.setattr(model, "forward", held)
    servicer = VerifierServicer(outgoing_limit=100, orphan_seconds=0.05)
    loop = StepLoop(engine, NoDrafter(), servicer.deliver)
    servicer.loaded = Loaded(description("x", model, engine, b"i" * 16, {}), engine, loop.wake, loop.trouble, 8)
    server = grpc.aio.server()
    servicer.register(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    running = asyncio.create_task(loop.run())
    async with TestGateway(f"127.0.0.1:{port}") as gateway:
        await gateway.start("session", PROMPT, common_pb2.SamplingParams(max_tokens=5, ignore_eos=True))
        await soon(lambda: engine.load().running)
        loads = [await asyncio.wait_for(gateway.load(), 10) for _ in range(3)]
        assert [(load.steps, load.running, load.tokens) for load in loads] == [(1, 1, 0)] * 3
        gate.set()
        await gateway.finished(["session"])
        load = await gateway.load()
        assert (load.steps, load.tokens, load.held_sequences) == (5, 5, 0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await server.stop(0)


async def test_a_start_that_is_read_when_its_call_is_over_runs_for_nobody(
    engine: VerifierEngine, model: FailingModel
) -> None:
    """A gateway that dies may leave a message behind that is read last; it was never let go, for ever."""
    servicer = VerifierServicer(outgoing_limit=100, orphan_seconds=0.0)
    servicer.loaded = Loaded(description("x", model, engine, b"i" * 16, {}), engine, lambda: None, lambda: None, 8)
    messages = asyncio.Queue[verifier_pb2.AttachRequest]()
    reads = 0

    async def requests() -> AsyncIterator[verifier_pb2.AttachRequest]:
        nonlocal reads
        while True:
            reads += 1
            yield await messages.get()

    call = servicer.Attach(requests(), cast(Any, None))
    messages.put_nowait(verifier_pb2.AttachRequest(gateway=b"g" * 16))
    assert (await anext(call)).incarnation == b"i" * 16
    await soon(lambda: reads == 2)
    await call.aclose()  # type: ignore[attr-defined]
    sampling = common_pb2.SamplingParams(max_tokens=5)
    late = verifier_pb2.StartSequence(session_id="s", epoch=1, attempt=1, prompt=PROMPT, sampling=sampling)
    messages.put_nowait(verifier_pb2.AttachRequest(start=[late]))
    await soon(lambda: reads == 3)
    assert engine.load().held_sequences == 0
