"""A conversation's messages, and an answer in its parts. Plain data, named as in the protos."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hedgerow.client._types import Chunk


@dataclass(frozen=True)
class ToolCall:
    """One call of a tool, as the model wrote it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Message:
    """One message of a conversation. `role` is "system", "user", "assistant" or "tool".

    `content` may be a sequence of parts `{"type": "text", "text": ...}`, which are put together.
    """

    role: str
    content: str | Sequence[Mapping[str, Any]] = ""
    name: str = ""
    reasoning_content: str = ""
    tool_calls: Sequence[ToolCall] = ()
    tool_call_id: str = ""


@dataclass(frozen=True)
class ReasoningDelta:
    """More of what the model thinks."""

    text: str
    kind: str = field(default="reasoning", init=False)


@dataclass(frozen=True)
class ContentDelta:
    """More of what it says."""

    text: str
    kind: str = field(default="content", init=False)


@dataclass(frozen=True)
class ToolCallDelta:
    """More of call number `index` of an answer. `id` and `name` come once, the arguments in pieces.

    The last one is `complete`, when the arguments together are a JSON object, or says as `malformed` why it is no call.
    """

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""
    complete: bool = False
    malformed: str = ""
    kind: str = field(default="tool_call", init=False)


Delta = ReasoningDelta | ContentDelta | ToolCallDelta


class Answer:
    """A chat's answer in its parts, as its chunks come: `answer.add(chunk)`.

    for chunk in client.chat(messages, tools=tools):
        answer.add(chunk)
    messages.append(answer.message())
    """

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, ToolCallDelta] = {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Answer) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]  # it grows

    def __repr__(self) -> str:
        return f"Answer({self.message()!r})"

    def add(self, chunk: Chunk) -> None:
        """Take the next chunk. Without parts (outside of a chat, or of an older gateway) its text is content."""
        if not chunk.deltas:
            self._content.append(chunk.text)
        for delta in chunk.deltas:
            if isinstance(delta, ToolCallDelta):
                last = self._calls.get(delta.index, ToolCallDelta(delta.index))
                self._calls[delta.index] = ToolCallDelta(
                    delta.index, last.id or delta.id, last.name or delta.name, last.arguments + delta.arguments,
                    delta.complete, delta.malformed,
                )  # fmt: skip
            else:
                (self._reasoning if isinstance(delta, ReasoningDelta) else self._content).append(delta.text)

    @property
    def content(self) -> str:
        """What the model says."""
        return "".join(self._content)

    @property
    def reasoning_content(self) -> str:
        """What it thought before."""
        return "".join(self._reasoning)

    @property
    def tool_calls(self) -> Sequence[ToolCall]:
        """The calls that are complete."""
        return [ToolCall(call.id, call.name, call.arguments) for call in self._calls.values() if call.complete]

    @property
    def malformed(self) -> Sequence[ToolCallDelta]:
        """The calls that cannot be used, each with its reason and what there is of it."""
        return [call for call in self._calls.values() if call.malformed]

    def message(self) -> Message:
        """It as a message of the conversation, which goes on behind it."""
        return Message(
            "assistant", self.content, reasoning_content=self.reasoning_content, tool_calls=tuple(self.tool_calls)
        )
