"""What came before in a conversation: roles, calls and results that fit together, and the ids of the calls.

The family was trained on ids `functions.{name}:{n}`, n counting the calls of the conversation from 0; other ids in the
history make its calls worse (Moonshot's K2 vendor verifier).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence

from hedgerow.errors import InvalidRequest
from services.gateway.limits import TOOL_NAME, brief
from services.gateway.types import Message, ToolCall

ROLES = ("system", "user", "assistant", "tool")
_ID = re.compile(r"functions\.(.+):\d+")


def call_id(name: str, number: int) -> str:
    """The id of call `number` of a conversation."""
    return f"functions.{name}:{number}"


def checked(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages, their calls' ids as the family writes them.

    Ids that all have that form, of their own function and all different, stay as they are; otherwise every call gets
    the next number, and results follow their calls. Raises InvalidRequest with the field.
    """
    if not messages:
        raise InvalidRequest("chat.messages", [], "at least one message")
    for i, message in enumerate(messages):
        if message.role not in ROLES:
            raise InvalidRequest(f"chat.messages[{i}].role", brief(message.role), f"one of {', '.join(ROLES)}")
        if message.tool_calls and message.role != "assistant":
            limit = "nothing: only an assistant calls tools"
            raise InvalidRequest(f"chat.messages[{i}].tool_calls", f"{len(message.tool_calls)} calls", limit)
    calls = [call for message in messages for call in message.tool_calls]
    kept = len({call.id for call in calls}) == len(calls) and all(_is_ours(call) for call in calls)
    return tuple(_renamed(messages, keep=kept))


def _is_ours(call: ToolCall) -> bool:
    found = _ID.fullmatch(call.id)
    return found is not None and call.name in ("", found[1]) and TOOL_NAME.fullmatch(found[1]) is not None


def _renamed(messages: Sequence[Message], *, keep: bool) -> Iterator[Message]:
    known: dict[str, str] = {}
    number = 0
    for i, message in enumerate(messages):
        if message.role == "tool":
            if message.tool_call_id not in known:
                limit = "the id of a call in a message before this one"
                raise InvalidRequest(f"chat.messages[{i}].tool_call_id", brief(message.tool_call_id), limit)
            yield dataclasses.replace(message, tool_call_id=known[message.tool_call_id])
            continue
        calls: dict[str, ToolCall] = {}
        for k, call in enumerate(message.tool_calls):
            there = f"chat.messages[{i}].tool_calls[{k}]"
            if call.id in calls:
                raise InvalidRequest(f"{there}.id", brief(call.id), "other than those of the message's calls before it")
            name = _name(there, call)
            calls[call.id] = ToolCall(call.id if keep else call_id(name, number), name, call.arguments)
            number += 1
        known |= {old: new.id for old, new in calls.items()}
        yield dataclasses.replace(message, tool_calls=tuple(calls.values())) if calls else message


def _name(where: str, call: ToolCall) -> str:
    found = _ID.fullmatch(call.id)
    name = call.name or (found[1] if found else "")
    if not TOOL_NAME.fullmatch(name):
        raise InvalidRequest(f"{where}.name", brief(name), f"a function's name, {TOOL_NAME.pattern}")
    return name
