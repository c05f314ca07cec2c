"""Arguments that cannot be: the SDK refuses them by name, before anything is sent, with errors of its own alone."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import grpc.aio
import pytest

from hedgerow.client import AsyncClient, Client, Message, Retry
from hedgerow.client._convert import KNOWN
from hedgerow.client._fields import MESSAGE_LIMIT
from hedgerow.errors import Cancelled, HedgerowError, InvalidRequest, Overloaded, Unsupported
from tests.unit.client_gateway import finished, gateway, started

NOWHERE = "localhost:1"
LONE = "a\udcffb"  # what a shell's invalid UTF-8 becomes in an argument
WHOLE = [started(), finished("STOP")]
UINT32 = r"a whole number in \[0, 4294967295\]"


async def ended(script: list[Any], **options: Any) -> Any:
    async with gateway(script) as server, AsyncClient(server.address) as client:
        await client.complete("x", **options)
        return server.requests[0]


@pytest.mark.parametrize(
    ("option", "value", "field", "limit"),
    [
        ("budget", -1, "budget", UINT32), ("top_k", -1, "top_k", UINT32), ("max_tokens", 1 << 32, "max_tokens", UINT32),
        ("max_tokens", 1.5, "max_tokens", UINT32), ("max_tokens", True, "max_tokens", UINT32),
        ("seed", -1, "seed", r"a whole number in \[0, 18446744073709551615\]"),
        ("priority", 1 << 31, "priority", r"a whole number in \[-2147483648, 2147483647\]"),
        ("temperature", "hot", "temperature", "a number"), ("temperature", 10**400, "temperature", "a number"),
        ("ignore_eos", "yes", "ignore_eos", "True or False"),
        ("stop", 5, "stop", "a sequence; each item: text"), ("stop", ["ok", 5], r"stop\[1\]", "text"),
        ("stop", LONE, r"stop\[0\]", "text that is valid Unicode"), ("stop", b"x", "stop", "a sequence"),
        ("stop_token_ids", [1, -2], r"stop_token_ids\[1\]", UINT32), ("stop_token_ids", 5, "stop_token_ids", UINT32),
        ("logit_bias", 5, "logit_bias", "a mapping"), ("logit_bias", {-1: 1.0}, "logit_bias", "a mapping"),
        ("logit_bias", {1: "x"}, "logit_bias", "its values: a number"),
        ("model", LONE, "model", "text"), ("tenant", LONE, "tenant", "text"), ("tenant", 5, "tenant", "text"),
        ("idempotency_key", LONE, "idempotency_key", "text"),
        ("bugdet", 1, "bugdet", r"did you mean budget\?"), ("x", 1, "x", "one of budget, deadline, "),
    ],
)  # fmt: skip
def test_an_option_that_does_not_fit_is_refused_with_its_name_and_limit(
    option: str, value: object, field: str, limit: str
) -> None:
    """Some raised TypeError, UnicodeEncodeError or OverflowError; others said "Value out of range" and no more."""
    with pytest.raises(InvalidRequest, match=rf"^{field}: .* is not allowed: .*{limit}"):
        AsyncClient(NOWHERE).generate("x", **{option: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["deadline", "timeout"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1, 0, 10**400, "a", True, [1]])
def test_a_time_span_that_is_none_is_refused(name: str, value: object) -> None:
    """A negative deadline became one of a millisecond, NaN a ValueError from the depth."""
    with pytest.raises(InvalidRequest) as refused:
        AsyncClient(NOWHERE).generate("x", **{name: value})  # type: ignore[arg-type]
    assert (refused.value.field, refused.value.limit) == (name, "seconds, more than 0 and at most 1000000000")


async def test_none_is_as_if_left_out() -> None:
    options = dict.fromkeys(("deadline", "timeout", "stop", "seed", "budget", "model", "logit_bias", "max_tokens"))
    asked = await ended(WHOLE, **options)
    assert not asked.sampling.ListFields()
    assert not asked.speculation.HasField("budget")
    assert asked.deadline_ms == 0


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ([-1], "prompt[0]"), ([1, 1 << 32], "prompt[1]"), ([1.5], "prompt[0]"), ([1, None], "prompt[1]"),
        (None, "prompt"), (5, "prompt"), (b"bytes", "prompt"), ({1: 2}, "prompt"), ({1}, "prompt"), (LONE, "prompt"),
    ],
)  # fmt: skip
def test_a_prompt_is_text_or_token_ids(prompt: Any, field: str) -> None:
    """`complete(None)` blamed an empty `token_ids`, `complete([-1])` raised ValueError."""
    with pytest.raises(InvalidRequest) as refused:
        AsyncClient(NOWHERE).generate(prompt)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        (None, "messages"), ("hi", "messages"), ({"role": "user"}, "messages"), (["hi"], "messages[0]"),
        ([{"rolle": "user"}], "messages[0]"), ([{1: "user"}], "messages[0]"),
        ([Message("user", LONE)], "messages[0].content"), ([{"role": LONE}], "messages[0].role"),
        ([Message("user"), {"role": "user", "content": ["part"]}], "messages[1].content[0].type"),
        ([Message("assistant", tool_calls=5)], "messages[0].tool_calls"),  # type: ignore[arg-type]
        ([Message("assistant", tool_calls=[{}])], "messages[0].tool_calls[0]"),  # type: ignore[list-item]
        (
            [{"role": "assistant", "tool_calls": [{"id": "1", "name": "f", "arguments": {}}]}],
            "messages[0].tool_calls[0].arguments",
        ),
    ],
)  # fmt: skip
async def test_a_message_that_does_not_fit_is_refused_with_its_place(messages: Any, field: str) -> None:
    client = AsyncClient(NOWHERE)
    with pytest.raises(InvalidRequest) as refused:
        client.chat(messages)
    assert refused.value.field == field
    if not isinstance(messages, str):
        with pytest.raises(InvalidRequest) as refused:
            await client.tokenize(messages)
        assert refused.value.field == field


async def test_ids_that_are_no_text_are_refused() -> None:
    client = AsyncClient(NOWHERE)
    for call in (client.cancel, client.get_session, client.delete_session):
        for session_id in (LONE, 5):
            with pytest.raises(InvalidRequest, match=r"^session_id: "):
                await call(session_id)  # type: ignore[arg-type]
    for address in ("", LONE, None, 7411):
        with pytest.raises(InvalidRequest, match=r"^address: "):
            Client(address)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [{"attempts": 0}, {"attempts": "3"}, {"first_delay": -1}, {"last_delay": math.nan}])
def test_retries_that_cannot_be_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        Retry(**given)
    assert refused.value.field in given


async def test_a_request_that_is_too_large_is_refused_here() -> None:
    """It was sent, came back as RESOURCE_EXHAUSTED, was taken for an overload, and sent three times more."""
    large = "x" * (MESSAGE_LIMIT + 1)
    client = AsyncClient(NOWHERE)
    with pytest.raises(InvalidRequest, match=r"request: '67\d{6} bytes' is not allowed: at most 67108864 bytes"):
        client.generate(large)
    with pytest.raises(InvalidRequest, match="at most 67108864 bytes"):
        await client.tokenize(large)


async def test_a_request_that_the_gateway_finds_too_large_is_not_repeated() -> None:
    async with gateway() as server, AsyncClient(server.address) as client:  # gRPC's own limit there: 4 MiB
        with pytest.raises(InvalidRequest, match=r"request: '50000\d\d bytes' is not allowed: at most 4194304 bytes"):
            await client.complete("x" * 5_000_000)
        with pytest.raises(InvalidRequest, match="at most 4194304 bytes"):
            await client.tokenize("x" * 5_000_000)
        assert server.requests == []


async def test_an_answer_that_is_too_large_is_not_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hedgerow.client._gateways.OPTIONS", (("grpc.max_receive_message_length", 100),))
    async with gateway() as server, AsyncClient(server.address) as client:
        with pytest.raises(Unsupported, match="more than the 100 of this client"):
            await client.tokenize("x" * 1000)


async def test_too_many_calls_are_still_an_overload() -> None:
    from hedgerow.client._status import decode

    code, none = grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.aio.Metadata()
    error = grpc.aio.AioRpcError(code, none, none, "Concurrent RPC limit exceeded!")
    assert isinstance(decode(error, NOWHERE), Overloaded)


def test_a_closed_client_says_so() -> None:
    """It raised RuntimeError, and warned of a coroutine that nobody awaited."""
    client = Client(NOWHERE)
    client.close()
    with pytest.raises(Cancelled, match="the client is closed"):
        client.models()


ODD: list[Any] = [
    None, -1, 0, 1 << 70, 1.5, math.nan, math.inf, True, "", "x", LONE, "a\0b", b"", b"x", [], [None], (1,), {},
    {"a": 1}, {1}, object(), iter([1]), range(3), 10**400, "x" * 200, int, 1j,
]  # fmt: skip
POSITION = ("token_offset", "digest", "text_offset", "timeout", "detach", "leave_running")


@pytest.mark.parametrize("value", ODD, ids=lambda value: repr(value)[:20])
async def test_whatever_is_given_an_error_is_one_of_ours(value: Any) -> None:
    """With nobody there: what is accepted ends as Unavailable."""
    client = AsyncClient(NOWHERE, retry=Retry.never())
    options = [*KNOWN, "no_such_option"]
    calls: list[Callable[[], Any]] = [
        *(partial(client.generate, "x", **{name: value}) for name in options),  # type: ignore[arg-type]
        *(partial(client.chat, [{"role": "user", name: value}]) for name in Message.__dataclass_fields__),
        *(partial(client.resume, "s", **{name: value}) for name in POSITION),
        *(partial(Retry, **{name: value}) for name in Retry.__dataclass_fields__),
        *(partial(AsyncClient, NOWHERE, **{name: value}) for name in ("retry", "tenant", "timeout")),
        *(partial(call, value) for call in (client.generate, client.chat, client.resume, AsyncClient)),
        *(partial(call, value) for call in (client.cancel, client.get_session, client.delete_session, client.tokenize)),
        *(partial(call, [value]) for call in (client.generate, client.chat, client.tokenize, AsyncClient)),
        partial(client.chat, [{"role": "user", "tool_calls": [value]}]), partial(client.chat, [], thinking=value),
        partial(client.tokenize, "x", model=value), partial(client.tokenize, [], thinking=value),
    ]  # fmt: skip
    for call in calls:
        try:
            answer = call()
            if inspect.isawaitable(answer):
                await answer
        except HedgerowError as error:
            str(error)


@pytest.mark.parametrize(
    ("given", "field", "limit"),
    [
        ({"token_offset": -1}, "token_offset", r"a whole number in \[0, 4294967295\]"),
        ({"token_offset": 1 << 32}, "token_offset", r"a whole number in \[0, 4294967295\]"),
        ({"text_offset": -1}, "text_offset", r"a whole number in \[0, 18446744073709551615\]"),
        ({"token_offset": None}, "token_offset", "given"), ({"digest": b"short"}, "digest", "16 bytes, or none"),
        ({"digest": "d" * 16}, "digest", "16 bytes, or none"), ({"session_id": ""}, "session_id", "the id"),
        ({"timeout": 0}, "timeout", "seconds, more than 0"), ({"leave_running": 1}, "leave_running", "True or False"),
        ({"detach": False, "leave_running": True}, "leave_running", "not True beside detach=False"),
    ],
)  # fmt: skip
def test_a_position_that_cannot_be_is_refused(given: dict[str, Any], field: str, limit: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"^{field}: .* is not allowed: .*{limit}"):
        AsyncClient(NOWHERE).resume(**{"session_id": "s1"} | given)


def test_addresses_and_tenants_that_cannot_be_are_refused() -> None:
    for address in ([], [""], "a:1,,b:2", ["a:1", 5], {"a:1"}, ["a\nb"], ","):
        with pytest.raises(InvalidRequest, match=r"^address: "):
            AsyncClient(address)  # type: ignore[arg-type]
    assert AsyncClient(" a:1 , b:2,a:1").addresses == AsyncClient(("a:1", "b:2")).addresses == ("a:1", "b:2")
    for tenant in ("two words", "ä", "t" * 129, None, b"t"):
        with pytest.raises(InvalidRequest, match=r"^tenant: "):
            AsyncClient(NOWHERE, tenant=tenant)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=r"^tenant: 'b' is not allowed: that of the client, 'a', or none"):
        AsyncClient(NOWHERE, tenant="a").generate("x", tenant="b")
    AsyncClient(NOWHERE, tenant="a").generate("x", tenant="a")
