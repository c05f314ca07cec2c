"""Requests that would cost everybody: refused by what the wire message counts, before anything of it is copied."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from hedgerow.errors import InvalidRequest, Unavailable
from hedgerow.v1 import common_pb2 as common
from hedgerow.v1 import gateway_pb2 as pb
from services.gateway import convert
from services.gateway.limits import known_trace
from services.gateway.messages import Start
from services.gateway.outgoing import MESSAGE_BYTES, At, Outgoing, Told
from services.gateway.quotas import Quotas
from services.gateway.servicer import GatewayServicer
from services.gateway.types import Trace
from tests.unit.gateway_peers import record

CONTEXT = 4096
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
MANY = 200_000
MESSAGE, CALL = pb.ChatMessage(role="user"), pb.ToolCall()


class Reached(Exception):
    """The gateway was asked."""


class GatewayOfNothing:
    """Knows its context length and notes what it is asked for."""

    context_length = CONTEXT

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.quotas = Quotas(lambda tenant: 0)

    async def generate(self, asked: object, seconds_left: float | None) -> None:
        self.asked.append(asked)
        raise Reached

    async def tokenize(self, model: str, prompt: object) -> list[int]:
        self.asked.append(prompt)
        return [1]


class Call:
    """A call's context."""

    def __init__(self, **metadata: str) -> None:
        self._metadata = tuple(metadata.items())

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._metadata

    def time_remaining(self) -> None:
        return None


async def generate(gateway: GatewayOfNothing, request: pb.GenerateRequest, **metadata: str) -> None:
    servicer = GatewayServicer(gateway)  # type: ignore[arg-type]
    async for _ in servicer.Generate(request, Call(**metadata)):  # type: ignore[arg-type]
        pass


def sampling(**lists: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text="x", sampling=common.SamplingParams(**lists))


def chat(*messages: pb.ChatMessage) -> pb.ChatPrompt:
    return pb.ChatPrompt(messages=messages)


TOO_MANY = {
    "messages": (pb.GenerateRequest(chat=chat(*[MESSAGE] * MANY)), "chat.messages", "200000"),
    "calls": (
        pb.GenerateRequest(chat=chat(MESSAGE, pb.ChatMessage(role="assistant", tool_calls=[CALL] * MANY))),
        "chat.messages[1].tool_calls",
        "200000",
    ),
    "calls of many messages": (
        pb.GenerateRequest(chat=chat(*[pb.ChatMessage(role="user", tool_calls=[CALL] * 300)] * 10)),
        "chat.messages[4].tool_calls",
        "1500",
    ),
    "ids": (pb.GenerateRequest(token_ids=common.TokenIds(ids=[1] * MANY)), "token_ids", "200000"),
    "as many ids as the context": (pb.GenerateRequest(token_ids=common.TokenIds(ids=[1] * 4096)), "token_ids", "4096"),
    "stops": (sampling(stop=[""] * MANY), "sampling.stop", "200000"),
    "stop tokens": (sampling(stop_token_ids=[1] * 65), "sampling.stop_token_ids", "65"),
    "bad words": (sampling(bad_words=[""] * MANY), "sampling.bad_words", "200000"),
    "biases": (sampling(logit_bias=dict.fromkeys(range(MANY), 0.0)), "sampling.logit_bias", "200000"),
}


@pytest.mark.parametrize("case", TOO_MANY)
async def test_what_is_too_much_is_refused_before_it_is_converted(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A million empty messages, 8 MB, held the event loop and with it every stream for seconds."""
    monkeypatch.setattr(convert, "generation", pytest.fail)
    request, field, count = TOO_MANY[case]
    gateway = GatewayOfNothing()
    with pytest.raises(InvalidRequest) as refused:
        await generate(gateway, request)
    assert refused.value.field == field
    assert count in str(refused.value.value)
    assert refused.value.limit
    assert gateway.asked == []


async def test_messages_to_be_tokenized_are_counted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "prompt", pytest.fail)
    servicer = GatewayServicer(GatewayOfNothing())  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest) as refused:
        await servicer.Tokenize(pb.TokenizeRequest(chat=chat(*[MESSAGE] * MANY)), Call())  # type: ignore[arg-type]
    assert refused.value.field == "chat.messages"
    assert str(CONTEXT) in refused.value.limit


async def test_a_large_request_is_converted_beside_the_event_loop() -> None:
    gateway = GatewayOfNothing()
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    turning = asyncio.create_task(turn())
    with pytest.raises(Reached):
        await generate(gateway, pb.GenerateRequest(chat=chat(*[pb.ChatMessage(role="user", content="x" * 99)] * 1000)))
    turning.cancel()
    assert turns > 0
    assert len(gateway.asked[0].prompt.messages) == 1000


@pytest.mark.parametrize(
    ("parent", "state", "known"),
    [
        (PARENT, "a=1", (PARENT, "a=1")),
        ("01" + PARENT[2:] + "-more", "", ("01" + PARENT[2:] + "-more", "")),
        (PARENT, "a" * 513, (PARENT, "")),
        (PARENT, "a\n", (PARENT, "")),
        (PARENT + "-more", "", ("", "")),
        (PARENT.upper(), "", ("", "")),
        ("ff" + PARENT[2:], "", ("", "")),
        ("00-" + "0" * 32 + PARENT[35:], "", ("", "")),
        (PARENT[:36] + "0" * 16 + "-01", "", ("", "")),
        ("01" + PARENT[2:] + "-" + "m" * 100, "", ("", "")),
        ("", "a=1", ("", "")),
    ],
)
def test_a_trace_header_that_is_malformed_or_too_long_counts_as_absent(
    parent: str, state: str, known: tuple[str, str]
) -> None:
    assert known_trace(parent, state) == known


async def test_a_trace_comes_from_the_metadata_only_where_the_message_has_none() -> None:
    gateway = GatewayOfNothing()
    with pytest.raises(Reached):
        await generate(gateway, pb.GenerateRequest(text="x"), traceparent=PARENT, tracestate="a=1")
    mine = pb.GenerateRequest(text="x", trace=common.TraceContext(traceparent="mine"))
    with pytest.raises(Reached):
        await generate(gateway, mine, traceparent=PARENT)
    with pytest.raises(Reached):
        await generate(gateway, pb.GenerateRequest(text="x"), traceparent="p" * 8000, tracestate="a" * 8000)
    assert [asked.trace for asked in gateway.asked] == [Trace(PARENT, "a=1"), Trace("mine"), Trace()]


def start(session_id: str, tokens: int, attempt: int = 1) -> Start:
    return Start(record(session_id, (7,) * tokens), 1, attempt, (1, 2), b"d" * 16, 0, 0, Trace(), False)


def taken(out: Outgoing) -> Told:
    told = out.take()
    assert told is not None
    return told


def test_starts_that_leave_together_fit_a_message_and_keep_their_order() -> None:
    """Prompts of many sessions in one message passed the limit of 64 MiB, and everybody's stream broke."""
    out = Outgoing()
    for i in range(60):
        out.start(start(f"s{i}", 200_000))
    out.cancel(At("other", 1, 1))
    out.committed(At("other", 1, 1, 5))
    seen: list[str] = []
    messages = 0
    while (told := out.take()) is not None:
        messages += 1
        message = convert.attach(told)
        assert message.ByteSize() <= MESSAGE_BYTES + 5 * 200_000
        assert len(message.cancel) == len(message.committed) == (messages == 1)
        seen += [s.session_id for s in message.start]
    assert messages > 1
    assert seen == [f"s{i}" for i in range(60)]


def test_a_start_that_is_cancelled_while_it_waits_for_its_message_never_leaves() -> None:
    out = Outgoing()
    for i in range(3):
        out.start(start(f"s{i}", 3_000_000))
    assert [s.record.session_id for s in taken(out).starts] == ["s0"]
    out.cancel(At("s1", 1, 1))
    out.cancel(At("s0", 1, 1))
    told = taken(out)
    assert ([s.record.session_id for s in told.starts], told.cancels) == (["s2"], [At("s0", 1, 1)])


def test_tokens_that_come_after_a_start_are_not_in_it() -> None:
    out, tokens = Outgoing(), [1, 2]
    out.start(start("s0", 1)._replace(committed=tokens))
    tokens.append(3)
    assert list(taken(out).starts[0].committed) == [1, 2]


async def test_without_a_verifier_a_request_is_told_so() -> None:
    class Detached(GatewayOfNothing):
        @property
        def context_length(self) -> int:  # type: ignore[override]
            raise Unavailable("verifier", "no stream to it is open")

    with pytest.raises(Unavailable, match="verifier"):
        await generate(Detached(), pb.GenerateRequest(text="x"))
