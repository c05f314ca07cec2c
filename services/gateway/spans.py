"""The trace of each request: one tree, owned by this gateway, given out whole when the request is over.

    hedgerow.v1.GatewayService/Generate          from the client's call to the session's end here
    ├─ tokenize, create session, find session
    ├─ attempt                                   one a verifier that runs it; the next one links to it
    │  ├─ queue, prefill, decode                 as the verifier says; decode has the steps as events
    │  └─ attachment                             the verifier's own span, a leaf
    ├─ commit                                    from the first append to the last answer
    └─ stream                                    from the first to the last event to the client
       └─ detokenize                             one for all of them; how long of that it took

Nothing leaves before its root does: what dies with this process leaves no span whose parent never comes. The tree waits
a moment for a verifier that still has something to say, so that its leaf does not end after it. A session that outlives
its call, because the client detached, keeps the tree open; one that goes on here for nobody's call has a tree of its
own, with a link. Calls that only read what runs already are spans of their own, with a link.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from hedgerow.rpc import tracing
from hedgerow.rpc.trace_export import LINKS
from services.gateway.messages import Append, Timings, Update
from services.gateway.ports import Watcher
from services.gateway.session import Session
from services.gateway.trees import Attempt, Attributes, Tree
from services.gateway.types import Trace

WORD = 2.0  # seconds for which a tree waits for a verifier's last word
MOST_TREES = 100_000  # more are not traced


class Spans(Watcher):
    """Makes trees of what happens. `commit` is told each answered append's seconds; `clock` in Unix nanoseconds."""

    def __init__(
        self, commit: Callable[[float], None] = lambda seconds: None, clock: Callable[[], int] = time.time_ns
    ) -> None:
        self._clock, self._commit = clock, commit
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
            attributes=tracing.of_call(method),
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

    def streamed(self, trace: Trace, begun: int, about: Attributes, text: tuple[int, int], making: Attributes) -> None:
        """A call's stream is over, which `begun`; `text` is when its tokens were made text, all together."""
        if (tree := self._calls.get(trace.traceparent)) is not None:
            now = self._clock()
            first, last = min(text[0], now), min(text[1], now)
            tree.part("stream", min(begun, first), now, None, about)
            tree.part("detokenize", first, last, None, making, within="stream")

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
        attempt.take(update)
        if update.stats is not None:
            attempt.steps.add(now, update.stats, timings)
        if update.finish:
            self._heard(attempt)

    def last_word(self, update: Update) -> None:
        attempt = self._waiting.get((update.session_id, update.epoch, update.attempt))
        if attempt is not None:
            attempt.last = self._clock()
            attempt.take(update)
            self._heard(attempt)

    def committed(self, session: Session) -> None:
        took = session.commit_ns
        if took < 0:
            return
        self._commit(took / 1e9)
        tree = self._running.get(session.id)
        if tree is not None:
            now = self._clock()
            commits = tree.commits
            commits[:] = (commits[0] or now - took, now, commits[2] + 1, commits[3] + took, max(commits[4], took))
            if tree.attempt is not None:
                tree.attempt.steps.committed(took)

    def appended(self, every: int, number: int, entries: Sequence[Append]) -> Sequence[str]:
        """The requests to which the store's span of a message links: those whose first tokens are in it, and of each
        `every`-th message (0: of none) all; so a long answer has few.
        """
        if not self._running:
            return ()
        whole = every > 0 and number % every == 0
        trees = (self._running.get(entry.session_id) for entry in entries if whole or not entry.offset)
        return [tree.parent for tree in trees if tree is not None][:LINKS]

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
