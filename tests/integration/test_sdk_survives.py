"""A user's loop over a generation does not notice that a gateway died: same tokens, same text, sync and async."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pytest
import redis

from hedgerow.cli.child import Backoff
from hedgerow.cli.supervisor import Stack, StackConfig
from hedgerow.client import AsyncClient, Chunk, Client, Options, Result, Retry, Stream, SyncStream
from hedgerow.client._wire import Wire
from hedgerow.errors import SessionUnknown
from tests.polling import soon
from tests.stack import BUDGET, ROOT, Models, verifier_load

PROMPT = "class Shape:\n    def area(self):\n        return "
GREEDY: Options = {"max_tokens": 300, "ignore_eos": True, "temperature": 0.0}
SEEDED: Options = {"max_tokens": 300, "ignore_eos": True, "temperature": 0.9, "top_p": 0.95, "seed": 11}
LONG: Options = {**SEEDED, "max_tokens": 1000, "budget": 0}
PARAMETERS = pytest.mark.parametrize("options", [GREEDY, SEEDED], ids=["greedy", "seeded"])
READ = 5
"""Chunks that are read before something is done to the gateway."""


@pytest.fixture(scope="module")
def pair(tiny: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two gateways before one verifier and one store; what is killed comes back.

    On torch: the compiled engine is through with a stream before its gateway can be killed.
    """
    data = tmp_path_factory.mktemp("pair")
    torch = {"ENGINE": "torch"}
    config = StackConfig(
        ROOT, tiny.target, data, drafter=tiny.drafter, budget=BUDGET, gateways=2, backoff=Backoff(0.2, 1.0, 3.0),
        grace=0.5, settings={"verifier": torch, "drafter": torch},
    )  # fmt: skip
    with Stack(config) as running:
        yield running


class Whole(NamedTuple):
    """What a client got, piece by piece."""

    tokens: Sequence[int]
    text: str

    @classmethod
    def of(cls, pieces: Sequence[Chunk]) -> Whole:
        return cls(tuple(token for piece in pieces for token in piece.tokens), "".join(piece.text for piece in pieces))

    @classmethod
    def of_result(cls, result: Result) -> Whole:
        return cls(result.tokens, result.text)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The session ids with which streams were opened, "" for those that began one."""
    calls, open_call = list[str](), Wire._open

    def noted(self: Wire) -> object:
        calls.append(self.order.position.session_id)
        return open_call(self)

    monkeypatch.setattr(Wire, "_open", noted)
    return calls


def serving(pair: Stack, stream: Stream | SyncStream) -> str:
    """The name of the gateway that the stream reads from."""
    wire = (stream._stream if isinstance(stream, SyncStream) else stream)._wire
    return next(name for name in pair.names("gateway") if pair.address(name) == wire._address)


@PARAMETERS
async def test_an_async_loop_survives_the_death_of_its_gateway(
    pair: Stack, options: Options, opened: list[str]
) -> None:
    async with AsyncClient(pair.addresses("gateway")) as client:
        stream, pieces = client.generate(PROMPT, **options), list[Chunk]()
        async for piece in stream:
            pieces.append(piece)
            if len(pieces) == READ:
                victim = serving(pair, stream)
                await asyncio.to_thread(pair.kill, victim)
        assert stream.finished is not None
        assert stream.finished.exact
        assert stream.session_id in opened, "the whole of it was here before the gateway died"
        await asyncio.to_thread(pair.wait_ready, victim)
        assert Whole.of(pieces) == Whole.of_result(await client.complete(PROMPT, **options))
        there = await client.get_session(stream.session_id)
        assert (there.token_count, there.finish_reason) == (options["max_tokens"], "length")


@PARAMETERS
def test_a_sync_loop_survives_the_death_of_its_gateway(pair: Stack, options: Options, opened: list[str]) -> None:
    with Client(pair.addresses("gateway")) as client:
        stream, pieces = client.generate(PROMPT, **options), list[Chunk]()
        for piece in stream:
            pieces.append(piece)
            if len(pieces) == READ:
                victim = serving(pair, stream)
                pair.kill(victim)
        assert stream.session_id in opened, "the whole of it was here before the gateway died"
        pair.wait_ready(victim)
        assert Whole.of(pieces) == Whole.of_result(client.complete(PROMPT, **options))


@pytest.mark.long
async def test_a_loop_survives_every_gateway_dying_in_turn(pair: Stack, opened: list[str]) -> None:
    """With one address too: it waits until its gateway is back."""
    for addresses in (pair.addresses("gateway"), pair.address("gateway")):
        async with AsyncClient(addresses) as client:
            stream, pieces = client.generate(PROMPT, **LONG), list[Chunk]()
            async for piece in stream:
                pieces.append(piece)
                if len(pieces) in (READ, 4 * READ):
                    victim = serving(pair, stream)
                    await asyncio.to_thread(pair.kill, victim)
                    await asyncio.to_thread(pair.wait_ready, victim)
            assert opened.count(stream.session_id) >= 2
            assert Whole.of(pieces) == Whole.of_result(await client.complete(PROMPT, **LONG))


async def test_a_gateway_that_drains_hands_its_streams_on(pair: Stack, opened: list[str]) -> None:
    """A rolling upgrade: no lease has to run out first."""
    async with AsyncClient(pair.addresses("gateway")) as client:
        stream, pieces = client.generate(PROMPT, **LONG), list[Chunk]()
        async for piece in stream:
            pieces.append(piece)
            if len(pieces) == READ:
                victim, starts = (name := serving(pair, stream)), pair.starts(name)
                pair.terminate(victim)
        assert stream.session_id in opened
        assert Whole.of(pieces) == Whole.of_result(await client.complete(PROMPT, **LONG))
        await soon(lambda: pair.starts(victim) > starts, 30, "the next life of a gateway that drained")
        await asyncio.to_thread(pair.wait_ready, victim)


@pytest.mark.long
async def test_a_session_that_its_store_forgot_with_its_owner_dead_is_brought_back(pair: Stack) -> None:
    """Prompt and tokens are only here: the same request makes the same session, which is checked by its digest."""
    async with AsyncClient(pair.addresses("gateway")) as client:
        stream, pieces = client.generate(PROMPT, **LONG), list[Chunk]()
        async for piece in stream:
            pieces.append(piece)
            if len(pieces) == READ:
                for name in pair.names("gateway"):
                    await asyncio.to_thread(pair.kill, name)
                with redis.Redis.from_url(pair.redis_url) as store:
                    assert store.delete(*store.keys(f"*{stream.session_id}*"))
        assert Whole.of(pieces) == Whole.of_result(await client.complete(PROMPT, **LONG))


async def test_another_client_goes_on_where_one_detached(pair: Stack) -> None:
    async with AsyncClient(pair.address("gateway")) as one, AsyncClient(pair.address("gateway-2")) as two:
        whole = Whole.of_result(await one.complete(PROMPT, **SEEDED))
        stream = one.generate(PROMPT, **SEEDED)
        first = [await anext(stream) for _ in range(READ)]
        position = await stream.detach()
        rest = two.resume(*position)
        pieces = first + [piece async for piece in rest]
        assert Whole.of(pieces) == whole
        again = await two.resume(position.session_id).result()
        assert Whole.of_result(again) == whole, "the whole of it, from the log"
        cut = len("".join(piece.text for piece in first).encode())
        by_text = await one.resume(position.session_id, text_offset=cut).result()
        assert by_text.text == whole.text.encode()[cut:].decode()
        with pytest.raises(SessionUnknown):
            await two.resume("0" * 32).result()
        async with AsyncClient(pair.address("gateway"), tenant="another") as stranger:
            with pytest.raises(SessionUnknown):
                await stranger.resume(*position).result()


async def test_leaving_ends_the_session_at_once_and_dying_does_not(pair: Stack) -> None:
    endless: Options = {**SEEDED, "max_tokens": 1500}
    async with AsyncClient(pair.addresses("gateway")) as client:
        left = client.generate(PROMPT, **endless)
        await anext(left)
        await left.aclose()
        await soon(lambda: verifier_load(pair).running == 0, 8, "the end of a sequence that was left")
        assert (await client.get_session(left.session_id)).finish_reason == "cancelled"
    async with AsyncClient(pair.addresses("gateway"), retry=Retry.never()) as client:
        broken = client.generate(PROMPT, **GREEDY)
        await anext(broken)
        broken._wire._drop_call()  # as a process that is killed: nobody says anything
        session_id = broken.session_id

        async def finished() -> bool:
            return (await client.get_session(session_id)).finish_reason == "length"

        async with asyncio.timeout(80):  # a detached session goes on without its client
            while not await finished():
                pass
