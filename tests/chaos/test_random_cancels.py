"""Clients that leave at any moment: nothing of them stays behind in any process."""

from __future__ import annotations

import asyncio
import random

from hedgerow.cli.supervisor import Stack
from hedgerow.client import AsyncClient, FinishReason
from hedgerow.errors import Cancelled, HedgerowError, NotFound
from tests.polling import soon
from tests.stack import assert_idle, gateway_holds, verifier_load

CANCELS = 200
AT_ONCE = 24
SPARE = 3  # tasks that come and go: a call that is just being answered, a renewal


async def leave(client: AsyncClient, draw: random.Random, ended: list[str]) -> None:
    """One client that leaves in one of the ways there are, before or after the first token."""
    way = draw.choice(["close", "drop", "call", "task"])
    wait = draw.choice([0, 0, 0, 1, 3, 10])
    stream = client.generate(f"# {draw.random()}\n", max_tokens=2000, ignore_eos=True, budget=draw.choice([0, 8]))
    try:
        if way == "task":
            async with asyncio.timeout(draw.uniform(0, 0.2)):
                await stream.result()
        async for _ in stream:
            wait -= 1
            if wait <= 0:
                break
        if way == "close":
            await stream.aclose()
        elif way == "call":
            await client.cancel(stream.session_id)
            ended += [stream.session_id]
            async for _ in stream:
                pass
            assert stream.finished is not None
            assert stream.finished.reason == FinishReason.CANCELLED
    except (TimeoutError, Cancelled, NotFound):
        pass
    finally:
        del stream  # "drop": nobody reads any more, and nobody says so


async def test_200_random_cancels_leave_nothing_behind(stack: Stack, client: AsyncClient) -> None:
    """grpc/grpc#43462 in short: a call that nobody reads runs for ever unless somebody cancels it."""
    await client.complete("warm", max_tokens=2)
    tasks = gateway_holds(stack)["tasks"]
    before = verifier_load(stack)
    assert before.free_pages == before.total_pages
    draw, ended = random.Random(20_261_129), list[str]()
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(seed: int) -> None:
        async with gate:
            await leave(client, random.Random(seed), ended)

    await asyncio.gather(*(one(draw.getrandbits(32)) for _ in range(CANCELS)))
    await asyncio.to_thread(assert_idle, stack, tasks + SPARE)
    for session_id in ended:
        assert (await client.get_session(session_id)).finish_reason == FinishReason.CANCELLED


async def test_a_cancel_takes_effect_within_a_step(stack: Stack, client: AsyncClient, idle: None) -> None:
    stream = client.generate("# one", max_tokens=3000, ignore_eos=True, budget=0)
    async for _ in stream:
        break
    await stream.aclose()
    await soon(lambda: verifier_load(stack).held_sequences == 0)
    after = verifier_load(stack)
    assert after.free_pages == after.total_pages
    await asyncio.sleep(0)
    assert verifier_load(stack).steps == after.steps, "a step ran for a sequence that was cancelled"


async def test_a_client_whose_connection_is_cut_is_noticed(stack: Stack, idle: None) -> None:
    client = AsyncClient(stack.address("gateway"))
    stream = client.generate("# one", max_tokens=3000, ignore_eos=True)
    async for _ in stream:
        break
    await client.aclose()
    await soon(lambda: verifier_load(stack).held_sequences == 0)


async def test_a_deadline_ends_a_session_with_its_own_reason(client: AsyncClient, idle: None) -> None:
    try:
        result = await client.complete("# one", max_tokens=3000, ignore_eos=True, deadline=0.3)
    except HedgerowError as error:  # pragma: no cover  says what came instead
        raise AssertionError(f"a deadline is an end, not an error: {error!r}") from error
    assert result.finish_reason == FinishReason.DEADLINE
    assert len(result.tokens) < 3000
