"""The verifier as a process, seen by gateways that are only a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import grpc
import grpc.aio
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from hedgerow.cli.child import Child
from hedgerow.v1 import common_pb2, verifier_pb2
from services.verifier.convert import sampling_from
from tests.attach import TestGateway
from tests.polling import soon
from tests.processes import address, service
from tests.stack import Models, Plain

PROMPT = list(b"while True: ")
RUN_AHEAD = 100
GREEDY = common_pb2.SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
ENDLESS = common_pb2.SamplingParams(temperature=1, seed=1, max_tokens=3000, ignore_eos=True)


@pytest.fixture(scope="module")
def verifier(tiny: Models) -> Iterator[Child]:
    with service(
        "verifier",
        model_path=tiny.target,
        model_name="alone",
        max_sequences=4,
        max_waiting=2,
        orphan_ms=300,
        run_ahead=RUN_AHEAD,
        cache_pages=512,
    ) as child:
        yield child


@pytest.fixture
async def gateway(verifier: Child) -> AsyncIterator[TestGateway]:
    async with TestGateway(address(verifier)) as made:
        yield made
        made.call.cancel()
        await idle(made)


async def until(gateway: TestGateway, condition: Callable[[verifier_pb2.GetLoadResponse], bool]) -> None:
    """Polls the verifier's counters."""
    async with asyncio.timeout(20):
        while not condition(await gateway.load()):  # noqa: ASYNC110  the event is in another process
            await asyncio.sleep(0.02)


async def idle(gateway: TestGateway) -> None:
    """Polls until the verifier holds nothing."""
    await until(gateway, lambda load: not load.held_sequences and load.free_pages == load.total_pages)


async def test_it_says_what_it_is(gateway: TestGateway, tiny_plain: Plain) -> None:
    said = await gateway.stub.Describe(verifier_pb2.DescribeRequest())
    assert (said.model, said.vocab_size, said.max_sequences) == ("alone", tiny_plain.vocab_size, 4)
    assert said.context_length == tiny_plain.context
    assert len(said.fingerprint.digest) == len(said.fingerprint.checkpoint_hash) == 64
    assert said.fingerprint.mode == common_pb2.EXECUTION_MODE_EXACT
    assert said.eos_token_ids
    assert (said.default_budget, list(said.feature_layer_ids)) == (0, []), "nothing is drafted without a drafter"


async def test_each_gateway_gets_its_own_sequences_in_one_message_a_step(
    verifier: Child, gateway: TestGateway, tiny_plain: Plain
) -> None:
    async with TestGateway(address(verifier)) as other:
        sent = (await other.load()).messages_sent
        for n in range(2):
            await gateway.start(f"mine-{n}", [*PROMPT, n], GREEDY)
            await other.start(f"theirs-{n}", [*PROMPT, 10 + n], GREEDY)
        await gateway.finished(["mine-0", "mine-1"])
        await other.finished(["theirs-0", "theirs-1"])
        assert set(gateway.tokens) == {"mine-0", "mine-1"}
        assert set(other.tokens) == {"theirs-0", "theirs-1"}
        for one in (gateway, other):
            steps = [message.step_id for message in one.messages]
            assert steps == sorted(set(steps)), "two messages of one step"
        assert (await other.load()).messages_sent - sent == len(gateway.messages) + len(other.messages)
    assert gateway.tokens["mine-1"] == tiny_plain.tokens([*PROMPT, 1], sampling_from(GREEDY))
    assert other.tokens["theirs-1"] == tiny_plain.tokens([*PROMPT, 11], sampling_from(GREEDY))


@pytest.mark.parametrize(
    ("prompt", "sampling", "reason", "field"),
    [
        ([], GREEDY, "INVALID_REQUEST", "prompt"),
        ([1 << 30], GREEDY, "INVALID_REQUEST", "prompt"),
        (PROMPT, common_pb2.SamplingParams(max_tokens=1 << 30), "INVALID_REQUEST", "max_tokens"),
        (PROMPT, common_pb2.SamplingParams(max_tokens=4, temperature=-1), "INVALID_REQUEST", "temperature"),
        (
            PROMPT,
            common_pb2.SamplingParams(max_tokens=4, presence_penalty=1),
            "UNSUPPORTED",
            "sampling.presence_penalty",
        ),
        (PROMPT, common_pb2.SamplingParams(max_tokens=4, bad_words=["x"]), "UNSUPPORTED", "sampling.bad_words"),
    ],
)
async def test_a_start_that_cannot_be_is_refused_alone(
    gateway: TestGateway,
    tiny_plain: Plain,
    prompt: list[int],
    sampling: common_pb2.SamplingParams,
    reason: str,
    field: str,
) -> None:
    await gateway.start("good", PROMPT, GREEDY)
    await gateway.start("bad", prompt, sampling)
    await gateway.finished(["good", "bad"])
    refused = gateway.last["bad"]
    assert (refused.finish_reason, refused.error.reason) == (common_pb2.FINISH_REASON_ERROR, reason)
    assert refused.error.metadata["field"].endswith(field)
    assert gateway.tokens["good"] == tiny_plain.tokens(PROMPT, sampling_from(GREEDY))


@pytest.mark.parametrize(
    ("wrong", "field", "value"),
    [
        ({"session_id": ""}, "session_id", ""),
        ({"session_id": "a b"}, "session_id", "a b"),
        ({"session_id": "x" * 129}, "session_id", "x" * 129),
        ({"epoch": 0}, "epoch", 0),
        ({"attempt": 0}, "attempt", 0),
        ({"speculation": common_pb2.SpeculationParams(budget=10**6)}, "speculation.budget", 10**6),
        ({"digest": bytes(16)}, "digest", "00" * 16),
        ({"digest": b"x"}, "digest", "78"),
    ],
)
async def test_a_start_that_was_taken_in_silence_is_refused_by_name(
    gateway: TestGateway, wrong: dict[str, Any], field: str, value: object
) -> None:
    """An empty id became a session of that name, a budget was cut, and nobody looked at a digest."""
    given = {"session_id": "s", "epoch": 1, "attempt": 1, "prompt": PROMPT, "sampling": GREEDY, **wrong}
    await gateway.write(verifier_pb2.AttachRequest(start=[verifier_pb2.StartSequence(**given)]))
    await gateway.finished([given["session_id"]])
    error = gateway.last[given["session_id"]].error
    assert (error.reason, error.metadata["field"]) == ("INVALID_REQUEST", field)
    assert error.metadata["value"] == repr(value)[:77] + "..." if len(repr(value)) > 80 else repr(value)
    assert error.metadata["limit"]


async def test_a_session_that_goes_on_here_keeps_going_whatever_budget_it_began_with(
    gateway: TestGateway, tiny_plain: Plain
) -> None:
    """It was admitted under another group's limit; no token depends on it."""
    full = tiny_plain.tokens(PROMPT, sampling_from(GREEDY))
    gateway.tokens["moved"] = full[:5]
    await gateway.start("moved", PROMPT, GREEDY, attempt=2, committed=full[:5], budget=1000)
    await gateway.finished(["moved"])
    assert gateway.tokens["moved"] == full


async def test_the_last_update_says_where_the_sequences_time_went(gateway: TestGateway) -> None:
    """SequenceUpdate.timings was never set, so a session's end never had any."""
    await gateway.start("timed", PROMPT, GREEDY)
    await gateway.finished(["timed"])
    updates = [update for message in gateway.messages for update in message.updates]
    assert [update.HasField("timings") for update in updates] == [True, *[False] * (len(updates) - 2), True]
    spent, steps = gateway.last["timed"].timings, [message.timings for message in gateway.messages]
    assert spent.verify_ns == sum(step.verify_ns for step in steps[1:])
    assert spent.accept_ns == sum(step.accept_ns for step in steps[1:])
    assert spent.prefill_ns == steps[0].total_ns
    assert spent.step_end_unix_ns == steps[-1].step_end_unix_ns
    parts = spent.queue_ns + spent.prefill_ns + spent.draft_ns + spent.verify_ns + spent.accept_ns
    assert 0 < spent.queue_ns < parts <= spent.total_ns


async def test_a_full_queue_refuses_with_a_time_to_come_back(gateway: TestGateway) -> None:
    names = [f"session-{n}" for n in range(9)]
    for name in names:
        await gateway.start(name, PROMPT, ENDLESS)
    await soon(lambda: sum(1 for last in gateway.last.values() if last.HasField("error")) >= 3)
    refused = [name for name, last in gateway.last.items() if last.HasField("error")]
    for name in refused:
        assert gateway.last[name].error.reason == "OVERLOADED"
        assert gateway.last[name].error.retry_after_ms > 0
    await until(gateway, lambda load: load.running == 4 and load.running + load.waiting == len(names) - len(refused))
    await gateway.cancel(*[name for name in names if name not in refused])
    await gateway.finished(names)


async def test_a_lower_attempt_is_fenced_with_the_pair_that_is_held(gateway: TestGateway) -> None:
    await gateway.start("session", PROMPT, ENDLESS, attempt=3)
    await gateway.seen("session", 2)
    await gateway.start("session", PROMPT, ENDLESS, attempt=2)
    await soon(lambda: any(update.HasField("error") for message in gateway.messages for update in message.updates))
    (error,) = [u.error for message in gateway.messages for u in message.updates if u.HasField("error")]
    assert (error.reason, error.held_epoch, error.held_attempt) == ("FENCED", 1, 3)
    at = len(gateway.tokens["session"])
    await gateway.seen("session", at + 2)  # the one that is held goes on
    await gateway.cancel("session", attempt=3)
    await gateway.finished(["session"])


async def test_sequences_of_a_stream_that_breaks_are_cancelled_after_a_short_time(
    verifier: Child, gateway: TestGateway
) -> None:
    async with TestGateway(address(verifier)) as leaving:
        for n in range(3):
            await leaving.start(f"orphan-{n}", PROMPT, ENDLESS)
        await leaving.seen("orphan-2", 3)
    assert (await gateway.load()).held_sequences > 0
    await idle(gateway)


async def test_orphans_may_be_attached_again_under_a_higher_attempt(
    verifier: Child, gateway: TestGateway, tiny_plain: Plain
) -> None:
    sampling = common_pb2.SamplingParams(temperature=1, seed=1, max_tokens=50, ignore_eos=True)
    async with TestGateway(address(verifier)) as leaving:
        await leaving.start("session", PROMPT, sampling)
        await leaving.seen("session", 10)
        committed = leaving.tokens["session"][:10]
    gateway.tokens["session"] = list(committed)
    await gateway.start("session", PROMPT, sampling, attempt=2, committed=committed)
    await gateway.finished(["session"])
    assert gateway.tokens["session"] == tiny_plain.tokens(PROMPT, sampling_from(sampling))


async def test_a_gateway_that_acknowledges_nothing_is_held_and_goes_on_when_it_does(verifier: Child) -> None:
    """So many tokens ahead of the store and no more: one that is away must not be buried."""
    async with TestGateway(address(verifier), acknowledge=False) as slow:
        await slow.start("held", PROMPT, ENDLESS)
        await slow.seen("held", RUN_AHEAD)
        await asyncio.sleep(0.2)  # twice what a step takes on a slow machine; there must be none
        assert len(slow.tokens["held"]) == RUN_AHEAD
        await slow.commit("held", 40)
        await slow.seen("held", RUN_AHEAD + 40)
        await slow.cancel("held")
        await slow.finished(["held"])
        await idle(slow)


async def test_the_first_message_names_the_gateway(verifier: Child) -> None:
    async with grpc.aio.insecure_channel(address(verifier)) as channel:
        stub = TestGateway(address(verifier)).stub
        call = stub.Attach()
        await call.write(verifier_pb2.AttachRequest(gateway=b"short"))
        assert len((await call.read()).incarnation) == 16
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        await channel.close()


async def test_an_idle_verifier_runs_no_step_and_uses_no_core(verifier: Child, gateway: TestGateway) -> None:
    process = psutil.Process(verifier.pid)
    await idle(gateway)
    steps, cpu = (await gateway.load()).steps, process.cpu_times()
    await asyncio.sleep(0.5)
    spent = process.cpu_times()
    assert (await gateway.load()).steps == steps
    assert spent.user + spent.system - cpu.user - cpu.system < 0.1


async def test_sigterm_finishes_what_runs_refuses_what_comes_and_exits_cleanly(tiny: Models, tiny_plain: Plain) -> None:
    with service("verifier", model_path=tiny.target, model_name="drained", grace=30) as child:
        sampling = common_pb2.SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)  # outlasts the signal
        async with TestGateway(address(child)) as gateway:
            await gateway.start("running", PROMPT, sampling)
            await gateway.seen("running", 2)
            async with grpc.aio.insecure_channel(address(child)) as channel:
                health = health_pb2_grpc.HealthStub(channel)
                assert (await health.Check(health_pb2.HealthCheckRequest())).status == 1
                watch = health.Watch(health_pb2.HealthCheckRequest())
                assert (await watch.read()).status == 1
                stopping = asyncio.create_task(asyncio.to_thread(child.stop, 40))
                assert (await watch.read()).status == 2, "NOT_SERVING comes first"
            await gateway.start("refused", PROMPT, sampling)
            await gateway.finished(["running", "refused"])
            assert gateway.last["refused"].error.reason == "UNAVAILABLE"
            assert gateway.tokens["running"] == tiny_plain.tokens(PROMPT, sampling_from(sampling))
            await asyncio.wait_for(gateway.ended.wait(), 10)
        assert await stopping == 0


async def test_drain_waits_for_the_running_and_takes_no_more(tiny: Models) -> None:
    with service("verifier", model_path=tiny.target, model_name="drained") as child:
        async with TestGateway(address(child)) as gateway:
            await gateway.start("running", PROMPT, ENDLESS)
            await gateway.seen("running", 2)
            short = await gateway.stub.Drain(verifier_pb2.DrainRequest(timeout_ms=50))
            assert short.running == 1
            assert (await gateway.load()).draining
            waiting = asyncio.ensure_future(gateway.stub.Drain(verifier_pb2.DrainRequest(timeout_ms=30_000)))
            await gateway.cancel("running")
            assert (await waiting).running == 0
