"""What is known of one request, until it is given out as a tree of spans. Times in Unix nanoseconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hedgerow.rpc import tracing
from services.gateway.messages import Chunk, Timings, Update
from services.gateway.session import Session
from services.gateway.types import Trace
from services.gateway.windows import Windows

Attributes = dict[str, tracing.Attribute]


@dataclass(eq=False)
class Attempt:
    """One attachment. Times in Unix nanoseconds, 0: not yet."""

    span: tracing.Span
    key: tuple[str, int, int]
    begun: int
    first: int = 0
    last: int = 0
    waits: bool = True  # for the verifier's last word
    error: str | None = None
    timings: Timings | None = None
    chunks: Sequence[Chunk] = ()
    cached: int = 0  # prompt tokens that the verifier had already
    steps: Windows = field(default_factory=Windows)

    def take(self, update: Update) -> None:
        """What the verifier tells with the first and the last of its updates."""
        self.timings, self.chunks = update.timings or self.timings, update.chunks or self.chunks
        self.cached = update.cached_prompt_tokens or self.cached


class Tree:
    """What is known of one request."""

    def __init__(self, span: tracing.Span, trace: Trace) -> None:
        self.span, self.trace = span, trace
        self.parent = tracing.traceparent(span)
        self._linked = dict.fromkeys([self.parent])
        self.parts: list[tuple[str, int, int, str | None, Attributes, str]] = []
        self.attempts: list[Attempt] = []
        self.session: Session | None = None  # while it runs here
        self.called = True  # its call is open
        self.ended = 0
        self.error: str | None = None
        self.commits = [0, 0, 0, 0, 0]  # first append, last answer, count, nanoseconds, the longest

    @property
    def attempt(self) -> Attempt | None:
        """The present one."""
        return self.attempts[-1] if self.attempts and self.session else None

    def link(self, to: str) -> None:
        """Has to do with another span; "" and this one count for nothing."""
        if to and to not in self._linked:
            self._linked[to] = None
            tracing.link(self.span, to)

    def touch(self, now: int) -> None:
        """Something of it happened."""
        self.ended = max(self.ended, now)

    def part(
        self,
        name: str,
        begun: int,
        now: int,
        error: str | None = None,
        attributes: Attributes | None = None,
        within: str = "",
    ) -> None:
        """A span below the root, or below the part `within` that was told before, to be given out with it."""
        self.parts.append((name, begun, now, error, attributes or {}, within))
        self.touch(now)

    def close(self) -> None:
        """Give everything out."""
        made = {"": self.parent}
        for name, begun, now, error, attributes, within in self.parts:
            made[name] = tracing.told(name, (begun, now), made[within], error=error, attributes=attributes)
        for attempt in self.attempts:
            self._close(attempt)
        first, last, count, total, longest = self.commits
        if count:
            mean = round(total / count / 1e6, 3)
            about: Attributes = {"hedgerow.appends": count, "hedgerow.mean_ms": mean, "hedgerow.max_ms": longest / 1e6}
            tracing.told("commit", (first, last), self.parent, attributes=about)
        tracing.end(self.span, self.error, end_ns=self.ended)

    def _close(self, a: Attempt) -> None:
        end, parent = a.last or self.ended, tracing.traceparent(a.span)
        self.touch(end)
        first = min(a.first or end, end)
        admitted = min(a.begun + a.timings.queue_ns, first) if a.timings else a.begun
        if a.timings:
            tracing.told("queue", (a.begun, admitted), parent)
        name, found = "prefill" if a.timings else "queue and prefill", {"hedgerow.cached_prompt_tokens": a.cached}
        prefill = tracing.begin(name, parent, start_ns=admitted, attributes=found)
        _tell_chunks(prefill, a, admitted, first)
        tracing.end(prefill, end_ns=first)
        if a.first:
            decode = tracing.begin("decode", parent, start_ns=first)
            for at, about in a.steps.events():
                tracing.event(decode, "step" if about["steps"] == 1 else "steps", at, **about)
            tracing.end(decode, attributes=a.steps.total(), end_ns=end)
        tracing.end(a.span, a.error, end_ns=end)


def _tell_chunks(prefill: tracing.Span, a: Attempt, begun: int, end: int) -> None:
    """Each chunk as an event. Their times are of a verifier's clock: only what lies between them counts."""
    last = a.chunks[-1].end_unix_ns if a.chunks else 0
    for chunk in a.chunks:
        at = end - (last - chunk.end_unix_ns)
        if begun <= at <= end:
            about = {name: value for name, value in chunk._asdict().items() if not name.endswith("_ns")}
            tracing.event(prefill, "chunk", at, **about, ms=round(chunk.took_ns / 1e6, 3))
