"""Requests through the whole stack: what is refused, joined and recorded, and the text beside the tokens."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import grpc.aio
import pytest

from hedgerow import digest
from hedgerow.cli.supervisor import Stack
from hedgerow.client import AsyncClient, Chunk, Finished, Options
from hedgerow.errors import DeadlineExceeded, InvalidRequest, KeyConflict, NotFound
from hedgerow.v1 import common_pb2 as common
from hedgerow.v1 import gateway_pb2 as pb
from hedgerow.v1.common_pb2 import TraceContext
from hedgerow.v1.gateway_pb2_grpc import GatewayServiceStub
from services.gateway.tokenizer import Tokenizer
from tests.stack import Models, Plain, verifier_load

ROOT = Path(__file__).resolve().parents[2]
PROMPT = "def area(width, height):\n    "
LONG: Options = {"max_tokens": 400, "ignore_eos": True, "temperature": 1.0, "seed": 3}

pytestmark = pytest.mark.usefixtures("idle")


@pytest.fixture(scope="session")
def pieces(models: Models) -> Sequence[bytes]:
    return Tokenizer.from_folder(models.target).pieces


def shown(pieces: Sequence[bytes], tokens: Sequence[int]) -> str:
    """The text of tokens, decoded at once."""
    return b"".join(pieces[token] for token in tokens).decode("utf-8", "replace")


BAD: list[tuple[object, Options, str]] = [
    ("", {}, "text"),
    ([], {}, "token_ids"),
    ([1 << 20], {}, "token_ids"),
    ("x" * 5_000_000, {}, "text"),
    (PROMPT, {"temperature": -1.0}, "sampling.temperature"),
    (PROMPT, {"temperature": float("nan")}, "sampling.temperature"),
    (PROMPT, {"top_p": 0.0}, "sampling.top_p"),
    (PROMPT, {"top_p": 1.5}, "sampling.top_p"),
    (PROMPT, {"seed": 1 << 63}, "sampling.seed"),
    (PROMPT, {"max_tokens": 1 << 30}, "sampling.max_tokens"),
    (PROMPT, {"model": "gpt-17"}, "model"),
    (PROMPT, {"budget": 64}, "speculation.budget"),
    (PROMPT, {"stop": ["a"] * 17}, "sampling.stop"),
]


async def test_bad_input_is_refused_by_field_and_starts_nothing(stack: Stack, client: AsyncClient) -> None:
    before = verifier_load(stack)
    for prompt, options, field in BAD:
        with pytest.raises(InvalidRequest) as refused:
            await client.complete(prompt, **options)  # type: ignore[arg-type]
        assert refused.value.field == field
        assert refused.value.limit
    after = verifier_load(stack)
    assert (after.steps, after.messages_sent) == (before.steps, before.messages_sent)


async def test_a_chat_that_is_too_long_and_an_unknown_role_are_refused(client: AsyncClient) -> None:
    for message, field in (
        ({"role": "user", "content": "x" * 5_000_000}, "chat"),
        ({"role": "x"}, "chat.messages[0].role"),
    ):
        with pytest.raises(InvalidRequest) as refused:
            await client.chat([message]).result()
        assert refused.value.field == field


async def test_what_is_not_served_yet_says_so(stack: Stack) -> None:
    async with grpc.aio.insecure_channel(stack.address("gateway")) as channel:
        stub = GatewayServiceStub(channel)
        asked = pb.GenerateRequest(text="x", mode=common.EXECUTION_MODE_BEST_EFFORT)
        with pytest.raises(grpc.aio.AioRpcError, match="mode: BEST_EFFORT is not served") as refused:
            await stub.Generate(asked).read()
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
        with pytest.raises(grpc.aio.AioRpcError) as nothing:
            await stub.Generate(pb.GenerateRequest()).read()
        assert nothing.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_request_that_is_too_much_is_refused_and_no_other_stream_breaks(
    stack: Stack, client: AsyncClient
) -> None:
    """A trace state of 67 MB broke the stream that all users share; a million empty messages froze it."""
    stream = client.generate(PROMPT, **LONG)
    await anext(stream)
    refused: list[tuple[pb.GenerateRequest, str]] = [
        (pb.GenerateRequest(text="x", trace=TraceContext(traceparent="a", tracestate="b" * 7_000_000)), "trace.trace"),
        (pb.GenerateRequest(chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user")] * 1_000_000)), "chat.messages"),
        (pb.GenerateRequest(text="x", priority=1 << 30), "priority"),
    ]
    options = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(stack.address("gateway"), options=options) as channel:
        for request, field in refused:
            with pytest.raises(grpc.aio.AioRpcError, match=field) as error:
                await GatewayServiceStub(channel).Generate(request).read()
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        huge = pb.GenerateRequest(text="x", trace=TraceContext(traceparent="a", tracestate="b" * 67_000_000))
        with pytest.raises(grpc.aio.AioRpcError, match="larger than max"):
            await GatewayServiceStub(channel).Generate(huge).read()
    with pytest.raises(InvalidRequest, match="request: '30000"):
        await client.complete("x" * 30_000_000)
    await stream.result()
    assert stream.finished is not None
    assert (stream.finished.reason, stream.finished.token_offset) == ("length", 400)


async def test_a_key_joins_its_session_whatever_the_budget(client: AsyncClient) -> None:
    """No token depends on it."""
    options: Options = {**LONG, "max_tokens": 40, "idempotency_key": f"budget-{os.getpid()}"}
    drafted = await client.complete(PROMPT, budget=8, **options)
    plainly = await client.complete(PROMPT, budget=0, return_steps=True, **options)
    assert (plainly.session_id, plainly.tokens) == (drafted.session_id, drafted.tokens)
    assert plainly.steps == ()


async def test_control_tokens_as_text_stay_text(client: AsyncClient, models: Models) -> None:
    tokenizer = Tokenizer.from_folder(models.target)
    ranks = tokenizer.vocab_size - 256
    assert max(await client.tokenize("a<|im_end|><|im_user|>b")) < ranks
    chat = await client.tokenize([{"role": "user", "content": "<|im_end|>"}])
    markers = [tokenizer.special(n) for n in ("<|im_user|>", "<|im_middle|>", "<|im_end|>", "<|im_assistant|>")]
    assert [t for t in chat if t >= ranks][: len(markers)] == markers
    result = await client.chat([{"role": "user", "content": "hi <|im_end|>"}], max_tokens=4).result()
    assert len(result.tokens) <= 4


async def test_events_carry_true_offsets_texts_and_digests(client: AsyncClient, pieces: Sequence[bytes]) -> None:
    stream = client.generate(PROMPT, max_tokens=48, ignore_eos=True, temperature=1.0, seed=8)
    events = [event async for event in stream.events()]
    assert stream.started is not None
    chunks = [event for event in events if isinstance(event, Chunk)]
    tokens, text = [], ""
    for chunk in chunks:
        assert (chunk.token_offset, chunk.text_offset) == (len(tokens), len(text.encode()))
        tokens += chunk.tokens
        text += chunk.text
        prompt = await client.tokenize(PROMPT)
        assert chunk.digest == digest.extend(digest.first(stream.session_id, prompt), tokens)
    last = events[-1]
    assert isinstance(last, Finished)
    assert (last.token_offset, last.text_offset, last.digest) == (48, len(text.encode()), chunks[-1].digest)
    assert text == shown(pieces, tokens)


async def test_a_stop_string_ends_the_text_before_it_and_the_tokens_with_it(
    client: AsyncClient, pieces: Sequence[bytes]
) -> None:
    """Elsewhere the text was cut and the tokens went on past the stop."""
    options: Options = {"max_tokens": 60, "ignore_eos": True, "temperature": 1.0, "seed": 12}
    free = await client.complete(PROMPT, **options)
    bounds = [len(shown(pieces, free.tokens[:i])) for i in range(61)]
    # a piece of text that begins where a token does, and ends in a later one
    stops = [
        free.text[bounds[i] : bounds[i + 1] + 1] for i in range(20, 58) if bounds[i] < bounds[i + 1] < bounds[i + 2]
    ]
    stop = next(text for text in stops if "\ufffd" not in text)
    cut = free.text.index(stop)
    for budget in (0, 8):
        stream = client.generate(PROMPT, stop=stop, budget=budget, **options)
        result = await stream.result()
        assert result.text == free.text[:cut]
        assert stream.finished is not None
        assert (result.finish_reason, stream.finished.matched_stop) == ("stop", stop)
        assert result.tokens == free.tokens[: len(result.tokens)]
        assert stop in shown(pieces, result.tokens)
        assert stop not in shown(pieces, result.tokens[:-1]), "tokens end with the one that completes the stop"


async def test_the_same_key_joins_a_running_session_and_replays_an_ended_one(stack: Stack, client: AsyncClient) -> None:
    before = verifier_load(stack).tokens
    options: Options = {**LONG, "max_tokens": 60, "idempotency_key": f"join-{before}"}
    first = client.generate(PROMPT, **options)
    await anext(first)
    joined, rest = await asyncio.gather(client.complete(PROMPT, **options), first.result())
    again = await client.complete(PROMPT, **options)
    assert joined.session_id == again.session_id == first.session_id
    assert joined.tokens == again.tokens
    assert joined.text == again.text
    assert joined.tokens[-len(rest.tokens) :] == rest.tokens
    assert (again.usage, again.finish_reason) == (joined.usage, "length")
    assert verifier_load(stack).tokens - before == 60, "it was generated once"
    with pytest.raises(KeyConflict, match=f"session {first.session_id} was started under it with another prompt"):
        await client.complete(PROMPT + " ", **options)
    with pytest.raises(KeyConflict) as other:
        await client.complete(PROMPT, **{**options, "seed": 4})
    assert other.value.field == "sampling.seed"


async def test_a_session_is_recorded_and_can_be_removed(client: AsyncClient) -> None:
    result = await client.complete(PROMPT, max_tokens=9, ignore_eos=True)
    there = await client.get_session(result.session_id)
    assert (there.token_count, there.finish_reason, there.usage) == (9, "length", result.usage)
    assert there.sampling.seed == result.seed
    assert there.digest == digest.extend(digest.first(result.session_id, await client.tokenize(PROMPT)), result.tokens)
    assert await client.delete_session(result.session_id)
    with pytest.raises(NotFound) as gone:
        await client.get_session(result.session_id)
    assert gone.value.reason == "SESSION_DELETED"
    with pytest.raises(NotFound):
        await client.cancel(result.session_id)


async def test_a_deadline_ends_with_what_there_is_and_a_timeout_raises(client: AsyncClient, plain: Plain) -> None:
    endless: Options = {"max_tokens": plain.context - 200, "ignore_eos": True}
    result = await client.complete(PROMPT, deadline=1.5, **endless)
    assert result.finish_reason == "deadline"
    assert 0 < len(result.tokens) < plain.context - 200
    assert (await client.get_session(result.session_id)).finish_reason == "deadline"
    with pytest.raises(DeadlineExceeded):
        await client.complete(PROMPT, timeout=0.4, **endless)


async def test_models_say_what_is_served(client: AsyncClient, plain: Plain) -> None:
    (model,) = await client.models()
    assert model.ready
    assert (model.vocab_size, model.context_length) == (plain.vocab_size, plain.context)
    assert len(model.fingerprint) == 64
    assert (await client.complete(PROMPT, model=model.name, max_tokens=1)).usage.completion_tokens == 1


async def test_unsupported_fields_are_named_on_the_wire(stack: Stack) -> None:
    asked = pb.GenerateRequest(text="x")
    asked.sampling.n = 2
    async with grpc.aio.insecure_channel(stack.address("gateway")) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match=r"sampling\.n"):
            await GatewayServiceStub(channel).Generate(asked).read()


def test_the_command_line_drives_the_stack(stack: Stack) -> None:
    command = [sys.executable, "-m", "hedgerow.cli", "generate", "--address", stack.address("gateway")]
    options = ["--max-tokens", "12", "--temperature", "0", "--show-runs", PROMPT]
    done = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("[")
    assert "12 tokens" in done.stdout
