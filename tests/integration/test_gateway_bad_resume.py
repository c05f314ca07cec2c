"""Resumes that cannot be: each names what is wrong, and nothing is changed by it."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc.aio
import pytest
import pytest_asyncio
import redis

from hedgerow.cli.supervisor import Stack
from hedgerow.errors import (
    HedgerowError,
    InvalidRequest,
    LostSuffix,
    Overloaded,
    SessionDeleted,
    SessionExpired,
    SessionUnknown,
    Unsupported,
)
from hedgerow.rpc.status import from_rpc_error
from hedgerow.v1 import gateway_pb2 as pb
from services.kvstore.keys import session_keys
from tests.polling import soon
from tests.resuming_client import Ask, Channel, Got
from tests.stack import Models, another_gateway, verifier_load

PROMPT = "class Node:\n    "
WRONG = b"w" * 16

pytestmark = pytest.mark.usefixtures("idle")


@pytest_asyncio.fixture
async def channel(stack: Stack) -> AsyncIterator[Channel]:
    async with Channel(stack.address("gateway")) as made:
        yield made


@pytest_asyncio.fixture
async def ended(channel: Channel) -> Got:
    """A client that has a whole session of 30 tokens."""
    return await Got().read(channel.generate(Ask(PROMPT, 30)))


async def recorded(channel: Channel, session_id: str) -> tuple[int, bytes, int]:
    there = await channel.get(session_id)
    return there.token_count, there.digest, there.finish_reason


REFUSED: list[tuple[dict[str, Any], type[HedgerowError], dict[str, str]]] = [
    ({"token_offset": 30, "digest": WRONG}, LostSuffix, {"digest": WRONG.hex(), "stored_offset": "30"}),
    ({"token_offset": 4, "digest": WRONG}, LostSuffix, {"digest": WRONG.hex(), "stored_offset": "4"}),
    ({"token_offset": 0, "text_offset": 0, "digest": WRONG}, LostSuffix, {"stored_offset": "0"}),
    ({"token_offset": 31}, InvalidRequest, {"field": "token_offset", "value": "31"}),
    ({"token_offset": 4_294_967_295}, InvalidRequest, {"field": "token_offset"}),
    ({"token_offset": 3, "digest": b"short"}, InvalidRequest, {"field": "digest", "value": "'5 bytes'"}),
    ({"token_offset": 0, "text_offset": 5}, InvalidRequest, {"field": "digest"}),
    ({"token_offset": 0, "digest": b"", "text_offset": 1 << 40}, LostSuffix, {"text_offset": str(1 << 40)}),
    ({"text_offset": 1 << 63}, LostSuffix, {"text_offset": str(1 << 63)}),
    ({"session_id": "x" * 129}, InvalidRequest, {"field": "session_id"}),
    ({"session_id": ""}, InvalidRequest, {"field": "session_id"}),
    ({"session_id": "ab{cd}"}, InvalidRequest, {"field": "session_id"}),
    ({"session_id": "0" * 32, "digest": b"", "token_offset": 0, "text_offset": 0}, SessionUnknown, {}),
]


@pytest.mark.parametrize(("change", "kind", "metadata"), REFUSED, ids=lambda value: str(value)[:40])
async def test_a_resume_that_cannot_be_names_what_is_wrong(
    channel: Channel, ended: Got, change: dict[str, Any], kind: type[HedgerowError], metadata: dict[str, str]
) -> None:
    before = await recorded(channel, ended.id)
    error = await channel.error_of(ended.request(**change))
    assert type(error) is kind, error
    assert {name: error.metadata[name] for name in metadata} == metadata
    assert await recorded(channel, ended.id) == before


async def test_offsets_of_another_session_are_refused_while_it_runs_and_after(channel: Channel, ended: Got) -> None:
    call = channel.generate(Ask(PROMPT, 1500, 1.0))
    running = await Got().read(call, 40)
    error = await channel.error_of(running.request(token_offset=30, digest=ended.digest))
    assert isinstance(error, LostSuffix)
    assert error.metadata["digest"] == ended.digest.hex()
    error = await channel.error_of(ended.request(digest=running.digest))
    assert isinstance(error, LostSuffix)
    assert not (await channel.get(running.id)).finish_reason, "it runs on"
    await channel.ask("Cancel", pb.CancelRequest(session_id=running.id))
    await running.read(call)


async def test_an_offset_beyond_a_running_session_is_checked_when_it_gets_there(channel: Channel) -> None:
    call = channel.generate(Ask(PROMPT, 300, 1.0))
    got = await Got().read(call, 20)
    assert isinstance(await channel.error_of(got.request(token_offset=280, digest=b"")), LostSuffix)
    error = await channel.error_of(got.request(token_offset=280, digest=WRONG, text_offset=0))
    assert isinstance(error, LostSuffix)
    assert error.metadata["stored_offset"] == "280"
    await got.read(call)
    assert (got.error, len(got.tokens)) == (None, 300)


@pytest.mark.parametrize("running", [True, False])
async def test_another_tenants_session_is_unknown_to_every_call(stack: Stack, running: bool) -> None:
    async with Channel(stack.address("gateway"), "acme") as mine, Channel(stack.address("gateway"), "other") as other:
        call = mine.generate(Ask(PROMPT, 1500 if running else 20))
        got = await Got().read(call, 15 if running else 1 << 30)
        async with Channel(stack.address("gateway")) as nobody:
            for channel in (other, nobody):
                assert type(await channel.error_of(got.request())) is SessionUnknown
                for method, request in (
                    ("GetSession", pb.GetSessionRequest(session_id=got.id)),
                    ("Cancel", pb.CancelRequest(session_id=got.id)),
                    ("DeleteSession", pb.DeleteSessionRequest(session_id=got.id)),
                ):
                    assert type(await channel.ask(method, request)) is SessionUnknown
        assert bool((await mine.get(got.id)).finish_reason) is not running
        resumed = Got(got.started, None, list(got.tokens), got.text, got.digest)
        await resumed.read(mine.resume(got.request()), len(got.tokens) + 5)
        assert resumed.error is None
        assert (await mine.ask("DeleteSession", pb.DeleteSessionRequest(session_id=got.id))).existed
        assert type(await mine.error_of(got.request())) is SessionDeleted


async def test_a_request_may_not_name_another_tenant_than_its_metadata(stack: Stack) -> None:
    async with Channel(stack.address("gateway"), "acme") as channel:
        asked = Ask(PROMPT, 5).request()
        asked.tenant = "other"
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await channel.stub.Generate(asked, metadata=channel.metadata).read()
        error = from_rpc_error(refused.value)
        assert isinstance(error, InvalidRequest)
        assert (error.field, error.value) == ("tenant", "'other'")
        asked.tenant = "acme"
        got = await Got().read(channel.stub.Generate(asked, metadata=channel.metadata))
        assert got.error is None
    async with Channel(stack.address("gateway"), "t" * 129) as channel:
        long = await channel.ask("GetSession", pb.GetSessionRequest(session_id=got.id))
        assert isinstance(long, InvalidRequest)
        assert long.field == "hedgerow-tenant"


async def test_one_key_of_two_tenants_is_two_sessions(stack: Stack) -> None:
    key, ids = secrets.token_hex(8), []
    for tenant in ("acme", "other", "acme"):
        async with Channel(stack.address("gateway"), tenant) as channel:
            ids.append((await Got().read(channel.generate(Ask(PROMPT, 5, key=key)))).id)
    assert ids[0] == ids[2] != ids[1]


@pytest.fixture
def forgetful(stack: Stack, models: Models) -> Iterator[str]:
    """A gateway whose sessions are kept for three seconds."""
    with another_gateway(stack, models, session_ttl=3, lease_seconds=0.4, orphan_seconds=1) as address:
        yield address


async def test_what_is_over_expires_and_what_runs_does_not(stack: Stack, forgetful: str) -> None:
    """A verifier that pauses for longer than the retention leaves a running session silent."""
    async with Channel(forgetful) as channel:
        over = await Got().read(channel.generate(Ask(PROMPT, 10)))
        call = channel.generate(Ask(PROMPT, 1500))
        running = await Got().read(call, 20)
        stack.pause("verifier")
        try:
            began = time.monotonic()
            await soon(lambda: time.monotonic() - began > 4.5)
        finally:
            stack.resume("verifier")
        error = await channel.error_of(over.request())
        assert type(error) is SessionExpired
        assert type(await channel.ask("GetSession", pb.GetSessionRequest(session_id=over.id))) is SessionExpired
        await running.read(call, 600)
        assert (running.error, len(running.tokens) >= 600) == (None, True)
        await channel.ask("Cancel", pb.CancelRequest(session_id=running.id))
        await running.read(call)
    # a gateway that ends now leaves the last words of its sessions with the verifier, which keeps them for 10 s
    await soon(lambda: verifier_load(stack).held_sequences == 0, 30)


async def test_a_session_of_a_newer_version_is_refused_and_left_as_it_is(
    stack: Stack, channel: Channel, ended: Got
) -> None:
    record, *_ = session_keys(ended.id)
    with redis.Redis.from_url(stack.redis_url) as store:
        store.hset(record, "format", 99)
        before = store.hgetall(record)
        error = await channel.error_of(ended.request())
        assert type(error) is Unsupported
        for method, request in (
            ("GetSession", pb.GetSessionRequest(session_id=ended.id)),
            ("Cancel", pb.CancelRequest(session_id=ended.id)),
        ):
            assert type(await channel.ask(method, request)) is Unsupported
        assert store.hgetall(record) == before


async def test_a_store_out_of_memory_refuses_new_sessions_and_holds_running_ones(
    stack: Stack, channel: Channel
) -> None:
    call = channel.generate(Ask(PROMPT, 1500, 1.0))
    got = await Got().read(call, 30)
    with redis.Redis.from_url(stack.redis_url) as store:
        store.config_set("maxmemory", "1")
        try:
            refused = await Got().read(channel.generate(Ask(PROMPT, 5)))
            assert type(refused.error) is Overloaded
            assert refused.error.retry_after
            reading = asyncio.create_task(got.read(call))
            steps = -1

            async def held() -> bool:
                nonlocal steps
                await asyncio.sleep(0.3)
                before, steps = steps, verifier_load(stack).steps
                return before == steps

            async with asyncio.timeout(60):
                while not await held():
                    pass
            assert not reading.done()
            # What has ended can still be read, and one that is held still be resumed.
            other = await Got().read(channel.resume(pb.ResumeRequest(session_id=got.id, detach=True)), 30)
            assert (other.error, other.tokens[:30]) == (None, got.tokens[:30])
        finally:
            store.config_set("maxmemory", "0")
    await reading
    assert (got.error, len(got.tokens)) == (None, 1500)
