"""Processes that are killed under running streams."""

from __future__ import annotations

import asyncio

from hedgerow.cli.supervisor import Stack
from hedgerow.client import AsyncClient, Options, Stream
from hedgerow.errors import Unavailable
from tests.stack import Plain, engine_sampling, verifier_load

PROMPT = "class Queue:\n    "
LONG: Options = {
    "max_tokens": 600,
    "ignore_eos": True,
    "budget": 8,
    "temperature": 0.9,
    "seed": 17,
    "return_steps": True,
}


TRIES = 8  # a text may be done before what is done to its services begins


async def read(stream: Stream, tokens: list[int], steps: list[int], upto: int = 1 << 30) -> None:
    """Reads until `tokens` has `upto`; `steps` gets the nodes of each step's tree."""
    if len(tokens) >= upto:
        return
    async for chunk in stream:
        assert chunk.token_offset == len(tokens), "tokens lost or twice"
        tokens += chunk.tokens
        steps += [step.tree_nodes for step in chunk.steps]
        if len(tokens) >= upto:
            return


async def expected(client: AsyncClient, plain: Plain, stream: Stream) -> list[int]:
    assert stream.started is not None
    return plain.tokens(await client.tokenize(PROMPT), engine_sampling(stream.started.sampling))


async def test_a_drafter_that_is_killed_and_comes_back_changes_no_token(
    stack: Stack, client: AsyncClient, plain: Plain, idle: None
) -> None:
    missed = verifier_load(stack).missed_drafts
    for _ in range(TRIES):
        await asyncio.to_thread(stack.wait_ready, "drafter")
        await drafted_again(client)
        stream, tokens, nodes = client.generate(PROMPT, **LONG), list[int](), list[int]()
        await read(stream, tokens, nodes, upto=60)
        assert any(nodes[2:]), "nothing was drafted before the kill"
        stack.kill("drafter")
        at_kill = len(nodes)
        await read(stream, tokens, nodes)
        assert tokens == await expected(client, plain, stream)
        if 0 in nodes[at_kill:-2]:  # the last ones have no room for a tree
            break
    else:
        raise AssertionError("steps without a drafter decode plainly")
    assert verifier_load(stack).missed_drafts > missed
    await asyncio.to_thread(stack.wait_ready, "drafter")
    await drafted_again(client)


async def drafted_again(client: AsyncClient) -> None:
    drafted = 0
    async with asyncio.timeout(60):
        while not drafted:
            drafted = (await client.complete(PROMPT, max_tokens=16, budget=8, ignore_eos=True)).usage.draft_tokens


async def test_a_drafter_that_hangs_costs_one_wait_and_no_token(
    stack: Stack, client: AsyncClient, plain: Plain, idle: None
) -> None:
    stream, tokens, nodes = client.generate(PROMPT, **LONG), list[int](), list[int]()
    await read(stream, tokens, nodes, upto=40)
    stack.pause("drafter")
    try:
        began = asyncio.get_running_loop().time()
        await read(stream, tokens, nodes, upto=400)
        assert asyncio.get_running_loop().time() - began < 60
    finally:
        stack.resume("drafter")
    await read(stream, tokens, nodes)
    assert tokens == await expected(client, plain, stream)
    await drafted_again(client)


async def test_a_kvstore_that_is_killed_delays_a_stream_and_loses_nothing(
    stack: Stack, client: AsyncClient, plain: Plain, idle: None
) -> None:
    stream, tokens, nodes = client.generate(PROMPT, **LONG), list[int](), list[int]()
    await read(stream, tokens, nodes, upto=40)
    stack.kill("kvstore")
    await read(stream, tokens, nodes)
    assert tokens == await expected(client, plain, stream)
    await asyncio.to_thread(stack.wait_ready, "kvstore")
    session = await client.get_session(stream.session_id)
    assert session.token_count == len(tokens)


async def test_a_redis_that_hangs_delays_a_stream_and_loses_nothing(
    stack: Stack, client: AsyncClient, plain: Plain, idle: None
) -> None:
    """A pause beyond the store's own patience with it (1 s) once ended every running stream at once."""
    for _ in range(TRIES):
        if await both_waited(stack, client, plain):
            return
    raise AssertionError("no stream waited for its store")


async def both_waited(stack: Stack, client: AsyncClient, plain: Plain) -> bool:
    """Whether two streams were under way when Redis hung. Their texts are whole, and so is what was recorded."""
    plainly: Options = {**LONG, "budget": 0}
    streams = [client.generate(PROMPT, **LONG), client.generate(PROMPT, **plainly)]
    got: list[list[int]] = [[], []]
    await asyncio.gather(*(read(stream, tokens, [], upto=20) for stream, tokens in zip(streams, got, strict=True)))
    stack.pause("redis")
    rest = [asyncio.create_task(read(s, tokens, [])) for s, tokens in zip(streams, got, strict=True)]
    try:
        ended, waiting = await asyncio.wait(rest, timeout=3)
        assert not any(task.exception() for task in ended), "a stream ended without its store"
    finally:
        stack.resume("redis")
    await asyncio.gather(*rest)
    for stream, tokens in zip(streams, got, strict=True):
        assert tokens == await expected(client, plain, stream)
        session = await client.get_session(stream.session_id)
        assert (session.token_count, session.finish_reason) == (len(tokens), "length")
    return len(waiting) == 2


async def test_a_redis_that_is_killed_delays_a_stream_and_loses_nothing(
    stack: Stack, client: AsyncClient, plain: Plain, idle: None
) -> None:
    """Its log is synced every second, so a crash may lose the last one: then the gateway appends it again."""
    stream, tokens = client.generate(PROMPT, **LONG), list[int]()
    await read(stream, tokens, [], upto=20)
    stack.kill("redis")
    await read(stream, tokens, [])
    assert tokens == await expected(client, plain, stream)
    assert (await client.get_session(stream.session_id)).token_count == len(tokens)


async def test_a_single_verifier_that_is_killed_delays_a_stream_and_loses_nothing(
    stack: Stack, client: AsyncClient, plain: Plain, idle: None
) -> None:
    stream, tokens, nodes = client.generate(PROMPT, **LONG), list[int](), list[int]()
    await read(stream, tokens, nodes, upto=20)
    stack.kill("verifier")
    await read(stream, tokens, nodes)
    assert tokens == await expected(client, plain, stream)


async def test_a_single_gateway_that_is_killed_delays_a_stream_and_leaves_nothing_behind(
    stack: Stack, client: AsyncClient, plain: Plain, idle: None
) -> None:
    """The client resumes by itself where the next gateway is there."""
    stream, tokens, nodes = client.generate(PROMPT, **LONG), list[int](), list[int]()
    await read(stream, tokens, nodes, upto=20)
    stack.kill("gateway")
    await read(stream, tokens, nodes)
    assert tokens == await expected(client, plain, stream)
    load = verifier_load(stack)
    assert load.free_pages == load.total_pages
    await asyncio.to_thread(stack.wait_ready, "gateway")
    await soon_served(client, plain)


async def soon_served(client: AsyncClient, plain: Plain) -> None:
    """A new stream, once there is a way to the verifier again, is what it always was."""
    async with asyncio.timeout(60):
        while True:
            stream = client.generate(PROMPT, max_tokens=16, seed=2, temperature=1.0)
            try:
                result = await stream.result()
            except Unavailable as away:
                await asyncio.sleep(away.retry_after or 0.1)
                continue
            break
    assert list(result.tokens) == await expected(client, plain, stream)
