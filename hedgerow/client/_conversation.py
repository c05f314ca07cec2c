"""A conversation to protobuf, and an answer's parts from it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from hedgerow.client._chat import ContentDelta, Delta, Message, ReasoningDelta, ToolCall, ToolCallDelta
from hedgerow.client._fields import fill
from hedgerow.errors import InvalidRequest
from hedgerow.v1 import gateway_pb2 as pb

Messages = Iterable[Message | Mapping[str, Any]]
Tools = Iterable[Mapping[str, Any]] | str
Row = TypeVar("Row")


def chat(
    messages: Messages,
    tools: Tools | None = None,
    thinking: bool | None = None,
    preserve_thinking: bool | None = None,
) -> pb.ChatPrompt:
    """A conversation; messages may be mappings with the same keys, or as OpenAI has them. Raises InvalidRequest.

    `tools`: OpenAI's array, or that as JSON.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Iterable):
        raise InvalidRequest("messages", messages, "a sequence of messages")
    prompt = pb.ChatPrompt(messages=[_message(f"messages[{i}]", message) for i, message in enumerate(messages)])
    if tools is not None:
        fill(prompt, "tools_json", tools if isinstance(tools, str) else _as_json(tools), "tools")
    fill(prompt, "thinking", thinking)
    fill(prompt, "preserve_thinking", preserve_thinking)
    return prompt


def delta(d: pb.AnswerDelta) -> Delta | None:
    """More of one part of an answer; None: of a part that is newer than this client."""
    kind = d.WhichOneof("kind")
    if kind == "reasoning":
        return ReasoningDelta(d.reasoning)
    if kind == "content":
        return ContentDelta(d.content)
    call = d.tool_call
    if kind == "tool_call":
        return ToolCallDelta(call.index, call.id, call.name, call.arguments, call.complete, call.malformed)
    return None


def _as_json(tools: Tools) -> str:
    if isinstance(tools, bytes | Mapping) or not isinstance(tools, Iterable):
        raise InvalidRequest("tools", tools, "a sequence of tools, or a JSON array of them")
    try:
        return json.dumps(list(tools), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest("tools", tools, f"what JSON can hold: {error}") from None


def _message(where: str, given: Message | Mapping[str, Any]) -> pb.ChatMessage:
    if isinstance(given, Mapping) and "reasoning" in given:
        given = {"reasoning_content": given["reasoning"], **{k: v for k, v in given.items() if k != "reasoning"}}
    m = _given(Message, where, given)
    message = pb.ChatMessage()
    fill(message, "content", _text(f"{where}.content", m.content), f"{where}.content")
    for name in ("role", "name", "reasoning_content", "tool_call_id"):
        fill(message, name, getattr(m, name), f"{where}.{name}")
    calls = () if m.tool_calls is None else m.tool_calls
    if isinstance(calls, str | bytes | Mapping) or not isinstance(calls, Iterable):
        raise InvalidRequest(f"{where}.tool_calls", calls, "a sequence of calls")
    for i, given_call in enumerate(calls):
        there = f"{where}.tool_calls[{i}]"
        c, call = _given(ToolCall, there, _flat(given_call)), message.tool_calls.add()
        for name in ("id", "name", "arguments"):
            fill(call, name, getattr(c, name), f"{there}.{name}")
    return message


def _text(where: str, content: Any) -> Any:
    """Parts put together. Raises InvalidRequest for one that is no text."""
    if isinstance(content, str | bytes | Mapping) or not isinstance(content, Iterable):
        return content
    texts: list[str] = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text":
            found = type(part).__name__ if kind is None else kind
            raise InvalidRequest(f"{where}[{i}].type", found, '"text": images, audio and files are not served')
        if not isinstance(part.get("text"), str):
            raise InvalidRequest(f"{where}[{i}].text", part.get("text"), "a text")
        texts.append(part["text"])
    return "".join(texts)


def _flat(call: Any) -> Any:
    """OpenAI's form of a call, its function's fields beside its id."""
    if isinstance(call, Mapping) and isinstance(call.get("function"), Mapping):
        return {**{k: v for k, v in call.items() if k not in ("function", "type", "index")}, **call["function"]}
    return call


def _given(kind: type[Row], where: str, value: Any) -> Row:
    """A `kind`, which may be given as a mapping with its fields."""
    if isinstance(value, kind):
        return value
    try:
        return kind(**value)
    except TypeError:
        fields = ", ".join(kind.__dataclass_fields__)  # type: ignore[attr-defined]
        raise InvalidRequest(where, value, f"a {kind.__name__}, or a mapping with its fields: {fields}") from None
