"""The trace of each request: one tree, owned by this gateway, given out whole when the request is over.

    hedgerow.v1.GatewayService/Generate          from the client's call to the session's end here
    ├─ tokenize, create session, find session
    ├─ attempt                                   one a verifier that runs it; the next one links to it
    │  ├─ queue, prefill, decode                 as the verifier says; decode has the steps as events
    │  └─ attachment                             the verifier's own span, a leaf
    ├─ commit                                    from the first append to the last answer
    └─ stream                                    from the first to the last event to the client

Nothing leaves before its root does: what dies with this process leaves no span whose parent never comes. The tree waits
a moment for a verifier that still has something to say, so that its leaf does not end after it. A session that outlives
its call, because the client detached, keeps the tree open; one that goes on here for nobody's call has a tree of its
own, with a link. Calls that only read what runs already are spans of their own, with a link.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from hedgerow.rpc import tracing
from services.gateway.messages import Timings, Update
from services.gateway.ports import Watcher
from services.gateway.session import Session
from services.gateway.types import Trace
from services.gateway.windows import Windows

WORD = 2.0  # seconds for which a tree waits for a verifier's last word
MOST_TREES = 100_000  # more are not traced
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
    steps: Windows = field(default_factory=Windows)


class Tree:
    """What is known of one request."""

    def __init__(self, span: tracing.Span, trace: Trace) -> None:
        self.span, self.trace = span, trace
        self.parent = tracing.traceparent(span)
        self._linked = dict.fromkeys([self.parent])
        self.parts: list[tuple[str, int, int, str | None, Attributes]] = []
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
        self, name: str, begun: int, now: int, error: str | None = None, attributes: Attributes | None = None
    ) -> None:
        """A span below the root, to be given out with it."""
        self.parts.append((name, begun, now, error, attributes or {}))
        self.touch(now)

    def close(self) -> None:
        """Give everything out."""
        for name, begun, now, error, attributes in self.parts:
            tracing.told(name, (begun, now), self.parent, error=error, attributes=attributes)
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
        tracing.told("prefill" if a.timings else "queue and prefill", (admitted, first), parent)
        if a.first:
            decode = tracing.begin("decode", parent, start_ns=first)
            for at, about in a.steps.events():
                tracing.event(decode, "step" if about["steps"] == 1 else "steps", at, **about)
            tracing.end(decode, attributes=a.steps.total(), end_ns=end)
        tracing.end(a.span, a.error, end_ns=end)


class Spans(Watcher):
    """Makes trees of what happens. `clock` in Unix nanoseconds."""

    def __init__(self, clock: Callable[[], int] = time.time_ns) -> None:
        self._clock = clock
        self._calls: dict[str, Tree] = {}  # by the traceparent that goes on with the session
        self._running: dict[str, Tree] = {}
        self._waiting: dict[tuple[str, int, int], Attempt] = {}
        self._closing: dict[Tree, int] = {}  # since when

    @property
    def held(self) -> int:
        """Trees that are not given out: none when nothing is asked for."""
        return len(self._calls.keys() | {tree.parent for tree in self._running.values()})

    def begin(self, method: str, trace: Trace) -> tuple[tracing.Span, Trace]:
        """A call's root, and what goes on with its session. `ended` is to follow where it is recorded."""
        span = tracing.begin(
            method, trace.traceparent, state=trace.tracestate, kind="server", start_ns=self._clock(),
            attributes={"rpc.system.name": "grpc", "rpc.method": method},
        )  # fmt: skip
        below = Trace(tracing.traceparent(span) or trace.traceparent, trace.tracestate)
        if span.is_recording() and len(self._calls) < MOST_TREES:
            self._calls[below.traceparent] = Tree(span, below)
        return span, below

    def ended(self, trace: Trace, error: str | None) -> None:
        """A call is over."""
        tree = self._calls.get(trace.traceparent)
        if tree is not None and tree.called:
            tree.called, tree.error = False, error
            tree.touch(self._clock())
            self._close_when_over(tree)

    @contextmanager
    def part(self, trace: Trace, name: str) -> Iterator[None]:
        """A span around a block of a call."""
        tree = self._calls.get(trace.traceparent)
        if tree is None:
            yield
            return
        begun, error = self._clock(), None
        try:
            yield
        except BaseException as failed:
            error = type(failed).__name__
            raise
        finally:
            tree.part(name, begun, self._clock(), error)

    def note(self, trace: Trace, name: str, begun: int, attributes: Attributes) -> None:
        """A span of a call that ends now."""
        if (tree := self._calls.get(trace.traceparent)) is not None:
            tree.part(name, begun, self._clock(), None, attributes)

    def reads(self, trace: Trace, session: Session) -> None:
        """A call is about this session: where it does not run for that call, the two are linked."""
        tree, other = self._calls.get(trace.traceparent), self._running.get(session.id)
        if tree is None or other is tree or tree.attempts:
            return
        tree.link(other.parent if other else "")
        tree.link(session.record.trace.traceparent)

    # ---- what happens to sessions; see ports.Watcher

    def placed(self, session: Session, address: str) -> Trace:
        tree = self._running.get(session.id) or self._of(session)
        if tree is None:
            return session.options.trace
        now, before = self._clock(), tree.attempts[-1] if tree.attempts else None
        links = [tracing.traceparent(before.span)] if before else []
        about: Attributes = {
            "hedgerow.session.id": session.id, "hedgerow.epoch": session.epoch, "hedgerow.attempt": session.attempt,
            "hedgerow.verifier": address, "hedgerow.committed_tokens": session.acked,
        }  # fmt: skip
        span = tracing.begin("attempt", tree.parent, links, start_ns=now, attributes=about)
        attempt = Attempt(span, (session.id, session.epoch, session.attempt), now)
        tree.attempts.append(attempt)
        tree.session, self._running[session.id] = session, tree
        self._waiting[attempt.key] = attempt
        return Trace(tracing.traceparent(span), session.options.trace.tracestate)

    def displaced(self, session: Session, why: str, *, lost: bool) -> None:
        tree = self._running.get(session.id)
        attempt = tree.attempt if tree else None
        if tree is None or attempt is None or attempt.error is not None:
            return
        now = self._clock()
        attempt.error, attempt.last = why, now
        if lost:
            self._heard(attempt)
        tracing.event(tree.span, "verifier lost" if lost else "attempt ended", now, why=why)

    def stepped(self, session: Session, update: Update, timings: Timings) -> None:
        tree = self._running.get(session.id)
        attempt = tree.attempt if tree else None
        if tree is None or attempt is None:
            return
        now = self._clock()
        if not attempt.first:
            end = timings.step_end_unix_ns
            attempt.first = end if attempt.begun <= end <= now else now
        attempt.last = now
        attempt.timings = update.timings or attempt.timings
        if update.stats is not None:
            attempt.steps.add(now, update.stats, timings)
        if update.finish:
            self._heard(attempt)

    def last_word(self, update: Update) -> None:
        attempt = self._waiting.get((update.session_id, update.epoch, update.attempt))
        if attempt is not None:
            attempt.last, attempt.timings = self._clock(), update.timings or attempt.timings
            self._heard(attempt)

    def committed(self, session: Session) -> None:
        tree = self._running.get(session.id)
        if tree is not None:
            now, took = self._clock(), session.commit_ns
            commits = tree.commits
            commits[:] = (commits[0] or now - took, now, commits[2] + 1, commits[3] + took, max(commits[4], took))
            if tree.attempt is not None:
                tree.attempt.steps.committed(took)

    def over(self, session: Session) -> None:
        tree = self._running.pop(session.id, None)
        if tree is None:
            return
        attempt, now = tree.attempt, self._clock()
        if attempt is not None:
            attempt.last = attempt.last or now
        tree.session = None
        about: Attributes = {"hedgerow.tokens": session.acked, "hedgerow.attempts": len(tree.attempts)}
        if session.end is not None:
            about["hedgerow.finish"] = session.end.reason.name.lower()
        tree.span.set_attributes(about)
        tree.touch(now)
        self._close_when_over(tree)

    def sweep(self, patience: float = WORD) -> None:
        """Give out what waits for a verifier that says nothing. To be called several times a second."""
        now = self._clock()
        for tree, since in list(self._closing.items()):
            if now - since >= patience * 1e9:
                self._give_out(tree)

    # ----

    def _of(self, session: Session) -> Tree | None:
        """The tree of the call that the session goes on for; where that call is over, one of its own."""
        trace = session.options.trace
        tree = self._calls.get(trace.traceparent)
        first = session.record.trace.traceparent
        if tree is not None and tree.session is None and tree.called:
            tree.link(first)
            return tree
        known = trace.traceparent or first
        if not tracing.is_sampled(known) or len(self._running) >= MOST_TREES:
            return None
        links = list(dict.fromkeys(each for each in (trace.traceparent, first) if each))
        span = tracing.begin(
            "session", links=links, start_ns=self._clock(), attributes={"hedgerow.session.id": session.id}
        )
        tree = Tree(span, trace)
        tree.called = False
        return tree if span.is_recording() else None

    def _heard(self, attempt: Attempt) -> None:
        attempt.waits = False
        self._waiting.pop(attempt.key, None)
        for tree in list(self._closing):
            if attempt in tree.attempts:
                self._close_when_over(tree)

    def _close_when_over(self, tree: Tree) -> None:
        if tree.called or tree.session is not None:
            return
        if any(attempt.waits for attempt in tree.attempts):
            self._closing.setdefault(tree, self._clock())
        else:
            self._give_out(tree)

    def _give_out(self, tree: Tree) -> None:
        self._closing.pop(tree, None)
        self._calls.pop(tree.parent, None)
        for attempt in tree.attempts:
            self._waiting.pop(attempt.key, None)
        tree.close()
