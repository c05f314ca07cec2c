"""A stream that breaks goes on at the next gateway: nothing twice, nothing left out, bounded, or a loud error."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import grpc.aio
import pytest

from hedgerow.client import AsyncClient, Chunk, Finished, Position, Retry, Started
from hedgerow.client._order import Order
from hedgerow.errors import (
    DeadlineExceeded,
    Fenced,
    HedgerowError,
    Internal,
    LostSuffix,
    NotFound,
    Overloaded,
    SessionFailed,
    SessionUnknown,
    Unavailable,
)  # fmt: skip
from tests.polling import soon
from tests.unit.client_gateway import chunk, digest, finished, for_ever, gateway, started

QUICK = Retry(attempts=3, first_delay=0.01, last_delay=0.02, resumes=3)
BROKEN = [started(), chunk(0, [1, 2], "ä")]
REST = [started(), chunk(2, [3], "c"), finished("LENGTH", 3)]
AWAY = Unavailable("verifier", "away", 0.0)


async def given(client: AsyncClient, **options: Any) -> list[Any]:
    return [event async for event in client.generate("x", **options).events()]


def text_of(events: list[Any]) -> str:
    return "".join(event.text for event in events if isinstance(event, Chunk))


async def test_a_gateway_that_dies_is_not_noticed() -> None:
    """Both gateways are real servers; the first one's connections break in mid-stream."""
    async with gateway() as one, gateway() as two, AsyncClient([one.address, two.address], retry=QUICK) as client:
        first, second = (one, two) if client._gateways._turn == 0 else (two, one)
        first.scripts = [[*BROKEN, lambda: asyncio.create_task(first.die()), for_ever]]  # type: ignore[list-item]
        second.scripts = [REST]
        events = await given(client)
    assert [type(event) for event in events] == [Started, Chunk, Chunk, Finished]
    assert [event.tokens for event in events[1:3]] == [(1, 2), (3,)]
    assert text_of(events) == "äc"
    asked = second.resumes[0]
    assert (asked.session_id, asked.token_offset, asked.digest, asked.text_offset) == ("s1", 2, digest(2), 2)
    assert asked.detach


@pytest.mark.parametrize("error", [AWAY, Fenced("s1", 1, 2), Overloaded("queue", 9, 9, 0.0)])
async def test_what_may_pass_is_resumed(error: HedgerowError) -> None:
    async with gateway([*BROKEN, error], [AWAY], REST) as server, AsyncClient(server.address, retry=QUICK) as client:
        assert text_of(await given(client)) == "äc"
        assert (len(server.requests), len(server.resumes)) == (1, 2)


@pytest.mark.parametrize("error", [NotFound("session", "s1"), LostSuffix("2 tokens, not 3"), Internal("oops")])
async def test_what_cannot_pass_is_raised(error: HedgerowError) -> None:
    async with gateway([*BROKEN, AWAY], [error]) as server, AsyncClient(server.address, retry=QUICK) as client:
        with pytest.raises(type(error)) as raised:
            await given(client)
        assert raised.value.message == error.message
        assert len(server.resumes) == 1
        assert server.cancels == [], "the session is left as it is: somebody may still resume it"


async def test_a_stream_that_ends_without_its_end_goes_on() -> None:
    """Elsewhere a cut stream was passed on as a finished one."""
    async with gateway(BROKEN, REST) as server, AsyncClient(server.address, retry=QUICK) as client:
        assert text_of(await given(client)) == "äc"
    async with gateway(BROKEN) as server, AsyncClient(server.address, retry=Retry.never()) as client:
        with pytest.raises(Unavailable, match="without its last event"):
            await client.complete("x")


async def test_a_session_that_only_started_is_resumed_from_its_beginning() -> None:
    whole = [started(), chunk(0, [1, 2], "ä"), chunk(2, [3], "c"), finished("LENGTH", 3)]
    async with gateway([started(), AWAY], whole) as server, AsyncClient(server.address, retry=QUICK) as client:
        events = await given(client)
        assert [type(event) for event in events] == [Started, Chunk, Chunk, Finished], "one Started, not two"
        assert server.resumes[0].token_offset == 0


async def test_a_resume_without_a_first_event_is_taken_as_well() -> None:
    async with gateway([*BROKEN, AWAY], REST[1:]) as server, AsyncClient(server.address, retry=QUICK) as client:
        result = await client.complete("x")
        assert (result.tokens, result.text, result.seed) == ((1, 2, 3), "äc", 42)


@pytest.mark.parametrize(
    "wrong",
    [
        chunk(1, [2], "", 2), chunk(3, [4], "", 2), chunk(2, [3], "c", 1), chunk(2, [3], "c", 3), finished("STOP", 1),
        finished("STOP", 3), started("s2"),
    ],
)  # fmt: skip
async def test_an_event_that_does_not_fit_is_loud(wrong: Any) -> None:
    script = [*BROKEN, AWAY], [started(), wrong, *REST[1:]]
    async with gateway(*script) as server, AsyncClient(server.address, retry=QUICK) as client:
        stream = client.generate("x")
        assert (await anext(stream)).tokens == (1, 2)
        with pytest.raises(Internal, match="s1"):
            await anext(stream)
        assert len(server.resumes) == 1
        assert stream.position == Position("s1", 2, digest(2), 2)


async def test_tokens_before_the_first_event_are_loud() -> None:
    async with gateway(REST[1:]) as server, AsyncClient(server.address, retry=QUICK) as client:
        with pytest.raises(Internal, match="without its first event"):
            await client.complete("x")


async def test_resumes_end_and_can_be_switched_off() -> None:
    scripts = [[*BROKEN, AWAY], [AWAY], [started(), AWAY], [AWAY], REST]
    async with gateway(*scripts) as server, AsyncClient(server.address, retry=QUICK) as client:
        with pytest.raises(Unavailable, match="verifier"):
            await client.complete("x")
        assert len(server.resumes) == QUICK.resumes, "a repeated first event is no progress"
        server.scripts = [[*BROKEN, AWAY], REST]
        with pytest.raises(Unavailable):
            await AsyncClient(server.address, retry=Retry(resumes=0)).complete("x")
        assert len(server.scripts) == 1


async def test_progress_starts_the_count_anew() -> None:
    pieces: list[list[Any]] = [[chunk(i, [i], "a"), AWAY] for i in range(8)]
    scripts = [[started(), *pieces[0]], *pieces[1:], [finished("STOP", 8)]]
    async with gateway(*scripts) as server, AsyncClient(server.address, retry=QUICK) as client:
        assert (await client.complete("x")).tokens == tuple(range(8))


async def test_the_timeout_covers_every_call_of_a_stream() -> None:
    scripts = [*BROKEN, AWAY], [started(), for_ever]
    async with gateway(*scripts) as server, AsyncClient(server.address, retry=Retry(first_delay=0.4)) as client:
        began = asyncio.get_running_loop().time()
        with pytest.raises(DeadlineExceeded):
            await client.complete("x", timeout=1)
        assert 0.9 < asyncio.get_running_loop().time() - began < 10
        first, second = server.remaining
        assert second < first - 0.1 < 1, "each call carries what is left"
    hinted = Unavailable("verifier", "away", 60.0)
    async with gateway([*BROKEN, hinted]) as server, AsyncClient(server.address) as client:
        with pytest.raises(Unavailable):  # at once: what it would wait for comes too late
            await asyncio.wait_for(client.complete("x", timeout=50), 20)


async def test_the_sessions_own_deadline_shrinks_when_it_is_asked_for_again() -> None:
    slow = Retry(first_delay=0.2)
    async with gateway([AWAY], [*REST[:1], finished()]) as server, AsyncClient(server.address, retry=slow) as client:
        await client.complete("x", deadline=10)
        first, second = (request.deadline_ms for request in server.requests)
        assert first == 10_000
        assert 5_000 < second < 9_950


async def test_a_later_process_goes_on_from_a_position() -> None:
    async with gateway(REST, REST, REST) as server, AsyncClient(server.address) as client:
        at = Position("s1", 2, digest(2), 2)
        stream = client.resume(*at)
        assert (stream.position, stream.session_id) == (at, "s1")
        assert [piece.text async for piece in stream] == ["c"]
        assert stream.position == Position("s1", 3, digest(3), 3)
        assert (await client.resume("s1", text_offset=2).result()).text == "c"
        assert server.resumes[1].token_offset == 0
        with pytest.raises(Internal):
            await client.resume("s1").result()


@pytest.mark.parametrize("unknown", [SessionUnknown("s1"), LostSuffix("gone", metadata={"stored_digest": ""})])
async def test_a_session_that_the_store_lost_is_asked_for_again_and_gone_on_with(
    unknown: SessionUnknown | LostSuffix,
) -> None:
    """With its prompt gone only the client can bring it back; the gateway checks its digest at the offset."""
    again = [started(), chunk(0, [1], "ä"), for_ever]
    scripts = [*BROKEN, AWAY], [unknown], again, REST
    async with gateway(*scripts) as server, AsyncClient(server.address, retry=QUICK) as client:
        assert (await client.complete("x")).tokens == (1, 2, 3)
        assert len({request.idempotency_key for request in server.requests}) == 1
        assert [(r.token_offset, r.digest) for r in server.resumes] == [(2, digest(2))] * 2
        server.scripts = [[*BROKEN, AWAY], [unknown], [started("s2"), for_ever]]
        with pytest.raises(type(unknown)):
            await client.complete("x")
        await asyncio.wait_for(server.idle.wait(), 5)
    assert server.cancels == ["s2"], "what was begun in vain is ended"


async def test_a_gateway_that_dies_before_the_first_event_is_waited_for() -> None:
    """It was given up after 0.7 s, though the session may have begun and its gateway is being started again."""
    whole = [started(), chunk(0, [1], "a"), finished("STOP", 1)]
    async with gateway() as one, AsyncClient(one.address, retry=Retry(attempts=2)) as client:
        one.scripts = [[lambda: asyncio.create_task(one.die()), for_ever]]  # type: ignore[list-item]
        asking = asyncio.create_task(client.complete("x"))
        await soon(lambda: one.requests and not one.running, 30)
        await asyncio.sleep(1.0)
        assert not asking.done()
        async with gateway(whole, port=int(one.address.rpartition(":")[2])) as two:
            assert (await asyncio.wait_for(asking, 10)).text == "a"
            assert two.requests[0].idempotency_key == one.requests[0].idempotency_key
    async with AsyncClient(one.address, retry=Retry(attempts=2)) as client:
        with pytest.raises(Unavailable):  # nobody was ever there
            await asyncio.wait_for(client.complete("x"), 5)


async def test_calls_are_spread_and_pass_over_what_is_away() -> None:
    with socket.create_server(("localhost", 0)) as taken:
        nobody = f"localhost:{taken.getsockname()[1]}"
    async with gateway() as one, gateway() as two, AsyncClient(f"{one.address}, {two.address}") as client:
        assert client.addresses == (one.address, two.address)
        for _ in range(4):
            await client.models()
        assert len(one.metadata) == len(two.metadata) == 2
        async with AsyncClient([nobody, one.address], retry=QUICK) as other:
            for _ in range(6):
                assert (await other.models())[0].name == "m"
            one.scripts = [[*REST[:1], finished()]]
            await other.complete("x")


async def test_one_that_hangs_does_not_use_up_the_time_of_all() -> None:
    hung = socket.create_server(("localhost", 0))
    with hung:
        silent = f"localhost:{hung.getsockname()[1]}"
        async with gateway() as server, AsyncClient([silent, server.address], timeout=1.0) as client:
            for _ in range(2):
                assert (await client.models())[0].name == "m"
        async with AsyncClient(silent, timeout=0.3) as client:
            with pytest.raises((DeadlineExceeded, Unavailable)):
                await asyncio.wait_for(client.models(), 5)


async def test_the_tenant_goes_with_every_call() -> None:
    whole = [started(), finished()]
    async with gateway([AWAY], whole, whole, [*BROKEN, AWAY], REST) as server:
        async with AsyncClient(server.address, retry=QUICK, tenant="acme") as client:
            await client.complete("x")
            await client.resume("s1").result()
            await client.get_session("s1")
            assert [dict(sent)["hedgerow-tenant"] for sent in server.metadata] == ["acme"] * 4
            assert server.requests[0].tenant == "acme"
        async with AsyncClient(server.address, retry=QUICK) as client:
            await client.complete("x", tenant="of-this-call")
            assert [sent.get("hedgerow-tenant") for sent in server.metadata[4:]] == ["of-this-call"] * 2
            await client.models()
            assert "hedgerow-tenant" not in server.metadata[-1]


def test_a_server_that_goes_away_is_one_that_can_be_asked_again() -> None:
    from hedgerow.client._status import decode

    code, none = grpc.StatusCode, grpc.aio.Metadata()
    for number, text in (
        (code.CANCELLED, "CANCELLED"), (code.UNAVAILABLE, "x"), (code.UNKNOWN, "Stream removed"),
        (code.INTERNAL, "Received RST_STREAM with error code 2"),
    ):  # fmt: skip
        assert isinstance(decode(grpc.aio.AioRpcError(number, none, none, text), "here"), Unavailable)
    assert isinstance(decode(grpc.aio.AioRpcError(code.INTERNAL, none, none, "oops"), "here"), Internal)


def test_an_offset_that_was_left_out_is_the_servers_to_say() -> None:
    piece = Chunk(7, 9, (5,), "é", digest(8))
    by_text = Order(Position("s1", text_offset=9))
    assert by_text.take(piece)
    assert by_text.position == Position("s1", 8, digest(8), 11)
    with pytest.raises(Internal):
        Order(Position("s1", text_offset=8)).take(piece)
    by_tokens = Order(Position("s1", 7, digest(7)))
    assert by_tokens.take(piece)
    with pytest.raises(Internal):
        by_tokens.take(piece)
    with pytest.raises(Internal):
        Order(Position("s1", 6, digest(6))).take(piece)
    with pytest.raises(Internal):
        Order(Position("s1")).take(piece)


FULL = Overloaded("the waiting queue", 256, 256, 0.01)


async def test_a_session_that_found_no_place_is_begun_again_as_another() -> None:
    """It was resumed, so an overload became "session ... has ended with an error", and nobody tried again."""
    whole = [started("s3"), chunk(0, [1], "a"), finished("LENGTH", 1)]
    async with gateway([started("s1"), FULL], [started("s2"), FULL], whole) as server:
        async with AsyncClient(server.address, retry=QUICK) as client:
            stream = client.generate("x")
            assert (await stream.result()).session_id == "s3"
            assert stream.position == Position("s3", 1, digest(1), 1)
        assert server.resumes == []
        assert len({request.idempotency_key for request in server.requests}) == 3


async def test_a_callers_key_that_found_no_place_is_used_again() -> None:
    whole = [started("s1"), chunk(0, [1], "a"), finished("LENGTH", 1)]
    async with gateway([started("s1"), FULL], [started("s1"), FULL], whole) as server:
        async with AsyncClient(server.address, retry=QUICK) as client:
            result = await client.complete("x", idempotency_key="mine")
            assert (result.session_id, result.text) == ("s1", "a")
        assert server.resumes == []
        assert [request.idempotency_key for request in server.requests] == ["mine"] * 3


@pytest.mark.parametrize("key", ["", "mine"])
async def test_a_refusal_that_was_lost_on_its_way_is_asked_for_again_once(key: str) -> None:
    """The session had begun and failed; a resume cannot tell why."""
    options = {"idempotency_key": key} if key else {}
    whole = [started("s2"), chunk(0, [1], "a"), finished("LENGTH", 1)]
    failed = SessionFailed("s1")
    lost: list[list[Any]] = [[started("s1"), AWAY], [started("s1"), failed]]
    async with gateway(*lost, whole) as server, AsyncClient(server.address, retry=QUICK) as client:
        stream = client.generate("x", **options)  # type: ignore[arg-type]
        assert (await stream.result()).session_id == "s2"
        assert stream.position == Position("s2", 1, digest(1), 1)
        assert len({request.idempotency_key for request in server.requests}) == (1 if key else 2)
        server.scripts = [*lost, *lost]
        with pytest.raises(SessionFailed):
            await client.complete("x", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{}, {"idempotency_key": "mine"}])
async def test_an_overload_that_does_not_pass_is_told_as_one(options: dict[str, str]) -> None:
    async with gateway(*[[started(f"s{i}"), FULL] for i in range(9)]) as server:
        async with AsyncClient(server.address, retry=QUICK) as client:
            stream = client.generate("x", **options)  # type: ignore[arg-type]
            with pytest.raises(Overloaded, match="the waiting queue is full"):
                await stream.result()
            assert stream.position == Position(""), "there is nothing to go on with"
        assert server.resumes == []
        assert len(server.requests) == QUICK.attempts
