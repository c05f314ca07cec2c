"""What the verifier counts. The engine keeps plain numbers; a step's durations and sizes are noted here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, get_args

from hedgerow.engine.tree import Why
from hedgerow.engine.types import EngineLoad, Finish, StepResult, Update
from hedgerow.rpc import telemetry
from services.verifier.spans import Attachments

MOST_ACCEPTED, MOST_NODES, MOST_SEQUENCES = 32, 64, 128  # the last buckets of their histograms
EXPERTS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384)  # buckets
FINISHES = tuple(finish.name.lower() for finish in Finish if finish)


class StepMetrics:
    """Counts steps as their results come by. A few microseconds each, and a tenth of one a sequence."""

    def __init__(self, attachments: Attachments | None = None) -> None:
        self.attachments = Attachments() if attachments is None else attachments
        self.experts: Callable[[], float | None] = lambda: None
        """Those of the step whose result comes next; None: not counted."""
        self._step = telemetry.histogram("hedgerow_verifier_step_seconds", "A step, from its plan to its updates.")
        self._draft = telemetry.histogram("hedgerow_verifier_draft_seconds", "A step's wait for its trees.")
        self._forward = telemetry.histogram("hedgerow_verifier_forward_seconds", "A step's forward pass.")
        self._sequences = telemetry.tally(
            "hedgerow_verifier_batch_sequences", "Sequences in a step that emits.", MOST_SEQUENCES
        )
        self._accepted = telemetry.tally(
            "hedgerow_verifier_accepted_nodes", "Nodes of a tree that the target agreed with.", MOST_ACCEPTED
        )
        self._accept = telemetry.histogram("hedgerow_verifier_accept_seconds", "Drawing, walking trees, moving pages.")
        self._queue = telemetry.histogram("hedgerow_verifier_queue_seconds", "From an attachment to its first step.")
        self._rows = telemetry.tally("hedgerow_verifier_tree_nodes", "Nodes of a tree that was verified.", MOST_NODES)
        self._budget = telemetry.tally(
            "hedgerow_verifier_tree_budget", "Most nodes that a tree might have.", MOST_NODES
        )
        self._prompt = telemetry.counter(
            "hedgerow_verifier_prompt_tokens", "Tokens of prompts of sequences that ended."
        )
        self._experts = telemetry.histogram(
            "hedgerow_verifier_distinct_experts",
            "Distinct experts of a step, the mean of its layers that have experts.",
            buckets=EXPERTS,
        )
        self._ends = telemetry.counter("hedgerow_verifier_ends", "Sequences that ended, by how.", {"finish": FINISHES})

    def count(self, result: StepResult) -> None:
        """Takes one step's result."""
        self._step.observe(result.timings.total_ns / 1e9)
        self._draft.observe(result.timings.draft_ns / 1e9)
        self._forward.observe(result.timings.verify_ns / 1e9)
        self._accept.observe(result.timings.accept_ns / 1e9)
        experts = self.experts() if result.timings.verify_ns else None
        if experts is not None:
            self._experts.observe(experts)
        stats = [update.stats for update in result.updates if update.stats is not None]
        if stats:
            # a prompt's chunk beside a line of steps is a batch of its own
            self._sequences.count(max(each.batch_sequences for each in stats))
            self._budget.count(*[each.budget for each in stats])
            grown = [each for each in stats if each.tree_nodes]
            self._rows.count(*[each.tree_nodes for each in grown])
            self._accepted.count(*[each.accepted for each in grown])
        self.attachments.stepped(result, experts)
        for update in result.updates:
            if update.finish is not Finish.NONE:
                self._ended(update)

    def _ended(self, update: Update) -> None:
        self._ends.add(1, update.finish.name.lower())
        if update.timings is not None:
            self._queue.observe(update.timings.queue_ns / 1e9)
        if update.usage is not None:
            self._prompt.add(update.usage.prompt_tokens)
        self.attachments.end(update)


def watch_engine(load: Callable[[], EngineLoad]) -> None:
    """Exports the engine's counters and what it holds."""
    counters: Mapping[str, tuple[str, Callable[[EngineLoad], float]]] = {
        "steps": ("Steps, those that only prefill included.", lambda now: now.steps),
        "fed_steps": ("Steps whose acceptance fed the next one on the device.", lambda now: now.fed),
        "tokens": ("Tokens emitted.", lambda now: now.tokens),
        "missed_drafts": ("Steps whose trees came too late or not at all.", lambda now: now.missed_drafts),
        "adoptions": ("Attachments that went on with a sequence that was here.", lambda now: now.adopted),
        "rebuilds": ("Attachments whose output was replayed.", lambda now: now.rebuilt),
        "faults": ("Steps that failed.", lambda now: now.faults),
        "predicted_step_seconds": ("Seconds that steps were to take.", lambda now: now.pace.predicted_seconds),
        "measured_step_seconds": ("Seconds that those took, to the next plan.", lambda now: now.pace.measured_seconds),
        "budget_trials": ("Steps with other budgets than the best known.", lambda now: now.pace.budget_trials),
        "prefix_query_tokens": (
            "Tokens of prompts that were looked up in the prefix cache.",
            lambda now: now.prefixes.query_tokens,
        ),
        "prefix_hit_tokens": ("Those that were found there.", lambda now: now.prefixes.hit_tokens),
        "prefix_reclaimed_pages": (
            "Pages that the prefix cache gave back.",
            lambda now: now.prefixes.reclaimed_pages,
        ),
    }
    gauges: Mapping[str, tuple[str, Callable[[EngineLoad], float]]] = {
        "running_sequences": ("Sequences in the running batch.", lambda now: now.running),
        "waiting_sequences": ("Sequences that wait for a place.", lambda now: now.waiting),
        "kept_ends": ("Ended sequences whose last tokens are not acknowledged.", lambda now: now.kept_ends),
        "cache_free_pages": ("Pages of the cache that no sequence holds.", lambda now: now.free_pages),
        "prefix_pages": ("Pages that the prefix cache keeps, in use or not.", lambda now: now.prefixes.pages),
        "prefix_feature_bytes": ("Bytes of features that it keeps.", lambda now: now.prefixes.feature_bytes),
        "cache_pages": ("Pages of the cache.", lambda now: now.total_pages),
        "waiting_limit": ("Sequences that may wait for a place.", lambda now: now.waiting_limit),
    }
    for name, (text, read) in {**counters, **gauges}.items():
        telemetry.watch(f"hedgerow_verifier_{name}", text, lambda read=read: read(load()), goes_down=name in gauges)  # type: ignore[misc]
    # All from the start, at 0: `increase()` does not see the first of a series that begins at 1.
    none: dict[str, float] = dict.fromkeys(get_args(Why), 0)
    refused = "hedgerow_verifier_refused_trees"
    telemetry.watch(refused, "Trees that were not sound, by why.", lambda: none | {**load().refused_trees}, "reason")


def watch_device(waited: Callable[[], float]) -> None:
    """Exports the seconds that steps have waited for a GPU; 0 on a CPU."""
    telemetry.watch("hedgerow_verifier_device_wait_seconds", "Seconds that steps waited for a GPU.", waited)


class Ratio(Protocol):
    """What a probe measured."""

    @property
    def ratio(self) -> float: ...


def watch_acceptance(measured: Callable[[], Ratio | None]) -> None:
    """Exports what the probe found; nothing before it has."""

    def ratios() -> Mapping[str, float]:
        found = measured()
        return {} if found is None else {"probe": found.ratio}

    text = (
        "The drafter's acceptance as a share of its card's; of the best with its layers' neighbours where it has none."
    )
    telemetry.watch("hedgerow_verifier_acceptance_ratio", text, ratios, "source", goes_down=True)


class DraftCounters(Protocol):
    """What the drafter's peer counts."""

    connected: int
    answered: int
    late: int
    unasked: int
    failed: int


def watch_drafter(counters: DraftCounters, connected: Callable[[], bool]) -> None:
    """Exports how the drafter does."""

    def requests() -> Mapping[str, float]:
        outcomes = {"answered": counters.answered, "late": counters.late}
        return outcomes | {"unasked": counters.unasked, "failed": counters.failed}

    telemetry.watch("hedgerow_verifier_drafts", "Steps with work for the drafter, by outcome.", requests, "outcome")
    telemetry.watch("hedgerow_verifier_drafter_connections", "Streams to the drafter.", lambda: counters.connected)
    telemetry.watch("hedgerow_verifier_drafter_up", "A drafter that fits is there.", connected, goes_down=True)
