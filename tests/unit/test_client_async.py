"""The asynchronous client: events in, values out, errors by name, retries where they are safe, bounds on both."""

from __future__ import annotations

from typing import Any

import pytest

import hedgerow.client
from hedgerow.client import AsyncClient, Chunk, Finished, FinishReason, Message, Retry, Started, Step
from hedgerow.client._retry import Patience
from hedgerow.errors import (
    AlreadyExists,
    DeadlineExceeded,
    Fenced,
    InvalidRequest,
    KeyConflict,
    NotFound,
    Overloaded,
    SessionFailed,
    Unavailable,
    Unsupported,
)  # fmt: skip
from tests.unit.client_gateway import chunk, finished, for_ever, gateway, started

QUICK = Retry(attempts=3, first_delay=0.01, last_delay=0.02)
WHOLE = [started(), chunk(0, [1, 2], "ab"), chunk(2, [3], "c"), finished("LENGTH", 3)]


def test_the_package_exports_what_it_says() -> None:
    public = {name for name in vars(hedgerow.client) if not name.startswith("_")}
    assert public == set(hedgerow.client.__all__)
    assert sorted(hedgerow.client.__all__, key=str) == hedgerow.client.__all__


async def test_a_stream_gives_its_chunks_and_keeps_its_ends() -> None:
    async with gateway(WHOLE) as server, AsyncClient(server.address) as client:
        stream = client.generate("def f", max_tokens=3)
        chunks = [chunk async for chunk in stream]
        assert "".join(c.text for c in chunks) == "abc"
        assert [c.tokens for c in chunks] == [(1, 2), (3,)]
        assert stream.started is not None
        assert (stream.session_id, stream.started.sampling.seed, stream.started.exact) == ("s1", 42, True)
        assert stream.finished is not None
        assert stream.finished.reason == "length"
        assert stream.finished.usage.completion_tokens == 3
        assert [chunk async for chunk in stream] == [], "a stream that is over gives nothing more"
        assert server.requests[0].text == "def f"
        assert server.requests[0].sampling.max_tokens == 3
        assert not server.requests[0].sampling.HasField("temperature"), "what is not given is not sent"
        assert len(server.requests[0].idempotency_key) == 32


async def test_a_result_is_the_whole_of_it() -> None:
    async with gateway(WHOLE) as server, AsyncClient(server.address) as client:
        result = await client.complete([7, 8], seed=5, return_steps=True)
        assert (result.text, result.tokens, result.finish_reason) == ("abc", (1, 2, 3), FinishReason.LENGTH)
        assert result.steps[0] == Step(7, 8, 5, 1, 2, 0, 0)
        assert (result.session_id, result.seed, result.usage.steps) == ("s1", 42, 2)
        assert list(server.requests[0].token_ids.ids) == [7, 8]
        assert server.requests[0].return_steps


async def test_events_are_everything_in_order() -> None:
    async with gateway(WHOLE) as server, AsyncClient(server.address) as client:
        kinds = [type(event) async for event in client.generate("x").events()]
        assert kinds == [Started, Chunk, Chunk, Finished]


async def test_options_become_their_fields() -> None:
    async with gateway(WHOLE) as server, AsyncClient(server.address) as client:
        await client.complete(
            "x", model="m", temperature=0.5, top_k=3, top_p=0.5, min_p=0.25, stop="END", stop_token_ids=[4], budget=0,
            topk_cap=2, logit_bias={5: -1.0}, deadline=1.5, priority=-3, tenant="t", idempotency_key="k",
            ignore_eos=True, min_tokens=1,
        )  # fmt: skip
        asked = server.requests[0]
        sampling = asked.sampling
        assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 3, 0.5, 0.25)
        assert (list(sampling.stop), list(sampling.stop_token_ids)) == (["END"], [4])
        assert (dict(sampling.logit_bias), sampling.ignore_eos, sampling.min_tokens) == ({5: -1.0}, True, 1)
        assert asked.speculation.HasField("budget")
        assert (asked.speculation.budget, asked.speculation.topk_cap) == (0, 2)
        assert (asked.model, asked.deadline_ms, asked.priority, asked.tenant) == ("m", 1500, -3, "t")
        assert asked.idempotency_key == "k"


async def test_a_conversation_may_be_mappings() -> None:
    async with gateway(WHOLE) as server, AsyncClient(server.address) as client:
        messages = [{"role": "user", "content": "hi"}, Message("assistant", "yes", reasoning_content="hm")]
        async with client.chat(messages, thinking=False) as stream:
            await stream.result()
        chat = server.requests[0].chat
        assert [(m.role, m.content, m.reasoning_content) for m in chat.messages] == [
            ("user", "hi", ""),
            ("assistant", "yes", "hm"),
        ]
        assert chat.HasField("thinking")
        assert not chat.thinking
        assert not chat.HasField("preserve_thinking")


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"budget": -1}, "budget"),
        ({"seed": 1 << 70}, "seed"),
        ({"max_tokens": "x"}, "max_tokens"),
        ({"bugdet": 1}, "bugdet"),
    ],
)
async def test_a_value_that_its_field_cannot_hold_is_refused_here(given: dict[str, Any], field: str) -> None:
    client = AsyncClient("localhost:1")
    with pytest.raises(InvalidRequest) as refused:
        client.generate("x", **given)
    assert refused.value.field == field
    with pytest.raises(InvalidRequest, match=r"messages\[0\]"):
        client.chat([{"rolle": "user"}])


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequest("sampling.top_p", 2.0, "in (0, 1]"),
        NotFound("session", "s9"),
        AlreadyExists("session", "s9"),
        Unsupported("Resume", "not served yet"),
        KeyConflict("sampling.seed", "s1"),
        SessionFailed("s1"),
    ],
)
async def test_an_error_of_the_server_is_raised_as_it_was(error: Any) -> None:
    async with gateway([started(), error]) as server, AsyncClient(server.address, retry=QUICK) as client:
        with pytest.raises(type(error)) as raised:
            await client.complete("x")
        assert raised.value.message == error.message
        assert raised.value.metadata == {**error.metadata, "reason": error.reason}
        assert raised.value.retry_after == error.retry_after
        if isinstance(error, InvalidRequest):
            assert (raised.value.field, raised.value.value, raised.value.limit) == (
                "sampling.top_p", "2.0", "in (0, 1]",
            )  # fmt: skip
        assert len(server.requests) == 1, "it never helps to repeat this"


async def test_a_call_that_gave_nothing_is_tried_again_under_its_key() -> None:
    """The key joins what may have begun: nothing is generated twice."""
    full, away = Overloaded("the gateway", 5, 5, 0.0), Unavailable("kvstore", "away", 0.0)
    async with gateway([full], [away], WHOLE) as server, AsyncClient(server.address, retry=QUICK) as client:
        assert (await client.complete("x")).text == "abc"
        assert len({request.idempotency_key for request in server.requests}) == 1
        assert len(server.requests) == 3


async def test_a_made_up_key_whose_session_had_failed_is_replaced_once() -> None:
    """A gateway that could not reach its store ends what it may have written there, and the key joins that."""
    away, failed = Unavailable("kvstore", "away", 0.0), SessionFailed("s1")
    other = [started("s2"), *WHOLE[1:]]
    async with gateway([away], [started(), failed], other) as server, AsyncClient(server.address, retry=QUICK) as c:
        events = [event async for event in c.generate("x").events()]
        assert [type(event) for event in events] == [Started, Chunk, Chunk, Finished]
        assert isinstance(events[0], Started)
        assert events[0].session_id == "s2"
        keys = [request.idempotency_key for request in server.requests]
        assert keys[0] == keys[1] != keys[2]
        server.scripts += [[away], [started(), failed], [away], [started(), failed], WHOLE]
        with pytest.raises(SessionFailed):
            await c.complete("x")
        server.scripts = [[away], [started(), failed], [started(), failed], WHOLE]
        with pytest.raises(SessionFailed):
            await c.complete("x", idempotency_key="mine")
        assert [request.idempotency_key for request in server.requests[-3:]] == ["mine"] * 3


async def test_retries_end() -> None:
    gone = Unavailable("verifier", "away", 0.0)
    async with gateway([gone], [gone], [gone], WHOLE) as server, AsyncClient(server.address, retry=QUICK) as client:
        with pytest.raises(Unavailable):
            await client.complete("x")
        assert len(server.requests) == 3


async def test_nobody_there_names_the_address() -> None:
    async with AsyncClient("localhost:1", retry=Retry.never()) as client:
        with pytest.raises(Unavailable, match="gateway at localhost:1") as raised:
            await client.models()
        assert "reason" not in raised.value.metadata
        with pytest.raises(Unavailable, match="gateway at localhost:1"):
            await client.complete("x")


async def test_the_timeout_of_a_call_is_raised_with_its_value() -> None:
    """gRPC says "Stream removed (Deadline Exceeded)", and not which."""
    async with gateway([started(), for_ever]) as server:
        async with AsyncClient(server.address) as client:
            with pytest.raises(DeadlineExceeded, match=r"^no end within 0\.2 s$"):
                await client.complete("x", timeout=0.2)
        async with AsyncClient(server.address, timeout=0.25) as client:
            server.refused = [for_ever]
            with pytest.raises(DeadlineExceeded, match=r"^no end within 0\.25 s$"):
                await client.models()


async def test_the_other_calls() -> None:
    async with gateway() as server, AsyncClient(server.address, retry=QUICK) as client:
        assert (await client.models())[0].name == "m"
        assert bytes(await client.tokenize("héllo")).decode() == "héllo"
        assert bytes(await client.tokenize([{"role": "user", "content": "x"}])) == b"user:x;"
        assert await client.cancel("s1")
        assert not await client.cancel("s2")
        assert (await client.get_session("s1")).finish_reason == FinishReason.RUNNING
        assert await client.delete_session("s1")
        server.refused = [Unavailable("kvstore", "away", 0.0), NotFound("session", "s1")]
        with pytest.raises(NotFound):
            await client.cancel("s1")
        assert server.refused == [], "the first answer was worth another try"


def test_delays_double_and_a_hint_counts_if_it_is_longer() -> None:
    retry = Retry(attempts=4, first_delay=1.0, last_delay=3.0)
    gone, patience = Unavailable("x", "y", 0.0), Patience(retry)
    for full in (1.0, 2.0, 3.0):
        delay = patience.delay(gone, 0.0, begun=False)
        assert delay is not None
        assert full / 2 <= delay <= full
    assert patience.delay(gone, 0.0, begun=False) is None
    assert Patience(retry).delay(Overloaded("x", 1, 1, 9.0), 0.0, begun=False) == 9.0
    assert Patience(retry).delay(NotFound("session", "s"), 0.0, begun=True) is None
    assert Retry(2) == Retry(2)
    assert Patience(Retry.never()).delay(gone, 0.0, begun=False) is None
    assert Patience(Retry.never()).delay(gone, 0.0, begun=True) is None
    assert Patience(Retry(attempts=9999, first_delay=1.0)).delay(gone, 0.0, begun=False) is not None


def test_resumes_are_bounded_in_number_and_in_time_since_something_came() -> None:
    gone = Unavailable("x", "y", 0.0)
    patience = Patience(Retry(attempts=1, resumes=3, first_delay=1.0, last_delay=1.0, total=50.0))
    assert [patience.delay(gone, float(now), begun=True) is None for now in range(4)] == [False] * 3 + [True]
    patience.progress()
    assert patience.delay(gone, 1000.0, begun=True) is not None, "the time counts from the first failure"
    assert patience.delay(gone, 1049.9, begun=True) is None
    patience.progress()
    assert patience.delay(Fenced("s", 1, 2), 2000.0, begun=True) is not None
    assert patience.delay(SessionFailed("s"), 2000.0, begun=True) is None


def test_the_hint_of_one_gateway_does_not_delay_the_next() -> None:
    hinted, patience = Unavailable("verifier", "away", 10.0), Patience(Retry(first_delay=0.1))
    first, second, third = (patience.delay(hinted, 0.0, begun=True, others=1) for _ in range(3))
    assert first is not None
    assert first < 1
    assert second == third == 10.0
    assert Patience(Retry()).delay(Overloaded("it", 1, 1, 3.0), 0.0, begun=True, others=1) == 3.0


def test_an_error_of_a_gateway_without_a_hint_is_final() -> None:
    final = Unavailable("x", "y")
    final.retry_after = None
    assert Patience(Retry()).delay(final, 0.0, begun=True) is not None, "it came from no gateway"
    final.metadata = {"reason": "UNAVAILABLE"}
    assert Patience(Retry()).delay(final, 0.0, begun=True) is None
