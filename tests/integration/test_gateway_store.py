"""A store that stalls or dies under running streams: nothing uncommitted is released, and the streams go on."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import pytest

from hedgerow import digest
from hedgerow.cli.supervisor import Stack
from hedgerow.client import AsyncClient, Options, Retry
from hedgerow.errors import Unavailable
from tests.polling import soon
from tests.stack import Models, another_gateway, verifier_load

PROMPT = "class Queue:\n    "
TOKENS = 400  # far more than come while a process is killed
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


async def test_a_session_that_its_store_failed_is_given_up_and_goes_on_for_who_comes(
    stack: Stack, impatient_gateway: str, client: AsyncClient
) -> None:
    """It was recorded as running for an hour, cancels were for nobody, and its key "ran under another gateway"."""
    options: Options = {**OPTIONS, "max_tokens": 1500, "seed": 5}
    expected = await client.complete(PROMPT, **options)
    async with AsyncClient(impatient_gateway, retry=Retry.never()) as impatient:
        options["idempotency_key"] = f"undead-{os.getpid()}"
        stream = impatient.generate(PROMPT, **options)
        await anext(stream)
        stack.pause("redis")
        try:
            with pytest.raises(Unavailable, match="kvstore"):
                await stream.result()
        finally:
            stack.resume("redis")
    async with AsyncClient(impatient_gateway, retry=Retry(attempts=20)) as patient:
        result = await patient.complete(PROMPT, **options)
    assert (result.session_id, result.tokens) == (stream.session_id, expected.tokens)
    assert result.text == expected.text


async def test_a_verifier_that_dies_under_a_stream_is_found_again_and_the_stream_goes_on(
    stack: Stack, client: AsyncClient
) -> None:
    options: Options = {**OPTIONS, "max_tokens": 600, "seed": 6}
    expected = await client.complete(PROMPT, **options)
    stream = client.generate(PROMPT, **options)
    begun = list((await anext(stream)).tokens)
    stack.kill("verifier")
    async with AsyncClient(stack.address("gateway"), retry=Retry.never()) as other:
        waiting = asyncio.create_task(other.complete(PROMPT, **options))
        async with asyncio.timeout(10):
            while (await other.models())[0].ready:  # until the gateway has heard of it; a start takes a second
                pass
        rest = await stream.result()
        assert begun + list(rest.tokens) == list(expected.tokens)
        assert list((await waiting).tokens) == list(expected.tokens)
