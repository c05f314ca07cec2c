"""One stream as its user sees it: in order, without a gap, without a repetition, its text and digests its tokens'."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hedgerow.client import Chunk, Finished, Started, Step
from hedgerow.errors import HedgerowError
from tests.simulation.checker import Checker
from tests.simulation.known import Known
from tests.simulation.law import tokenizer


class View:
    """One stream as its user sees it."""

    def __init__(self, checker: Checker, name: str) -> None:
        self._checker, self.name = checker, name
        self.started: Started | None = None
        self.finished: Finished | None = None
        self.error: HedgerowError | None = None
        self.begin = 0  # the offset from which it was read
        self.tokens: list[int] = []
        self.steps: list[Step] = []
        self.text = ""
        self.stream: Any = None
        self.left = False
        self.resumed = False  # the session's id was asked with, not its key

    def event(self, event: Any) -> None:
        """The next event."""
        if self.finished is not None:
            self._checker.fail(f"{self.name}: {event} after the end")
        if isinstance(event, Started):
            self._begin(event)
        elif isinstance(event, Chunk):
            self._chunk(event)
        else:
            self._end(event)

    @property
    def known(self) -> Known:
        """The session."""
        assert self.started is not None
        return self._checker.sessions[self.started.session_id]

    def _begin(self, event: Started) -> None:
        if self.started is not None and event.session_id != self.started.session_id:
            self._checker.fail(f"{self.name}: a second start, of another session")
        if event.session_id not in self._checker.sessions:
            self._checker.fail(f"{self.name}: started without a record")
        self.started = event

    def _chunk(self, event: Chunk) -> None:
        known, at, fail = self.known, len(self.tokens), self._checker.fail
        if event.token_offset != at:
            fail(f"{self.name}: tokens at {event.token_offset}, expected {at}")
        if event.text_offset != len(self.text.encode()):
            fail(f"{self.name}: text at {event.text_offset}, expected {len(self.text.encode())}")
        self.tokens += event.tokens
        self.steps += event.steps
        self.text += event.text
        if not known.has_been(tuple(self.tokens)):
            fail(f"{self.name}: {self.tokens} was never the log, which was {known.logs}")
        elif event.digest != known.digest_of(self.tokens):
            fail(f"{self.name}: the digest at {len(self.tokens)} is wrong")

    def _end(self, event: Finished) -> None:
        known, fail = self.known, self._checker.fail
        self.finished = event
        if event.token_offset != len(self.tokens) or event.text_offset != len(self.text.encode()):
            fail(f"{self.name}: the end is at {event.token_offset}, {event.text_offset}; not where the stream is")
        if event.digest != known.digest_of(self.tokens):
            fail(f"{self.name}: the last digest is wrong")
        reason = event.reason.value
        if reason in ("stop", "length"):
            if reason != known.end_of(self.tokens).name.lower():
                fail(f"{self.name}: {reason} after {self.tokens}")
            if event.usage.completion_tokens != len(self.tokens):
                fail(f"{self.name}: usage counts {event.usage.completion_tokens} tokens of {len(self.tokens)}")
        expected = text_of(self.tokens, event.matched_stop)
        if self.text != expected:
            fail(f"{self.name}: the text {self.text!r} is not {expected!r}")


def text_of(tokens: Sequence[int], matched_stop: str) -> str:
    """The text of a whole output, by rules written again here."""
    whole = b"".join(tokenizer().pieces[token] for token in tokens)
    if matched_stop:
        whole = whole[: whole.index(matched_stop.encode())]
    return whole.decode("utf-8", "replace")
