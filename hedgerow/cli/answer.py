"""How a chat's answer looks: what it says, apart from what it thinks and from the tools that it calls."""

from __future__ import annotations

import sys
from typing import TextIO

from hedgerow.cli.command import say
from hedgerow.client import Answer, Chunk, ContentDelta, ReasoningDelta, SyncStream, ToolCall

DIM, PLAIN = "\x1b[2m", "\x1b[0m"


def show_answer(stream: SyncStream) -> Answer:
    """Print an answer as it comes. Reasoning is dim on a terminal, and goes to standard error from a pipe.

    A call is one line when it is complete; one that cannot be used is said on standard error, with the reason.
    """
    shown, answer = _Shown(sys.stdout, sys.stderr), Answer()
    for chunk in stream:
        answer.add(chunk)
        shown.chunk(chunk)
    shown.end(answer)
    return answer


class _Shown:
    def __init__(self, out: TextIO, aside: TextIO) -> None:
        self._out, self._aside = out, aside
        self._thinks = self._says = False

    def chunk(self, chunk: Chunk) -> None:
        if not chunk.deltas:
            self._content(chunk.text)
        for delta in chunk.deltas:
            if isinstance(delta, ReasoningDelta):
                self._reasoning(delta.text)
            elif isinstance(delta, ContentDelta):
                self._content(delta.text)

    def end(self, answer: Answer) -> None:
        self._ended_reasoning()
        if self._says or not answer.tool_calls:
            self._out.write("\n")
        for call in answer.tool_calls:
            self._out.write(f"{line_of(call)}\n")
        self._out.flush()
        for broken in answer.malformed:
            say(f"hedgerow: tool call {broken.name or broken.index} cannot be used: {broken.malformed}")

    def _reasoning(self, text: str) -> None:
        if text:
            where = self._out if self._out.isatty() else self._aside
            where.write(f"{DIM}{text}{PLAIN}" if where.isatty() else text)
            where.flush()
            self._thinks = True

    def _content(self, text: str) -> None:
        if text:
            self._ended_reasoning()
            self._out.write(text)
            self._out.flush()
            self._says = True

    def _ended_reasoning(self) -> None:
        if self._thinks:
            where = self._out if self._out.isatty() else self._aside
            where.write("\n")
            where.flush()
        self._thinks = False


def line_of(call: ToolCall) -> str:
    """A call on one line."""
    return f"tool call {call.id}: {call.arguments}"
