"""The family's chat templates: messages to token ids.

A turn is marker, name, `<|im_middle|>`, body, `<|im_end|>`; turns follow each other without a newline. Markers are put
in as ids and everything that a user wrote is encoded as text, so no message can end its own turn. The rules are those
of the published templates; in what the members differ, `members.py` says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hedgerow.errors import Unsupported
from services.gateway.declarations import Inexpressible, typescript
from services.gateway.history import checked
from services.gateway.limits import TURN_TOKENS
from services.gateway.members import Member, Thinking
from services.gateway.tokenizer import Tokenizer
from services.gateway.tools import as_json, declared
from services.gateway.types import Chat, Message

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


def markers(member: Member) -> tuple[str, ...]:
    """The special tokens that a member's prompts may have."""
    thought = () if member.thinking is Thinking.NEVER else (THINK, END_THINK)
    return (*_MARKERS.values(), "<|im_system|>", MIDDLE, END, CALLS, END_CALLS, CALL, ARGUMENTS, END_CALL, *thought)


class Template(Protocol):
    """What makes a prompt of a conversation. `quick`: a short one takes no time that others would notice.

    `name` is what an operator calls it.
    """

    @property
    def name(self) -> str: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def quick(self) -> bool: ...

    def render(self, chat: Chat) -> list[int]:
        """The prompt's ids, ending where the model's answer begins. Raises InvalidRequest or Unsupported."""


@dataclass(frozen=True)
class KimiTemplate:
    """The template of one member. `default_thinking`: whether it thinks when a chat does not say, where it may."""

    member: Member
    tokenizer: Tokenizer
    default_thinking: bool = True
    quick: bool = True

    @property
    def name(self) -> str:
        """The member's."""
        return self.member.name

    def render(self, chat: Chat) -> list[int]:
        """See `Template`."""
        ids: list[int] = []
        text = ""
        for part in self._parts(chat, thinking(chat, self.member, self.default_thinking)):
            if isinstance(part, _Marker):
                ids += self.tokenizer.encode(text)
                ids.append(self.tokenizer.special(part))
                text = ""
            else:
                text += part
        assert not text, "the template ends with a marker"
        return ids

    def _parts(self, chat: Chat, thinks: bool) -> Iterator[str]:
        messages, tools = checked(chat.messages), declared(chat.tools_json)
        if tools:
            yield from (_Marker("<|im_system|>"), "tool_declare", MIDDLE, self._declarations(tools), END)
        if self.member.greeting and messages[0].role != "system":
            yield from (*_opening(Message("system")), self.member.greeting, END, self.member.after_greeting)
        # The last answer without tool calls: what was thought up to it is dropped, what comes later belongs together.
        answers = [i for i, m in enumerate(messages) if m.role == "assistant" and not m.tool_calls]
        last_answer = answers[-1] if answers else -1
        for i, message in enumerate(messages):
            yield from _opening(message)
            if message.role == "assistant" and self.member.thinking is not Thinking.NEVER:
                kept = chat.preserve_thinking or (thinks and i > last_answer)
                yield from (THINK, message.reasoning if kept else "", END_THINK)
            yield from _body(message)
            yield END
        yield from _opening(Message("assistant"))
        if self.member.thinking is Thinking.CHOICE:
            yield from (THINK,) if thinks else (THINK, END_THINK)

    def _declarations(self, tools: Sequence[dict[str, Any]]) -> str:
        if self.member.typescript:
            try:
                return typescript(tools)
            except Inexpressible:
                pass  # the published tokenizer falls back to JSON too
        return as_json(tools)


def thinking(chat: Chat, member: Member, default: bool) -> bool:
    """Whether the answer is thought about. Raises Unsupported where a member cannot do what is asked for."""
    if chat.preserve_thinking and not member.preserves:
        raise Unsupported("chat.preserve_thinking", f"the template of {member.name} has no such choice")
    if member.thinking is Thinking.CHOICE:
        return default if chat.thinking is None else chat.thinking
    always = member.thinking is Thinking.ALWAYS
    if chat.thinking is not None and chat.thinking is not always:
        raise Unsupported("chat.thinking", f"{member.name} {'always' if always else 'never'} thinks")
    return always


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


def _opening(message: Message) -> Iterator[str]:
    yield _Marker(_MARKERS.get(message.role, "<|im_system|>"))
    yield message.name or message.role
    yield MIDDLE


def _body(message: Message) -> Iterator[str]:
    if message.role == "tool":
        yield f"## Return of {message.tool_call_id}\n"
    yield message.content
    if message.tool_calls:
        yield CALLS
        for call in message.tool_calls:
            yield from (CALL, call.id, ARGUMENTS, call.arguments, END_CALL)
        yield END_CALLS
