"""A model's answer in its parts, as its tokens come: what it thought, what it says, which tools it calls.

Parts are told apart by token ids. What the parts of the first n tokens are depends on those tokens only, so that a
resumed stream goes on where another one was left. Known malformations are understood: a section or a call that is not
ended, markers that are written as text (where tools are declared, and never inside of reasoning), a call whose header
is a bare counter. No text is lost: what is no call comes as content, a call that cannot be used comes with the reason.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence

from services.gateway.deltas import Call, Content, Delta, Reasoning
from services.gateway.detokenizer import Detokenizer
from services.gateway.history import call_id
from services.gateway.tool_calls import HEADER, Tools, name_in, parsed, tool_of


class Mark(enum.Enum):
    """A marker, by its name as text."""

    THINK = "<think>"
    END_THINK = "</think>"
    CALLS = "<|tool_calls_section_begin|>"
    END_CALLS = "<|tool_calls_section_end|>"
    CALL = "<|tool_call_begin|>"
    ARGUMENTS = "<|tool_call_argument_begin|>"
    END_CALL = "<|tool_call_end|>"


class _In(enum.Enum):
    REASONING, CONTENT, PROBE, SECTION, HEADER, ARGUMENTS = range(6)


_BEGINS = ((Mark.CALLS.value, Mark.CALLS), ("<|tool_call_section_begin|>", Mark.CALLS))
_ENDS = ((Mark.END_CALLS.value, Mark.END_CALLS), ("<|tool_call_section_end|>", Mark.END_CALLS))
_CALL, _ARGUMENTS, _END_CALL = ((mark.value, mark) for mark in (Mark.CALL, Mark.ARGUMENTS, Mark.END_CALL))
# Which markers count as text, by where the answer is; inside of a call only if it began as text.
_AS_TEXT = {
    _In.CONTENT: _BEGINS,
    _In.SECTION: (_CALL, *_ENDS),
    _In.HEADER: (_ARGUMENTS,),
    _In.ARGUMENTS: (_END_CALL, *_ENDS),
}


class Answer:
    """One answer. `calls`: how many are complete.

    `marks`: the markers that the vocabulary has, by id. `text` makes the text of a part; `silent` tokens have none.
    `thinks`: the prompt has opened the reasoning. `first`: calls of the conversation before it. `tools` are asked for
    where they matter.
    """

    def __init__(
        self,
        marks: dict[int, Mark],
        text: Callable[[], Detokenizer],
        silent: frozenset[int] = frozenset(),
        *,
        thinks: bool,
        first: int = 0,
        tools: Callable[[], Tools] = dict,
    ) -> None:
        self._marks = {token: mark for token, mark in marks.items() if token not in silent}
        self._lowest = min(marks, default=1 << 62)
        self._new_text, self._text = text, text()
        self._first, self._tools = first, tools
        self._in = _In.REASONING if thinks else _In.CONTENT
        self._held = ""  # text that may be the beginning of a marker
        self._probed = ""  # a section that began as text, until it is clear that it is one
        self._as_text = False  # the call began as text
        self._header = ""
        self._name: str | None = None
        self._arguments: list[str] = []
        self._space: list[str] = []
        self._index = self.calls = 0
        self._out: list[Delta] = []

    def feed(self, tokens: Sequence[int]) -> list[Delta]:
        """What these tokens add."""
        begin = 0
        if tokens and max(tokens) >= self._lowest:
            for i, token in enumerate(tokens):
                if (mark := self._marks.get(token)) is None:
                    continue
                self._take(self._text.feed(tokens[begin:i]))
                begin = i
                if mark in (Mark.THINK, Mark.END_THINK) and self._in in (_In.HEADER, _In.ARGUMENTS):
                    continue  # there it is a word
                self._take(self._text.finish())
                self._text = self._new_text()
                self._pass(mark)
                begin = i + 1
        self._take(self._text.feed(tokens[begin:]))
        return self._given()

    def finish(self, matched_stop: str = "") -> list[Delta]:
        """What the end adds."""
        self._take(self._text.finish(matched_stop))
        self._release()
        if self._in in (_In.HEADER, _In.ARGUMENTS):
            self._close()
        self._in = _In.CONTENT
        return self._given()

    # ---- markers

    def _pass(self, mark: Mark, *, as_text: bool = False) -> None:
        """Go on behind a marker. One that means nothing where it stands is left out."""
        if self._in is _In.PROBE and mark is Mark.CALL:
            self._held = self._probed = ""
        self._release()
        if mark is Mark.ARGUMENTS:
            if self._in is _In.HEADER:
                self._open()
            return
        if self._in in (_In.HEADER, _In.ARGUMENTS):
            self._close()
        self._space = []
        if mark is Mark.CALL:
            self._in, self._as_text = _In.HEADER, as_text
        elif mark is Mark.CALLS or (mark is Mark.END_CALL and self._in in (_In.HEADER, _In.ARGUMENTS)):
            self._in = _In.SECTION
        elif mark is Mark.THINK:
            self._in = _In.REASONING
        elif mark is (Mark.END_THINK if self._in is _In.REASONING else Mark.END_CALLS):
            self._in = _In.CONTENT

    # ---- text

    def _take(self, text: str) -> None:
        self._held += text
        while self._held:
            if self._in is _In.PROBE:
                if not self._probe():
                    return
                continue
            markers = self._expected()
            at, word, mark = min(
                ((at, word, mark) for word, mark in markers if (at := self._held.find(word)) >= 0),
                key=lambda found: found[0],
                default=(-1, "", None),
            )
            if mark is None:
                keep = max((_overlap(self._held, word) for word, _ in markers), default=0)
                border = len(self._held) - keep
                said, self._held = self._held[:border], self._held[border:]
                self._say(said)
                return
            said, self._held = self._held[:at], self._held[at + len(word) :]
            self._say(said)
            if self._in is _In.CONTENT:
                self._in, self._probed = _In.PROBE, word
            else:
                rest, self._held = self._held, ""
                self._pass(mark, as_text=True)
                self._held = rest

    def _expected(self) -> Sequence[tuple[str, Mark]]:
        if self._in is _In.CONTENT:
            return _BEGINS if self._tools() else ()
        if self._in in (_In.HEADER, _In.ARGUMENTS) and not self._as_text:
            return ()
        return _AS_TEXT.get(self._in, ())

    def _probe(self) -> bool:
        """Behind a section that began as text there is a call, or it was text; False: more has to come."""
        inner = self._held.lstrip()
        if inner.startswith(Mark.CALL.value):
            self._held, self._probed = inner[len(Mark.CALL.value) :], ""
            self._in, self._as_text = _In.HEADER, True
            return True
        if Mark.CALL.value.startswith(inner) and len(self._held) <= HEADER:
            return False
        self._emit(Content(self._probed))
        self._in, self._probed = _In.CONTENT, ""
        return True

    def _release(self) -> None:
        """What was held back is what it looks like."""
        said, self._held = self._probed + self._held, ""
        if self._in is _In.PROBE:
            self._in, self._probed = _In.CONTENT, ""
        self._say(said)

    def _say(self, text: str) -> None:
        """Text of the place where the answer is."""
        if not text:
            return
        if self._in is _In.REASONING:
            self._emit(Reasoning(text))
        elif self._in is _In.HEADER:
            self._header += text
        elif self._in is _In.ARGUMENTS:
            self._argue(text)
        elif self._in is _In.SECTION:  # between calls there is space, which says nothing
            self._emit(Content(self._trimmed(text)))
        else:
            self._emit(Content(text))

    # ---- calls

    def _open(self) -> None:
        """The header is whole."""
        self._in = _In.ARGUMENTS
        self._name = name_in(self._header, self._tools())
        if self._name:
            self._emit(Call(self._index, call_id(self._name, self._first + self._index), self._name))

    def _argue(self, text: str) -> None:
        """Arguments without the space around them; they wait until a name is known."""
        inner = self._trimmed(text if self._arguments else text.lstrip())
        if inner:
            self._arguments.append(inner)
            if self._name:
                self._emit(Call(self._index, arguments=inner))

    def _trimmed(self, text: str) -> str:
        """Text without the space at its end, which waits for what comes behind it."""
        inner = text.rstrip()
        if not inner:
            self._space.append(text)
            return ""
        said = "".join([*self._space, inner])
        self._space = [text[len(inner) :]]
        return said

    def _close(self) -> None:
        """The call is over, however it looks."""
        arguments = "".join(self._arguments)
        last = self._judged(arguments)
        self._emit(last)
        self._index += 1
        self.calls += last.complete
        self._header, self._name, self._arguments, self._space = "", None, [], []

    def _judged(self, arguments: str) -> Call:
        if self._in is _In.HEADER:  # no arguments have begun
            return Call(self._index, arguments=self._header, malformed="a call without arguments")
        if self._name is None:
            why = f"{self._header.strip()[:HEADER]!r} names no function"
            return Call(self._index, arguments=arguments, malformed=why)
        value, why = parsed(arguments)
        if self._name:
            return Call(self._index, complete=value is not None, malformed=why)
        name = tool_of(value, self._tools()) if value is not None else None
        if name is None:
            why = why or "a bare counter, and the arguments fit no tool, or several"
            return Call(self._index, arguments=arguments, malformed=why)
        return Call(self._index, call_id(name, self._first + self._index), name, arguments, complete=True)

    # ---- deltas

    def _emit(self, delta: Delta) -> None:
        """Append a delta, or lengthen the last one."""
        last = self._out[-1] if self._out else None
        if isinstance(delta, Call):
            if isinstance(last, Call) and last.index == delta.index:
                self._out[-1] = Call(
                    last.index, last.id or delta.id, last.name or delta.name, last.arguments + delta.arguments,
                    delta.complete, delta.malformed,
                )  # fmt: skip
                return
        elif not delta.text:
            return
        elif isinstance(last, type(delta)):
            assert not isinstance(last, Call)
            self._out[-1] = type(delta)(last.text + delta.text)
            return
        self._out.append(delta)

    def _given(self) -> list[Delta]:
        given, self._out = self._out, []
        return given


def _overlap(text: str, word: str) -> int:
    """Characters at the end of `text` that are a beginning of `word`, but not all of it."""
    return next((n for n in range(min(len(text), len(word) - 1), 0, -1) if text.endswith(word[:n])), 0)
