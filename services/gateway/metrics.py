"""What the gateway counts of its clients' calls, and the span of each. Sessions keep plain numbers: ports.Counts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Protocol

from hedgerow import errors
from hedgerow.rpc import telemetry, tracing
from hedgerow.rpc.logs import bind
from services.gateway import about
from services.gateway.ports import Counts, Verifier
from services.gateway.session import Session
from services.gateway.spans import Spans
from services.gateway.stream import Chunk, Event, Finished, Making
from services.gateway.trees import Attributes
from services.gateway.types import Finish, Generation, Trace

LEFT = "left"  # the outcome of a call whose client went away
METHODS = ("generate", "resume")
SERVICE = "hedgerow.v1.GatewayService"


def reasons(kind: type[errors.HedgerowError] = errors.HedgerowError) -> list[str]:
    """Every reason of the error taxonomy, as a label's value."""
    found = [kind.reason.lower()]
    for below in kind.__subclasses__():
        if below.__module__ == errors.__name__:
            found += [reason for reason in reasons(below) if reason not in found]
    return found


OUTCOMES = tuple(dict.fromkeys([*(finish.name.lower() for finish in Finish if finish), *reasons(), LEFT]))


class Call:
    """One Generate or Resume: its span, and what became of it."""

    def __init__(self, calls: Calls, method: str, trace: Trace) -> None:
        self._calls, self._method = calls, method
        self._begun, self._outcome, self._tokens = time.monotonic(), LEFT, 0
        self._first = self._last = self._begun
        self._first_tokens, self._streamed_at = 0, 0
        self._pair, self._session = (0, 0), ""
        self._span, self.trace = calls.spans.begin(f"{SERVICE}/{method.capitalize()}", trace)
        """`trace` goes on to the verifier: this call's span."""
        self._told = about.Told(self._span, content=calls.content)

    def asked(self, asked: Generation) -> None:
        """What the client wants, for its span."""
        self._told.asked(asked)

    def sent(self, event: Event, session: Session) -> None:
        """The client gets `event` of `session`."""
        if not self._session:
            self._session = session.id
            bind(session=session.id)
            self._told.session(session)
            self._calls.spans.reads(self.trace, session)
        if (pair := (session.epoch, session.attempt)) != self._pair:
            name = "attached" if self._pair == (0, 0) else "attached again"
            self._pair = pair
            tracing.event(self._span, name, session=session.id, epoch=pair[0], attempt=pair[1])
        if isinstance(event, Chunk):
            self._last = time.monotonic()
            if not self._tokens:
                self._first, self._first_tokens = self._last, len(event.tokens)
                self._streamed_at = time.time_ns()
                self._calls.first.observe(self._first - self._begun, self._method)
                tracing.event(self._span, "first tokens", token_offset=event.token_offset)
            self._tokens += len(event.tokens)
            self._told.text(event.text)
        elif isinstance(event, Finished):
            self._outcome = event.end.reason.name.lower()

    def streamed(self, making: Making) -> None:
        """Its stream is over, and its text was made so."""
        if self._streamed_at:
            since = time.time_ns() - time.perf_counter_ns()
            text = (since + making.begun, since + making.ended)
            took: Attributes = {"hedgerow.ms": round(making.spent / 1e6, 3), "hedgerow.pieces": making.pieces}
            self._calls.spans.streamed(self.trace, self._streamed_at, {"hedgerow.tokens": self._tokens}, text, took)

    def over(self, error: BaseException | None) -> None:
        """The call has ended; CancelledError and GeneratorExit are its client's doing."""
        if isinstance(error, Exception):
            self._outcome = error.reason.lower() if isinstance(error, errors.HedgerowError) else "internal"
        calls, rest = self._calls, self._tokens - self._first_tokens
        calls.seconds.observe(time.monotonic() - self._begun, self._method)
        calls.calls.add(1, self._method, self._outcome)
        calls.tokens.add(self._tokens, self._method)
        if rest > 0:
            calls.token.observe((self._last - self._first) / rest, self._method)
        failed = self._told.over(self._outcome, self._tokens, self._first - self._begun, error)
        calls.spans.ended(self.trace, failed)


class Calls:
    """Counts the calls of this process. `content`: prompts and answers go into their spans."""

    def __init__(self, spans: Spans | None = None, *, content: bool = False) -> None:
        self.spans, self.content = Spans() if spans is None else spans, content
        method = {"method": METHODS}
        calls = {**method, "outcome": OUTCOMES}
        self.calls = telemetry.counter("hedgerow_gateway_calls", "Calls that ended, by how.", calls)
        self.seconds = telemetry.histogram("hedgerow_gateway_call_seconds", "A call, to its last event.", method)
        self.first = telemetry.histogram("hedgerow_gateway_first_token_seconds", "To its first tokens.", method)
        self.token = telemetry.histogram(
            "hedgerow_gateway_token_seconds", "Between tokens, after the first ones; the mean of a call.", method
        )
        self.tokens = telemetry.counter("hedgerow_gateway_tokens", "Tokens that clients got.", method)

    @contextmanager
    def call(self, method: str, trace: Trace = Trace()) -> Iterator[Call]:  # noqa: B008  it is frozen
        """Around one call."""
        made = Call(self, method, trace)
        bind(trace=tracing.trace_id(made.trace.traceparent), session="")
        try:
            yield made
        except BaseException as error:
            made.over(error)
            raise
        else:
            made.over(None)


def watch_sessions(counts: Counts, held: Callable[[], Mapping[str, int]], swept: Callable[[], int]) -> None:
    """Exports what is counted of sessions, and what this process holds for its clients."""
    for field in fields(counts):
        name, text = f"hedgerow_gateway_{field.name}", COUNTED.get(field.name, f"{field.name}, of sessions.")
        telemetry.watch(name, text, lambda name=field.name: getattr(counts, name))  # type: ignore[misc]
    telemetry.watch("hedgerow_gateway_swept", "Sessions without a gateway that this one ended.", swept)
    telemetry.watch("hedgerow_gateway_held", "What is held for clients, by what.", held, "what", goes_down=True)


def commit_seconds() -> Callable[[float], None]:
    """Is told how long the store took to answer an append."""
    return telemetry.histogram("hedgerow_gateway_commit_seconds", "An append, until the store has answered.").observe


def watch_limits(most_sessions: int) -> None:
    """Exports what this process takes at most."""
    telemetry.gauge("hedgerow_gateway_session_limit", "Sessions that may run at once.").set(most_sessions)


def watch_peers(verifiers: Sequence[Verifier], store: Appends, waiting: Callable[[], int]) -> None:
    """Exports how the way to verifiers and store is."""
    name = "hedgerow_gateway"
    telemetry.watch(f"{name}_verifiers", "Verifiers that are attached.", lambda: _attached(verifiers), goes_down=True)
    telemetry.watch(f"{name}_waiting_sessions", "Sessions without a verifier.", waiting, goes_down=True)
    telemetry.watch(f"{name}_resent_entries", "Entries that were appended again to the store.", lambda: store.resent)
    telemetry.watch(f"{name}_store_moves", "Times that a kvstore was left for the next one.", lambda: store.moves)


def _attached(verifiers: Sequence[Verifier]) -> int:
    return sum(verifier.attached for verifier in verifiers)


class Appends(Protocol):
    """The way to the store."""

    moves: int

    @property
    def resent(self) -> int:
        """Entries that were sent again."""


COUNTED = {
    "attached": "Attachments of a session to a verifier.",
    "failed_over": "Sessions whose verifier was lost.",
    "refused": "Attachments that a verifier ended.",
    "recovered": "Sessions that had a new token after a verifier was lost or ended their attachment.",
    "recovery_seconds": "Until then, all of them together.",
    "best_effort": "Sessions that went on under another fingerprint.",
    "given_up": "Sessions that were released because no verifier took them.",
    "repairs": "Sessions of which the store had forgotten something.",
    "repaired_tokens": "Tokens that were appended again.",
    "fenced": "Sessions that another gateway took.",
    "taken_over": "Sessions that were taken over for a client that came back.",
    "paused": "Sessions that nobody read for too long.",
    "late": "Streams that ended at their deadline before the store had the end.",
    "dropped": "Updates of an old attempt, or of a session that is gone.",
}
