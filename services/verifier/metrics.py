"""What the verifier counts. The engine keeps plain numbers; a step's durations and sizes are noted here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from hedgerow.engine.types import EngineLoad, Finish, StepResult, Update
from hedgerow.rpc import telemetry

MOST_ACCEPTED, MOST_SEQUENCES = 32, 128  # the last buckets of their histograms
PARTS = ("queue_ns", "prefill_ns", "draft_ns", "verify_ns", "accept_ns", "total_ns")
FINISHES = tuple(finish.name.lower() for finish in Finish if finish)


class Attachments:
    """A span for each attachment of a session, from its start to its last update: below its request's span."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, int, int], telemetry.Span] = {}  # as many as the engine holds

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, session_id: str, epoch: int, attempt: int, traceparent: str) -> None:
        """A start was taken."""
        key = (session_id, epoch, attempt)
        if key not in self._open:
            self._open[key] = telemetry.begin(
                "attachment", traceparent, session=session_id, epoch=epoch, attempt=attempt
            )

    def end(self, update: Update) -> None:
        """Its last update is on its way."""
        span = self._open.pop((update.session_id, update.epoch, update.attempt), None)
        if span is None:
            return
        if span.is_recording():
            span.set_attribute("finish", update.finish.name.lower())
            if update.usage is not None:
                span.set_attribute("completion_tokens", update.usage.completion_tokens)
            if update.timings is not None:
                parts = {
                    name.replace("_ns", "_ms"): ns / 1e6 for name, ns in vars(update.timings).items() if name in PARTS
                }
                span.set_attributes(parts)
        telemetry.end(span, update.error)


class StepMetrics:
    """Counts steps as their results come by. A few microseconds each, and a tenth of one a sequence."""

    def __init__(self) -> None:
        self._step = telemetry.histogram("hedgerow_verifier_step_seconds", "A step, from its plan to its updates.")
        self._draft = telemetry.histogram("hedgerow_verifier_draft_seconds", "A step's wait for its trees.")
        self._forward = telemetry.histogram("hedgerow_verifier_forward_seconds", "A step's forward pass.")
        self._sequences = telemetry.tally(
            "hedgerow_verifier_batch_sequences", "Sequences in a step that emits.", MOST_SEQUENCES
        )
        self._accepted = telemetry.tally(
            "hedgerow_verifier_accepted_nodes", "Nodes of a tree that the target agreed with.", MOST_ACCEPTED
        )
        self.attachments = Attachments()
        self._ends = telemetry.counter("hedgerow_verifier_ends", "Sequences that ended, by how.", {"finish": FINISHES})

    def count(self, result: StepResult) -> None:
        """Takes one step's result."""
        self._step.observe(result.timings.total_ns / 1e9)
        self._draft.observe(result.timings.draft_ns / 1e9)
        self._forward.observe(result.timings.verify_ns / 1e9)
        stats = [update.stats for update in result.updates if update.stats is not None]
        if stats:
            self._sequences.count(stats[0].batch_sequences)
            self._accepted.count(*[each.accepted for each in stats if each.tree_nodes])
        for update in result.updates:
            if update.finish is not Finish.NONE:
                self._ends.add(1, update.finish.name.lower())
                self.attachments.end(update)


def watch_engine(load: Callable[[], EngineLoad]) -> None:
    """Exports the engine's counters and what it holds."""
    counters: Mapping[str, tuple[str, Callable[[EngineLoad], float]]] = {
        "steps": ("Steps, those that only prefill included.", lambda now: now.steps),
        "tokens": ("Tokens emitted.", lambda now: now.tokens),
        "missed_drafts": ("Steps whose trees came too late or not at all.", lambda now: now.missed_drafts),
        "adoptions": ("Attachments that went on with a sequence that was here.", lambda now: now.adopted),
        "rebuilds": ("Attachments whose output was replayed.", lambda now: now.rebuilt),
        "faults": ("Steps that failed.", lambda now: now.faults),
    }
    gauges: Mapping[str, tuple[str, Callable[[EngineLoad], float]]] = {
        "running_sequences": ("Sequences in the running batch.", lambda now: now.running),
        "waiting_sequences": ("Sequences that wait for a place.", lambda now: now.waiting),
        "kept_ends": ("Ended sequences whose last tokens are not acknowledged.", lambda now: now.kept_ends),
        "cache_free_pages": ("Pages of the cache that nobody holds.", lambda now: now.free_pages),
        "cache_pages": ("Pages of the cache.", lambda now: now.total_pages),
    }
    for name, (text, read) in {**counters, **gauges}.items():
        telemetry.watch(f"hedgerow_verifier_{name}", text, lambda read=read: read(load()), goes_down=name in gauges)  # type: ignore[misc]
    refused = "hedgerow_verifier_refused_trees"
    telemetry.watch(refused, "Trees that were not sound, by why.", lambda: load().refused_trees, "reason")


class DraftCounters(Protocol):
    """What the drafter's peer counts."""

    connected: int
    answered: int
    late: int
    unasked: int


def watch_drafter(counters: DraftCounters, connected: Callable[[], bool]) -> None:
    """Exports how the drafter does."""

    def requests() -> Mapping[str, float]:
        return {"answered": counters.answered, "late": counters.late, "unasked": counters.unasked}

    telemetry.watch("hedgerow_verifier_drafts", "Steps with work for the drafter, by outcome.", requests, "outcome")
    telemetry.watch("hedgerow_verifier_drafter_connections", "Streams to the drafter.", lambda: counters.connected)
    telemetry.watch("hedgerow_verifier_drafter_up", "A drafter that fits is there.", connected, goes_down=True)
