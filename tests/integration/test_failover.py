"""Two real verifiers, and one of them killed, stopped or drained under running streams: the client notices nothing.

The client speaks the plain contract over one call that it never opens again: what it gets is the gateway's work alone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import grpc
import grpc.aio
import pytest

from hedgerow.cli.child import Backoff
from hedgerow.cli.supervisor import Stack, StackConfig
from hedgerow.client._convert import sampling
from hedgerow.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc, verifier_pb2, verifier_pb2_grpc
from tests.polling import eventually, soon
from tests.stack import ROOT, Models, Plain, engine_sampling

pytestmark = pytest.mark.timeout(300)  # seven processes start before the first test
PROMPT = tuple(range(40, 90))
TOKENS = 320
RECOVERY = 4.5  # seconds for a kill with a standby present; what was killed is away for longer
KINDS = pytest.mark.parametrize(
    "temperature", [pytest.param(0.0, id="greedy", marks=pytest.mark.long), pytest.param(0.9, id="seeded")]
)


@pytest.fixture(scope="module")
def pair(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack with two verifiers. A killed one comes back after some seconds: what goes on at once is on the other."""
    config = StackConfig(
        ROOT, models.target, tmp_path_factory.mktemp("pair"), verifiers=2, kvstores=2,
        backoff=Backoff(first=5.0, most=5.0),
        settings={"verifier": {"RUN_AHEAD": "64"}},
    )  # fmt: skip
    with Stack(config) as running:
        yield running


@dataclass
class Read:
    """What one client has got, and when."""

    temperature: float
    seed: int
    deadline_ms: int = 0
    tokens: list[int] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)  # seconds between two messages
    started: gateway_pb2.SessionStarted | None = None
    finished: gateway_pb2.SessionFinished | None = None

    async def run(self, address: str, tokens: int = TOKENS) -> None:
        request = gateway_pb2.GenerateRequest(
            token_ids=common_pb2.TokenIds(ids=PROMPT),
            sampling=common_pb2.SamplingParams(
                max_tokens=tokens, ignore_eos=True, temperature=self.temperature, seed=self.seed
            ),
            speculation=common_pb2.SpeculationParams(budget=0),
            deadline_ms=self.deadline_ms,
        )
        async with grpc.aio.insecure_channel(address) as channel:
            before = time.monotonic()
            async for message in gateway_pb2_grpc.GatewayServiceStub(channel).Generate(request):
                now = time.monotonic()
                self.pauses.append(now - before)
                before = now
                event = message.event
                if event.HasField("chunk"):
                    assert event.chunk.token_offset == len(self.tokens), "lost or twice"
                    self.tokens += event.chunk.tokens
                elif event.HasField("started"):
                    self.started = event.started
                else:
                    self.finished = event.finished

    def expected(self, plain: Plain) -> list[int]:
        """What nobody disturbed."""
        assert self.started is not None
        return plain.tokens(PROMPT, engine_sampling(sampling(self.started.sampling)))


async def read_several(
    address: str, temperature: float, count: int, tokens: int = TOKENS
) -> tuple[list[Read], list[asyncio.Task[None]]]:
    """Streams under way, each with some tokens."""
    reads = [Read(temperature, seed) for seed in range(1, count + 1)]
    running = [asyncio.create_task(read.run(address, tokens)) for read in reads]
    await soon(lambda: all(len(read.tokens) > 30 for read in reads) or any(task.done() for task in running), 30)
    return reads, running


def held(stack: Stack, name: str) -> int:
    """Sequences that a verifier holds."""
    with grpc.insecure_channel(stack.address(name)) as channel:
        stub = verifier_pb2_grpc.VerifierServiceStub(channel)
        load = stub.GetLoad(verifier_pb2.GetLoadRequest(), timeout=10, wait_for_ready=True)
        return int(load.held_sequences)


def check(reads: list[Read], plain: Plain) -> None:
    for read in reads:
        assert read.finished is not None
        assert read.finished.reason == common_pb2.FINISH_REASON_LENGTH
        assert read.tokens == read.expected(plain)


def attached(stack: Stack, name: str) -> bool:
    """Whether the gateway says so."""
    said = [line for line in stack.logs("gateway") if stack.address(name) in line]
    return bool(said) and "event=attached" in said[-1]


async def ready(stack: Stack) -> None:
    """Both verifiers are there, attached, and hold nothing."""
    for name in stack.names("verifier"):
        await asyncio.to_thread(stack.wait_ready, name)
        await soon(lambda name=name: attached(stack, name), 20)  # type: ignore[misc]
        await asyncio.to_thread(eventually, lambda name=name: held(stack, name) == 0, 20)  # type: ignore[misc]


@KINDS
async def test_a_verifier_that_is_killed_in_mid_stream_costs_no_token(
    pair: Stack, plain: Plain, temperature: float
) -> None:
    await ready(pair)
    reads, running = await read_several(pair.address("gateway"), temperature, 4, 800)
    both = [held(pair, name) for name in ("verifier", "verifier-2")]
    assert min(both) > 0, f"the sessions are spread over both: {both}"
    for read in reads:
        read.pauses.clear()
    pair.kill("verifier-2")
    await asyncio.gather(*running)
    longest = max(max(read.pauses) for read in reads)
    assert all(len(read.tokens) == 800 for read in reads)
    print(f"recovery: {longest:.2f} s for 4 streams, T={temperature}")
    check(reads, plain)
    assert longest < RECOVERY


@KINDS
async def test_a_verifier_that_is_stopped_and_wakes_up_again_changes_no_token(
    pair: Stack, plain: Plain, temperature: float
) -> None:
    """Its connection stays open: only its silence tells. What it sends afterwards is of an attempt that is over."""
    await ready(pair)
    reads, running = await read_several(pair.address("gateway"), temperature, 2)
    for read in reads:
        read.pauses.clear()
    pair.pause("verifier")
    try:
        at_stop = [len(read.tokens) for read in reads]
        await soon(lambda: all(len(r.tokens) > n + 60 for r, n in zip(reads, at_stop, strict=True)), 30)
    finally:
        pair.resume("verifier")
    await asyncio.gather(*running)
    print(f"longest pause: {max(max(read.pauses) for read in reads):.2f} s, T={temperature}")
    check(reads, plain)


async def test_a_verifier_that_drains_finishes_what_it_has_and_new_sessions_go_elsewhere(
    pair: Stack, plain: Plain
) -> None:
    await ready(pair)
    reads, running = await read_several(pair.address("gateway"), 0.9, 2)
    starts = pair.starts("verifier")
    pair.terminate("verifier")
    more = Read(0.9, 7)
    await more.run(pair.address("gateway"), 64)
    await asyncio.gather(*running)
    check([*reads, more], plain)
    await soon(lambda: pair.starts("verifier") > starts, 30)


async def test_a_single_verifier_that_is_killed_is_waited_for(pair: Stack, plain: Plain) -> None:
    await ready(pair)
    reads, running = await read_several(pair.address("gateway"), 0.9, 2)
    pair.kill("verifier")
    pair.kill("verifier-2")
    await asyncio.gather(*running)
    check(reads, plain)


async def test_a_deadline_passes_without_a_verifier(pair: Stack, plain: Plain) -> None:
    await ready(pair)
    read = Read(0.9, 3, deadline_ms=3000)
    began = time.monotonic()
    running = asyncio.create_task(read.run(pair.address("gateway")))
    await soon(lambda: len(read.tokens) > 5)
    for name in pair.names("verifier"):
        pair.kill(name)
    await running
    assert read.finished is not None
    assert read.finished.reason == common_pb2.FINISH_REASON_DEADLINE
    assert 2.9 < time.monotonic() - began < 10
    assert read.tokens == read.expected(plain)[: len(read.tokens)]


def kvstore_in_use(stack: Stack) -> str:
    """As the gateway's log has it."""
    said = [line for line in stack.logs("gateway") if "a kvstore does not answer" in line]
    return next(
        (name for name in stack.names("kvstore") if said and f"next={stack.address(name)}" in said[-1]), "kvstore"
    )


@pytest.mark.parametrize("fault", ["kill", "pause"])
async def test_a_kvstore_that_is_gone_or_hangs_is_left_for_the_other_one(pair: Stack, plain: Plain, fault: str) -> None:
    await ready(pair)
    for name in pair.names("kvstore"):
        await asyncio.to_thread(pair.wait_ready, name)
    reads, running = await read_several(pair.address("gateway"), 0.9, 2)
    for read in reads:
        read.pauses.clear()
    name = kvstore_in_use(pair)
    getattr(pair, fault)(name)
    try:
        await asyncio.gather(*running)
    finally:
        if fault == "pause":
            pair.resume(name)
    longest = max(max(read.pauses) for read in reads)
    print(f"longest pause: {longest:.2f} s after a {fault}")
    assert longest < {"kill": 4.5, "pause": 20.0}[fault]
    assert kvstore_in_use(pair) != name
    check(reads, plain)


async def test_a_deadline_passes_while_redis_hangs(pair: Stack, plain: Plain) -> None:
    """Nothing can be recorded, and nobody waits for it beyond the deadline and a second."""
    await ready(pair)
    read = Read(0.9, 4, deadline_ms=3000)
    began = time.monotonic()
    running = asyncio.create_task(read.run(pair.address("gateway")))
    await soon(lambda: len(read.tokens) > 5)
    pair.pause("redis")
    try:
        with pytest.raises(grpc.aio.AioRpcError) as broken:
            await running
        assert broken.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert 2.9 < time.monotonic() - began < 10
    finally:
        pair.resume("redis")
    assert read.tokens == read.expected(plain)[: len(read.tokens)]
