"""A caller's key meets a verifier without a place, and gives the undisturbed tokens when there is one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from hedgerow.cli.supervisor import Stack, StackConfig
from hedgerow.client import AsyncClient, FinishReason, Options, Result, Retry
from hedgerow.errors import Overloaded
from tests.stack import ROOT, Models, assert_idle

PROMPT = "def area(width, height):\n    "
ASKED: Options = {"max_tokens": 12, "ignore_eos": True, "seed": 5, "temperature": 0.9}


@pytest.fixture(scope="module")
def narrow(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One sequence at a time, and none waits."""
    settings = {"verifier": {"MAX_SEQUENCES": "1", "MAX_WAITING": "0"}}
    config = StackConfig(ROOT, models.target, tmp_path_factory.mktemp("narrow"), settings=settings)
    with Stack(config) as running:
        yield running


async def test_a_refused_key_is_usable_when_there_is_room(narrow: Stack) -> None:
    async with AsyncClient(narrow.address("gateway"), retry=Retry.never()) as client:
        whole = await client.complete(PROMPT, **ASKED)
        running = client.generate(PROMPT, max_tokens=1500, ignore_eos=True)
        await anext(running)
        for _ in range(2):
            refused = client.generate(PROMPT, idempotency_key="mine", **ASKED)
            with pytest.raises(Overloaded):
                await refused.result()
        await running.aclose()
        result = await until_there_is_room(client)
        again = await client.complete(PROMPT, idempotency_key="mine", **ASKED)
        assert result.tokens == whole.tokens
        assert (again.tokens, again.session_id) == (result.tokens, result.session_id)
    await asyncio.to_thread(assert_idle, narrow)


async def until_there_is_room(client: AsyncClient) -> Result:
    """The place is free a step after its session has ended."""
    async with asyncio.timeout(10):
        while True:
            try:
                return await client.complete(PROMPT, idempotency_key="mine", **ASKED)
            except Overloaded:
                await asyncio.sleep(0.05)


async def test_the_sdk_waits_for_a_place_under_the_callers_key(narrow: Stack) -> None:
    async with AsyncClient(narrow.address("gateway"), retry=Retry(first_delay=0.05, last_delay=0.2)) as client:
        running = client.generate(PROMPT, max_tokens=1500, ignore_eos=True)
        await anext(running)
        waits = asyncio.create_task(client.complete(PROMPT, idempotency_key="patient", **ASKED))
        async with asyncio.timeout(10):
            while not any(each.finish_reason is FinishReason.ERROR for each in await client.stored_sessions()):
                pass
        await running.aclose()
        result = await waits
        assert len(result.tokens) == 12
    await asyncio.to_thread(assert_idle, narrow)
