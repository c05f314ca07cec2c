"""A store that stalls or dies under running streams: nothing uncommitted is released, and the streams go on."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator

import pytest

from hedgerow import digest
from hedgerow.cli.supervisor import Stack
from hedgerow.client import AsyncClient, Options, Retry
from hedgerow.errors import Unavailable
from tests.polling import soon
from tests.stack import Models, another_gateway, verifier_load

PROMPT = "class Queue:\n    "
TOKENS = 48
OPTIONS: Options = {"max_tokens": TOKENS, "ignore_eos": True, "temperature": 1.0, "budget": 0}

pytestmark = pytest.mark.usefixtures("idle")


@pytest.mark.parametrize("fault", ["pause", "kill"])
async def test_streams_wait_for_their_store_and_lose_nothing(stack: Stack, client: AsyncClient, fault: str) -> None:
    """While it is away the verifier runs on, so several steps of every session are appended at once afterwards."""
    streams = [client.generate(PROMPT, seed=seed, **OPTIONS) for seed in range(3)]
    got = [list((await anext(stream)).tokens) for stream in streams]
    if fault == "pause":
        stack.pause("kvstore")
    else:
        stack.kill("kvstore")
    ahead = verifier_load(stack).tokens
    waiting = [asyncio.create_task(stream.result()) for stream in streams]
    await soon(lambda: verifier_load(stack).tokens > ahead + 12)
    stack.resume("kvstore") if fault == "pause" else stack.wait_ready("kvstore")
    for seed, (stream, begun, rest) in enumerate(zip(streams, got, await asyncio.gather(*waiting), strict=True)):
        tokens = begun + list(rest.tokens)
        assert len(tokens) == TOKENS
        first = digest.first(stream.session_id, await client.tokenize(PROMPT))
        assert stream.finished is not None
        assert stream.finished.digest == digest.extend(first, tokens)
        there = await client.get_session(stream.session_id)
        assert (there.digest, there.token_count) == (stream.finished.digest, TOKENS)
        if seed == 0:
            assert list((await client.complete(PROMPT, seed=seed, **OPTIONS)).tokens) == tokens


@pytest.fixture
def impatient_gateway(stack: Stack, models: Models) -> Iterator[str]:
    """A second gateway, which gives a store up after one second."""
    with another_gateway(stack, models, store_patience=1) as address:
        yield address


async def test_a_session_that_its_store_failed_is_ended_there_and_gives_its_key_no_riddle(
    stack: Stack, impatient_gateway: str
) -> None:
    """It was recorded as running for an hour, cancels were for nobody, and its key "ran under another gateway"."""
    async with AsyncClient(impatient_gateway, retry=Retry.never()) as client:
        options: Options = {**OPTIONS, "max_tokens": 3000, "idempotency_key": f"undead-{os.getpid()}"}
        stream = client.generate(PROMPT, **options)
        await anext(stream)
        stack.pause("redis")
        try:
            with pytest.raises(Unavailable, match="kvstore"):
                await stream.result()
        finally:
            stack.resume("redis")

        end = time.monotonic() + 15
        while (await client.get_session(stream.session_id)).finish_reason != "error":
            assert time.monotonic() < end, "it stays as running"
            await asyncio.sleep(0.05)
        with pytest.raises(Unavailable, match="use another idempotency key"):
            await client.complete(PROMPT, **options)
        assert not await client.cancel(stream.session_id)


async def test_a_verifier_that_dies_ends_its_streams_with_a_hint_and_is_found_again(stack: Stack) -> None:
    async with AsyncClient(stack.address("gateway"), retry=Retry.never()) as client:
        stream = client.generate(PROMPT, **{**OPTIONS, "max_tokens": 3000})
        await anext(stream)
        stack.kill("verifier")
        with pytest.raises(Unavailable, match="verifier") as raised:
            await stream.result()
        assert raised.value.retry_after
        assert (await client.get_session(stream.session_id)).finish_reason == "error"
        with pytest.raises(Unavailable, match="verifier"):
            await client.complete(PROMPT)
        assert not (await client.models())[0].ready
    stack.wait_ready("verifier")
    async with AsyncClient(stack.address("gateway"), retry=Retry(attempts=10)) as client:
        assert len((await client.complete(PROMPT, max_tokens=3, ignore_eos=True)).tokens) == 3
