"""Conversations with tools: what the SDK sends, what it makes of an answer's parts, and how the command shows them."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hedgerow.cli.answer import DIM, PLAIN
from hedgerow.cli.command import REFUSED
from hedgerow.client import Answer, ContentDelta, Message, ReasoningDelta, ToolCall, ToolCallDelta
from hedgerow.errors import InvalidRequest
from hedgerow.v1 import gateway_pb2 as pb
from tests.unit.client_gateway import chunk, finished, started
from tests.unit.test_client_cli import Terminal, run
from tests.unit.test_client_sync import served

TOOLS = [{"type": "function", "function": {"name": "f", "description": "é", "parameters": {"type": "object"}}}]
CALL = ToolCall("functions.f:0", "f", '{"x": 1}')
USER = Message("user", "hi")


def parts(offset: int, text: str, *deltas: pb.AnswerDelta) -> pb.SessionEvent:
    event = chunk(offset, [offset + 1], text)
    event.chunk.deltas.extend(deltas)
    return event


def called(**fields: Any) -> pb.AnswerDelta:
    return pb.AnswerDelta(tool_call=pb.ToolCallDelta(**fields))


ANSWERED = [
    started(),
    parts(0, "Hm", pb.AnswerDelta(reasoning="Hm")),
    parts(1, ".</think>", pb.AnswerDelta(reasoning=".")),
    parts(2, "Look", pb.AnswerDelta(content="Look")),
    parts(3, "<|tool_calls_section_begin|>", pb.AnswerDelta(content="")),
    parts(4, "f", called(id=CALL.id, name="f"), pb.AnswerDelta()),  # and a part that this client does not know
    parts(5, "{", called(arguments='{"x"')),
    parts(6, "}", called(arguments=": 1}", complete=True), called(index=1, arguments="{", malformed="no JSON")),
    finished("TOOL_CALLS", 7),
]


def test_an_answers_parts_are_put_together() -> None:
    with served(ANSWERED) as (_, client):
        stream = client.chat([USER], tools=TOOLS)
        answer = Answer()
        chunks = list(stream)
    for each in chunks:
        answer.add(each)
    assert (answer.reasoning_content, answer.content) == ("Hm.", "Look")
    assert answer.tool_calls == [CALL]
    assert answer.malformed == [ToolCallDelta(1, arguments="{", malformed="no JSON")]
    assert answer.message() == Message("assistant", "Look", reasoning_content="Hm.", tool_calls=(CALL,))
    assert chunks[0].deltas == (ReasoningDelta("Hm"),)
    assert chunks[2].deltas == (ContentDelta("Look"),)
    assert chunks[4].deltas == (ToolCallDelta(0, CALL.id, "f"),)
    assert stream.finished is not None
    assert stream.finished.reason == "tool_calls"


def test_a_result_has_them_and_goes_on_in_the_conversation() -> None:
    with served(ANSWERED, ANSWERED) as (server, client):
        result = client.chat([USER], tools=TOOLS).result()
        assert result.answer.tool_calls == [CALL]
        history = [USER, result.answer.message(), Message("tool", "7", tool_call_id=CALL.id)]
        client.chat(history, tools=json.dumps(TOOLS)).result()
    assert [json.loads(request.chat.tools_json) for request in server.requests] == [TOOLS, TOOLS]
    told = server.requests[1].chat.messages[1]
    assert (told.role, told.content, told.reasoning_content) == ("assistant", "Look", "Hm.")
    assert [(call.id, call.name, call.arguments) for call in told.tool_calls] == [(CALL.id, "f", '{"x": 1}')]


def test_without_parts_all_text_is_content() -> None:
    """Outside of a chat, or of a gateway that is older than parts are."""
    with served([started(), chunk(0, [1], "a<think>"), chunk(1, [2], "b"), finished("STOP", 2)]) as (_, client):
        assert client.generate("x").result().answer.message() == Message("assistant", "a<think>b")


def test_messages_as_openai_has_them_are_taken() -> None:
    openai = {
        "role": "assistant",
        "content": None,
        "reasoning": "r",
        "tool_calls": [{"id": "c", "type": "function", "index": 0, "function": {"name": "f", "arguments": "{}"}}],
    }
    texts = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    with served(ANSWERED) as (server, client):
        client.chat([texts, openai]).result()
    first, second = server.requests[0].chat.messages
    assert first.content == "ab"
    assert (second.content, second.reasoning_content) == ("", "r")
    assert [(call.id, call.name, call.arguments) for call in second.tool_calls] == [("c", "f", "{}")]
    assert not server.requests[0].chat.tools_json


@pytest.mark.parametrize(
    ("message", "field", "value"),
    [
        ([{"type": "image_url", "image_url": {"url": "data:"}}], "messages[0].content[0].type", "image_url"),
        ([{"type": "text", "text": "a"}, {"type": "input_audio"}], "messages[0].content[1].type", "input_audio"),
        (["a"], "messages[0].content[0].type", "str"),
        ([{"type": "text"}], "messages[0].content[0].text", None),
    ],
)
def test_what_is_no_text_in_a_message_is_refused_by_its_name(message: Sequence[Any], field: str, value: object) -> None:
    with served() as (server, client), pytest.raises(InvalidRequest) as refused:
        client.chat([{"role": "user", "content": message}])
    assert (refused.value.field, refused.value.value) == (field, value)
    assert not server.requests


@pytest.mark.parametrize("tools", [7, {"type": "function"}, [{"x": object()}], [float("nan")], b"[]"])
def test_tools_that_json_cannot_hold_are_refused(tools: Any) -> None:
    with served() as (_, client), pytest.raises(InvalidRequest) as refused:
        client.chat([USER], tools=tools)
    assert refused.value.field == "tools"


def test_the_command_shows_reasoning_apart(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with served(ANSWERED, ANSWERED) as (server, _):
        assert run(server, "chat", "hi") == 0
        piped = capsys.readouterr()
        terminal = Terminal()
        monkeypatch.setattr(sys, "stdout", terminal)
        assert run(server, "chat", "hi") == 0
    line = 'tool call functions.f:0: {"x": 1}\n'
    assert piped.out == f"Look\n{line}", "a pipe gets what the model says, and what it calls"
    assert piped.err == "Hm.\nhedgerow: tool call 1 cannot be used: no JSON\n"
    assert terminal.getvalue() == f"{DIM}Hm{PLAIN}{DIM}.{PLAIN}\nLook\n{line}"


def test_the_command_declares_tools_and_keeps_calls_in_its_conversation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tools.json").write_text(json.dumps(TOOLS))
    lines = iter(["hi", "go on"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines, "/exit"))
    with served(ANSWERED, ANSWERED) as (server, _):
        assert run(server, "chat", "--tools", str(tmp_path / "tools.json"), "--json") == 0
        assert run(server, "chat", "x", "--tools", str(tmp_path / "none.json")) == REFUSED
        assert run(server, "tokenize", "ab", "--tools", str(tmp_path / "tools.json")) == REFUSED
    assert [json.loads(request.chat.tools_json) for request in server.requests] == [TOOLS, TOOLS]
    told = server.requests[1].chat.messages
    assert [(m.role, m.content, len(m.tool_calls)) for m in told] == [
        ("user", "hi", 0), ("assistant", "Look", 1), ("user", "go on", 0),
    ]  # fmt: skip
    out = capsys.readouterr()
    events = [json.loads(event) for event in out.out.splitlines()]
    assert events[1]["deltas"] == [{"text": "Hm", "kind": "reasoning"}]
    assert events[5]["deltas"][0]["kind"] == "tool_call"
    assert "--tools: " in out.err
