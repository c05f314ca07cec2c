"""K2.6's chat template: messages to token ids.

A turn is marker, name, `<|im_middle|>`, body, `<|im_end|>`; turns follow each other without a newline, and no system
turn is made up. Markers are put in as ids and everything that a user wrote is encoded as text, so no message can end
its own turn. The rules are those of the published K2.6 template.
"""

from __future__ import annotations

from collections.abc import Iterator

from hedgerow.errors import InvalidRequest, Unsupported
from services.gateway.limits import TURN_TOKENS, brief
from services.gateway.tokenizer import Tokenizer
from services.gateway.types import Chat, Message

ROLES = ("system", "user", "assistant", "tool")
_MARKERS = {"user": "<|im_user|>", "assistant": "<|im_assistant|>"}


class _Marker(str):
    """The name of a special token, told from text by its type."""

    __slots__ = ()


MIDDLE, END = _Marker("<|im_middle|>"), _Marker("<|im_end|>")
THINK, END_THINK = _Marker("<think>"), _Marker("</think>")
CALLS, END_CALLS = _Marker("<|tool_calls_section_begin|>"), _Marker("<|tool_calls_section_end|>")
CALL, ARGUMENTS, END_CALL = (
    _Marker(f"<|tool_call_{name}|>") for name in ("begin", "argument_begin", "end")
)  # one call: CALL id ARGUMENTS json END_CALL


def render(chat: Chat, tokenizer: Tokenizer, default_thinking: bool) -> list[int]:
    """The prompt's ids, ending where the model's answer begins. Raises InvalidRequest or Unsupported with the field."""
    _check(chat)
    ids: list[int] = []
    text = ""
    for part in _parts(chat, default_thinking):
        if isinstance(part, _Marker):
            ids += tokenizer.encode(text)
            ids.append(tokenizer.special(part))
            text = ""
        else:
            text += part
    assert not text, "the template ends with a marker"
    return ids


def size(chat: Chat) -> int:
    """Bytes of everything that a user wrote, and one for each marker that every message and every call has."""
    return len(chat.tools_json.encode()) + sum(
        TURN_TOKENS + len(text.encode())
        for message in chat.messages
        for text in (
            message.role + message.name + message.content + message.reasoning + message.tool_call_id,
            *(call.id + call.name + call.arguments for call in message.tool_calls),
        )
    )


def _check(chat: Chat) -> None:
    if chat.tools_json:
        raise Unsupported("chat.tools_json", "tool declarations are not served yet")
    if not chat.messages:
        raise InvalidRequest("chat.messages", [], "at least one message")
    for i, message in enumerate(chat.messages):
        if message.role not in ROLES:
            raise InvalidRequest(f"chat.messages[{i}].role", brief(message.role), f"one of {', '.join(ROLES)}")


def _parts(chat: Chat, default_thinking: bool) -> Iterator[str]:
    thinking = default_thinking if chat.thinking is None else chat.thinking
    keep_all = bool(chat.preserve_thinking)
    # The last answer without tool calls: what was thought up to it is dropped, what comes after it belongs together.
    answers = [i for i, m in enumerate(chat.messages) if m.role == "assistant" and not m.tool_calls]
    last_answer = answers[-1] if answers else -1
    for i, message in enumerate(chat.messages):
        yield from _opening(message)
        yield from _body(message, keep_reasoning=keep_all or (thinking and i > last_answer))
        yield END
    yield from _opening(Message("assistant"))
    yield THINK
    if not thinking:
        yield END_THINK


def _opening(message: Message) -> Iterator[str]:
    yield _Marker(_MARKERS.get(message.role, "<|im_system|>"))
    yield message.name or message.role
    yield MIDDLE


def _body(message: Message, *, keep_reasoning: bool) -> Iterator[str]:
    if message.role == "assistant":
        yield THINK
        yield message.reasoning if keep_reasoning else ""
        yield END_THINK
    if message.role == "tool":
        yield f"## Return of {message.tool_call_id}\n"
    yield message.content
    if message.role == "assistant" and message.tool_calls:
        yield CALLS
        for call in message.tool_calls:
            yield from (CALL, call.id, ARGUMENTS, call.arguments, END_CALL)
        yield END_CALLS
