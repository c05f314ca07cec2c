"""Conversations with tools through the real stack: what reaches the model, and its answer in parts.

The bundled model was not trained on tools. What it draws is steered by biases, so that markers come for certain.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from hedgerow.cli.supervisor import Stack
from hedgerow.client import (
    AsyncClient,
    ContentDelta,
    Delta,
    Message,
    Options,
    Position,
    ReasoningDelta,
    ToolCall,
    process_status,
)
from hedgerow.errors import InvalidRequest, Unsupported
from hedgerow.v1 import common_pb2
from tests.kimi import load_bundled, published
from tests.kvstore_calls import Session, gateway_on
from tests.stack import Models, another_gateway

ROOT = Path(__file__).resolve().parents[2]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "area",
            "description": "Multiplies.",
            "parameters": {
                "type": "object",
                "properties": {"width": {"type": "integer"}, "height": {"type": "integer", "default": 1}},
                "required": ["width"],
            },
        },
    }
]
DECLARED = (
    "<|im_system|>tool_declare<|im_middle|># Tools\n\n## functions\nnamespace functions {\n// Multiplies.\n"
    "type area = (_: {\n  width: number,\n  // Default: 1\n  height?: number\n}) => any;\n}\n<|im_end|>"
)
AS_JSON = (
    '<|im_system|>tool_declare<|im_middle|>[{"function":{"description":"Multiplies.","name":"area","parameters":'
    '{"properties":{"height":{"default":1,"type":"integer"},"width":{"type":"integer"}},"required":["width"],'
    '"type":"object"}},"type":"function"}]<|im_end|>'
)
USER = Message("user", "def area(width, height):")
ASKED = "<|im_user|>user<|im_middle|>def area(width, height):<|im_end|>"
CALLED = [
    USER,
    Message("assistant", tool_calls=[ToolCall("call_9", "area", '{"width": 2}')]),
    Message("tool", "2", tool_call_id="call_9"),
]
GREEDY: Options = {"max_tokens": 24, "ignore_eos": True, "temperature": 0.0}

pytestmark = pytest.mark.usefixtures("idle")


def ids(models: Models, text: str) -> list[int]:
    """What the published tokenizer makes of it, markers included."""
    return published(models.target).encode(text, allowed_special="all")


async def test_tools_are_declared_to_the_model_as_published(models: Models, stack: Stack, client: AsyncClient) -> None:
    tokens = await client.tokenize([USER], tools=TOOLS)
    answer = "<|im_assistant|>assistant<|im_middle|><think></think>"
    assert (await process_status(stack.admin_address("gateway"))).facts["template"] == "k2.6"
    assert list(tokens) == ids(models, f"{DECLARED}{ASKED}{answer}")
    thinking = await client.tokenize(CALLED, tools=json.dumps(TOOLS), thinking=True)
    assert list(thinking) == ids(
        models,
        f"{DECLARED}{ASKED}<|im_assistant|>assistant<|im_middle|><think></think><|tool_calls_section_begin|>"
        '<|tool_call_begin|>functions.area:0<|tool_call_argument_begin|>{"width": 2}<|tool_call_end|>'
        "<|tool_calls_section_end|><|im_end|><|im_system|>tool<|im_middle|>## Return of functions.area:0\n2<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|><think>",
    )
    result = await client.chat([USER], tools=TOOLS, **GREEDY).result()
    assert result.usage.prompt_tokens == len(tokens), "and the model was given them"
    assert result.answer.content == result.text


async def test_a_folders_own_template_is_used_where_the_operator_asks_for_it(models: Models, stack: Stack) -> None:
    """The bundled folder's says what ours says, tools as TypeScript too."""
    with another_gateway(stack, models, chat_template="folder") as address:
        async with AsyncClient(address) as other:
            tokens = await other.tokenize([USER], tools=TOOLS)
            result = await other.chat([USER], tools=TOOLS, **GREEDY).result()
    assert list(tokens) == ids(models, f"{DECLARED}{ASKED}<|im_assistant|>assistant<|im_middle|><think></think>")
    assert result.usage.prompt_tokens == len(tokens)


async def test_another_members_template_is_used_where_the_operator_names_it(models: Models, stack: Stack) -> None:
    with another_gateway(stack, models, chat_template="k2-thinking") as address:
        async with AsyncClient(address) as other:
            tokens = await other.tokenize([USER], tools=TOOLS)
            with pytest.raises(Unsupported, match=r"chat\.thinking"):
                await other.tokenize([USER], thinking=False)
    greeting = "<|im_system|>system<|im_middle|>You are Kimi, an AI assistant created by Moonshot AI.<|im_end|>"
    assert list(tokens) == ids(models, f"{AS_JSON}{greeting}{ASKED}<|im_assistant|>assistant<|im_middle|>")


def joined(deltas: Sequence[Delta]) -> list[tuple[str, str]]:
    """Kinds and texts, neighbours of one kind together."""
    whole: list[tuple[str, str]] = []
    for delta in deltas:
        assert isinstance(delta, ReasoningDelta | ContentDelta)
        if whole and whole[-1][0] == delta.kind:
            whole[-1] = (delta.kind, whole[-1][1] + delta.text)
        elif delta.text:
            whole.append((delta.kind, delta.text))
    return whole


async def test_a_resumed_stream_goes_on_in_the_same_parts(client: AsyncClient) -> None:
    """From every offset, while what the parts depend on is only in the log: this model thinks after it has begun."""
    think, end_think = map(load_bundled().special, ("<think>", "</think>"))
    steered: Options = {**GREEDY, "temperature": 1.0, "seed": 1, "logit_bias": {think: 14.0, end_think: -60.0}}
    stream = client.chat([USER], thinking=False, **steered)
    chunks = [chunk async for chunk in stream]
    tokens = [token for chunk in chunks for token in chunk.tokens]
    assert 0 < tokens.index(think) < len(tokens) - 1
    assert all(chunk.deltas for chunk in chunks)
    whole = joined([delta for chunk in chunks for delta in chunk.deltas])
    assert [kind for kind, _ in whole] == ["content", "reasoning"]
    for chunk in chunks:
        known = Position(
            stream.session_id,
            token_offset=chunk.token_offset + len(chunk.tokens),
            digest=chunk.digest,
            text_offset=chunk.text_offset + len(chunk.text.encode()),
        )
        if known.token_offset == len(tokens):
            break
        got = [event async for event in client.resume(*known)]
        before = [delta for each in chunks if each.token_offset < known.token_offset for delta in each.deltas]
        after = [delta for event in got for delta in event.deltas]
        assert joined([*before, *after]) == whole
    await client.delete_session(stream.session_id)


async def test_a_whole_answer_with_calls_comes_in_parts_and_goes_back_as_history(
    stack: Stack, client: AsyncClient, models: Models
) -> None:
    """No bundled model writes one, so another gateway has put it into the log; everything else is the real stack."""
    call = "<|tool_call_begin|>functions.area:{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
    text = (
        "Two of them.</think>Let me see. <|tool_calls_section_begin|>"
        + call.format(0, '{"width": 2, "height": 3}') + call.format(1, '{"width": 4')
        + call.format(2, '{"width": 5}') + "<|tool_calls_section_end|><|im_end|>"
    )  # fmt: skip
    session = Session(prompt=await client.tokenize([USER], tools=TOOLS, thinking=True))
    tokens = ids(models, text)
    async with gateway_on(int(stack.address("kvstore").rpartition(":")[2])) as other:
        await other.create(session)
        entry = session.entry(tokens, 0, finish_reason=common_pb2.FINISH_REASON_STOP, usage=common_pb2.Usage(steps=9))
        assert (await other.status(entry))[0] == "OK"
    async with AsyncClient(stack.address("gateway"), tenant="t") as ours:
        result = await ours.resume(session.session_id).result()
        stored = await ours.get_session(session.session_id)
        await ours.delete_session(session.session_id)
    assert list(result.tokens) == tokens
    answer = result.answer
    assert (answer.reasoning_content, answer.content) == ("Two of them.", "Let me see. ")
    assert answer.tool_calls == [
        ToolCall("functions.area:0", "area", '{"width": 2, "height": 3}'),
        ToolCall("functions.area:2", "area", '{"width": 5}'),
    ]
    assert [(broken.index, broken.arguments) for broken in answer.malformed] == [(1, '{"width": 4')]
    assert (result.finish_reason, stored.finish_reason) == ("tool_calls", "stop")
    results = [
        Message("tool", "6", tool_call_id="functions.area:0"),
        Message("tool", "5", tool_call_id="functions.area:2"),
    ]
    again = await client.tokenize([USER, answer.message(), *results], tools=TOOLS, thinking=True)
    shown = published(models.target).decode(list(again))
    assert shown.startswith(
        f"{DECLARED}{ASKED}<|im_assistant|>assistant<|im_middle|><think>Two of them.</think>Let me see. "
    )
    assert (
        '{"width": 5}<|tool_call_end|><|tool_calls_section_end|><|im_end|><|im_system|>tool<|im_middle|>## Return of '
        in shown
    )


async def test_a_call_that_the_model_does_not_finish_is_said_to_be_malformed(client: AsyncClient) -> None:
    marker = load_bundled().special("<|tool_call_begin|>")
    result = await client.chat(
        [USER], tools=TOOLS, **{**GREEDY, "max_tokens": 2, "logit_bias": {marker: 100.0}}
    ).result()
    assert list(result.tokens) == [marker, marker]
    assert result.text == "<|tool_call_begin|>" * 2, "the text is what it was"
    assert (result.answer.content, result.answer.tool_calls) == ("", [])
    assert [call.malformed for call in result.answer.malformed] == ["a call without arguments"] * 2
    assert result.finish_reason == "length"


@pytest.mark.parametrize(
    ("messages", "tools", "field"),
    [
        ([USER], "{", "chat.tools_json"),
        ([USER], [{"type": "function", "function": {"name": "a b"}}], "chat.tools_json[0].function.name"),
        ([USER], [{"type": "function", "function": {"name": f"f{i}"}} for i in range(129)], "chat.tools_json"),
        ([Message("robot", "x")], None, "chat.messages[0].role"),
        ([USER, Message("tool", "x", tool_call_id="call_1")], None, "chat.messages[1].tool_call_id"),
    ],
)
async def test_bad_tools_and_histories_are_refused_and_start_nothing(
    client: AsyncClient, messages: list[Message], tools: object, field: str
) -> None:
    for refused in (client.tokenize(messages, tools=tools), client.chat(messages, tools=tools, **GREEDY).result()):  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest) as why:
            await refused
        assert why.value.field == field


async def test_the_command_takes_tools(stack: Stack, models: Models, tmp_path: Path) -> None:
    (tmp_path / "tools.json").write_text(json.dumps(TOOLS))
    words = ["--address", stack.address("gateway"), "--tools", str(tmp_path / "tools.json")]
    chat = ["chat", "def area(width, height):", *words, "--max-tokens", "8", "--thinking"]
    tokenize = ["tokenize", "--chat", "def area(width, height):", *words]
    for command in (chat, tokenize):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "hedgerow.cli", *command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        out, err = await process.communicate()
        assert process.returncode == 0, err.decode()
    assert out.decode().split() == [
        str(each) for each in ids(models, f"{DECLARED}{ASKED}<|im_assistant|>assistant<|im_middle|><think></think>")
    ]
