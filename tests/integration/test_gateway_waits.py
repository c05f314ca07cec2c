"""A single verifier group restarts: new calls wait for it, with their deadlines, and the gateway stays ready.

The clients here never try again by themselves: what they get is the gateway's patience alone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from hedgerow.cli.child import Backoff
from hedgerow.cli.supervisor import Stack, StackConfig
from hedgerow.client import AsyncClient, Result, Retry
from hedgerow.errors import DeadlineExceeded, InvalidRequest, Overloaded, Unavailable
from tests.polling import eventually
from tests.stack import ROOT, Models, assert_idle, gateway_holds

PROMPT, TOKENS = (3, 1, 4, 1, 5), 40
AWAY = 4.0  # seconds until the supervisor starts what was killed
MOST = 6


@pytest.fixture
def one_group(
    tiny: Models, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Stack]:
    """A gateway before one verifier; the parameter is verifier_wait_seconds."""
    settings = {"gateway": {"VERIFIER_WAIT_SECONDS": f"{request.param}", "MAX_SESSIONS": f"{MOST}"}}
    config = StackConfig(
        ROOT, tiny.target, tmp_path_factory.mktemp("one"), drafter=tiny.drafter, settings=settings,
        backoff=Backoff(first=AWAY, most=AWAY),
    )  # fmt: skip
    with Stack(config) as running:
        yield running


patient = pytest.mark.parametrize("one_group", [60], indirect=True)
hurried = pytest.mark.parametrize("one_group", [1], indirect=True)


def serving(stack: Stack) -> bool:
    with grpc.insecure_channel(stack.admin_address("gateway")) as channel:
        told = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
        return bool(told.status == health_pb2.HealthCheckResponse.SERVING)


async def gone(stack: Stack, client: AsyncClient) -> None:
    """The verifier is killed, and the gateway knows."""
    await asyncio.to_thread(stack.kill, "verifier")
    async with asyncio.timeout(10):
        while (await client.models())[0].ready:
            pass


async def waiting_calls(stack: Stack, count: int) -> None:
    """So many calls wait at the gateway. Asked in a thread: the calls are this loop's."""
    await asyncio.to_thread(eventually, lambda: gateway_holds(stack)["waiting"] == count, 10, f"{count} waiting calls")


def ask(client: AsyncClient, seed: int, **more: object) -> asyncio.Task[Result]:
    options = {"max_tokens": TOKENS, "ignore_eos": True, "seed": seed, "temperature": 0.8, **more}
    return asyncio.create_task(client.generate(PROMPT, **options).result())  # type: ignore[arg-type]


@patient
async def test_new_calls_wait_for_the_only_group_and_get_the_same_tokens(one_group: Stack) -> None:
    async with AsyncClient(one_group.address("gateway"), retry=Retry.never()) as client:
        undisturbed = await asyncio.gather(*(ask(client, seed) for seed in range(MOST)))
        await gone(one_group, client)
        waiting = [ask(client, seed) for seed in range(MOST)]
        await waiting_calls(one_group, MOST)
        assert serving(one_group), "a gateway that is not ready would be left by everybody"
        assert await client.tokenize("def"), "what needs no verifier goes on"
        with pytest.raises(Overloaded):
            await ask(client, 99)
        with pytest.raises(InvalidRequest):  # nothing to wait for
            await client.generate([1] * (1 << 20), max_tokens=1).result()
        results = await asyncio.gather(*waiting)
        assert [result.tokens for result in results] == [result.tokens for result in undisturbed]
        assert len({result.tokens for result in results}) > 1, "seeds matter"
    await asyncio.to_thread(assert_idle, one_group)


@patient
async def test_a_call_that_waits_ends_with_its_deadline_or_its_client(one_group: Stack) -> None:
    async with AsyncClient(one_group.address("gateway"), retry=Retry.never()) as client:
        await ask(client, 0)
        await gone(one_group, client)
        left = ask(client, 1)
        await waiting_calls(one_group, 1)
        began = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            await ask(client, 2, deadline=0.5)
        assert time.monotonic() - began < 10
        left.cancel()
        await waiting_calls(one_group, 0)
    await asyncio.to_thread(one_group.wait_ready, "verifier")
    await asyncio.to_thread(assert_idle, one_group)


@hurried
async def test_beyond_the_bound_calls_are_refused_with_a_hint_and_the_gateway_is_not_ready(one_group: Stack) -> None:
    async with AsyncClient(one_group.address("gateway"), retry=Retry.never()) as client:
        await ask(client, 0)
        began = time.monotonic()
        await gone(one_group, client)
        with pytest.raises(Unavailable, match="none has taken sessions for 1 s") as refused:
            await ask(client, 1)
        assert time.monotonic() - began > 0.9
        assert refused.value.retry_after
        await asyncio.to_thread(eventually, lambda: not serving(one_group), 5)
        took = []
        while not took or (min(took) > 0.9 and len(took) < 3):
            began = time.monotonic()
            with pytest.raises(Unavailable):
                await ask(client, 1)
            took.append(time.monotonic() - began)
        assert min(took) < 0.9, "another gateway may have what this one lacks"
        await asyncio.to_thread(eventually, lambda: serving(one_group), 30)
        await ask(client, 1)
