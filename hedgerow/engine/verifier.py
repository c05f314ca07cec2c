"""The verifier's engine: plan a step, check the trees in one forward pass, commit what the target agrees with.

    plan = engine.plan()                    # what runs, and what to ask the drafter
    result = engine.verify(plan, answer)    # one forward pass, one update a sequence

One thread plans and verifies, one step at a time. `start`, `cancel`, `committed` and `load` may be called from any.

A fault in a step (an exception out of the model, say) ends every running sequence with an ERROR update and frees its
pages; waiting sequences stay, and the engine goes on. `load().faults` counts them: where the device does not heal (a
CUDA context), the process that holds the engine must exit once it has sent those updates.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from hedgerow.engine import rows
from hedgerow.engine.config import EngineConfig
from hedgerow.engine.drafts import DraftDesk
from hedgerow.engine.inbox import Cancel, Committed, Inbox, Limits
from hedgerow.engine.kv_cache import PagePool
from hedgerow.engine.scheduler import Scheduler, Work, expired
from hedgerow.engine.sequence import AttachedSequence
from hedgerow.engine.types import DraftAnswer, DraftBatch, Finish, Start, StepResult, StepStats, StepTimings, Update
from hedgerow.errors import Fenced, HedgerowError, Internal, InvalidRequest
from hedgerow.model.cache import LatentCache
from hedgerow.model.interface import Target

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Plan:
    """One step that is about to run. It may be dropped: the next plan then has the same work again."""

    step_id: int
    works: list[Work]
    draft: DraftBatch  # its features are views, valid until `verify`
    begun_ns: int  # perf_counter_ns
    planned_ns: int


class EngineLoad(NamedTuple):
    """What routing, health and tests need to know; counters since start."""

    running: int
    waiting: int
    waiting_limit: int
    free_pages: int
    total_pages: int
    held_sequences: int
    steps: int
    tokens: int
    refused_trees: Mapping[str, int]
    missed_drafts: int
    faults: int


class VerifierEngine:
    """Continuous batching with tree verification over one target model.

    vocabulary: what each token adds to the text, b"" for control tokens. eos: tokens that end a sequence by default.
    """

    def __init__(self, model: Target, config: EngineConfig, vocabulary: Sequence[bytes], eos: frozenset[int]) -> None:
        if len(vocabulary) != model.config.vocab_size:
            raise InvalidRequest("vocabulary", len(vocabulary), f"the model has {model.config.vocab_size} tokens")
        if not model.feature_width:  # nothing that a drafter could read
            config = replace(config, max_budget=0, default_budget=0)
        self.config = config
        positions = model.config.max_position_embeddings
        self.max_context = min(config.max_context or positions, positions)
        self._model, self._eos = model, eos
        self.cache = model.new_cache(config.pages or _pages(config, self.max_context))
        self.pool = PagePool(self.cache.pages, self.cache.page_size)
        self.scheduler = Scheduler(config, self.pool)
        self._desk = DraftDesk(config.feature_rows, model.config.vocab_size)
        slots = self.cache.pages * self.cache.page_size
        self._inbox = Inbox(config, Limits(vocabulary, eos, self.max_context, slots), self.scheduler)
        self._held: dict[str, AttachedSequence] = {}
        self._updates: list[Update] = []  # to be told with the next step's result
        self._step_id = self._tokens = self._faults = 0

    # What callers may do, from any thread. Each raises as in `Inbox`.

    def start(self, start: Start) -> None:
        self._inbox.start(start)

    def cancel(self, session_id: str, epoch: int, attempt: int) -> None:
        self._inbox.cancel(session_id, epoch, attempt)

    def committed(self, session_id: str, epoch: int, attempt: int, offset: int) -> None:
        self._inbox.committed(session_id, epoch, attempt, offset)

    def load(self) -> EngineLoad:
        return EngineLoad(
            running=len(self.scheduler.running),
            waiting=self._inbox.waiting,
            waiting_limit=self.config.max_waiting,
            free_pages=self.pool.free,
            total_pages=self.pool.pages,
            held_sequences=self._inbox.held,
            steps=self._step_id,
            tokens=self._tokens,
            refused_trees=dict(self._desk.refused),
            missed_drafts=self._desk.missed,
            faults=self._faults,
        )

    # The step, from one thread.

    def sequence(self, session_id: str) -> AttachedSequence | None:
        """The session's sequence, for a look between two steps."""
        return self._held.get(session_id)

    def has_work(self) -> bool:
        """Whether `plan` would give a step. False while every sequence is held back by its committed offset."""
        due = self.next_deadline()
        return (
            len(self._inbox) > 0
            or bool(self._updates)
            or self._desk.has_releases
            or self.scheduler.ready()
            or (due is not None and due <= time.monotonic())
        )

    def next_deadline(self) -> float | None:
        """The earliest deadline (time.monotonic() seconds): an idle loop must come back for it."""
        held = self._held.values()
        return min((s.start.deadline for s in held if s.start.deadline is not None), default=None)

    def plan(self) -> Plan | None:
        """Takes in what callers asked, admits, and gives the next step; None when there is nothing to do."""
        begun = time.perf_counter_ns()
        self._take_messages()
        now = time.monotonic()
        for sequence in [s for s in self._held.values() if expired(s, now)]:
            self._end(sequence, Finish.DEADLINE)
        works = self.scheduler.schedule()
        if not works and not self._updates and not self._desk.has_releases:
            return None
        self._step_id += 1
        draft = self._desk.compose(self._step_id, works)
        return Plan(self._step_id, works, draft, begun, time.perf_counter_ns())

    @torch.inference_mode()
    def verify(self, plan: Plan, answer: DraftAnswer | None) -> StepResult:
        """Runs the step. `answer` None, of another step, or with bad trees: those sequences decode plainly."""
        begun = time.perf_counter_ns()
        verify_ns = 0
        try:
            trees = self._desk.trees(plan.works, plan.draft, answer)
            parts = rows.build(plan.works, trees, self.cache.page_size)
            if parts:
                forward_begun = time.perf_counter_ns()
                logits, features = self._model.forward([part.rows for part in parts], self.cache)
                verify_ns = time.perf_counter_ns() - forward_begun
                self._accept(plan, parts, logits, features)
        except Exception as error:
            log.exception("step %d failed: every running sequence ends with an error", plan.step_id)
            self._fail(error)
        updates, self._updates = self._updates, []
        ended = time.perf_counter_ns()
        timings = StepTimings(
            draft_ns=begun - plan.planned_ns,
            verify_ns=verify_ns,
            accept_ns=ended - begun - verify_ns,
            total_ns=ended - plan.begun_ns,
            step_end_unix_ns=time.time_ns(),
        )
        for work in plan.works:
            work.sequence.spend(work.phase, timings)
        return StepResult(plan.step_id, updates, timings)

    def check(self) -> None:
        """InvariantViolation where pages, queues and sequences contradict each other."""
        self.scheduler.check()

    def _accept(self, plan: Plan, parts: list[rows.Part], logits: torch.Tensor, features: torch.Tensor) -> None:
        """Draws, walks, moves the accepted latents into place, keeps their features, and hands out the tokens."""
        walks = rows.walk_all(parts, logits, self._eos, self._model.walk)
        moved = [rows.moves(part, walk.path, self.cache.page_size) for part, walk in zip(parts, walks, strict=True)]
        sources = [slot for source, _ in moved for slot in source]
        if sources:
            self.cache.copy(sources, [slot for _, target in moved for slot in target])
        total = features.shape[0]
        for part, walk in zip(parts, walks, strict=True):
            part.work.sequence.keep(_rows(features, part.first_row, walk.path))
            if walk.tokens:
                self._emit(plan, part, walk, total)

    def _emit(self, plan: Plan, part: rows.Part, walk: rows.Walk, total_rows: int) -> None:
        """Appends the tokens to the output, tells the owner, and ends the sequence where it stopped."""
        work, nodes = part.work, part.tree.tokens if part.tree else ()
        sequence = work.sequence
        sequence.output += walk.tokens
        sequence.steps += 1
        sequence.draft_tokens += len(nodes)
        sequence.accepted_draft_tokens += min(walk.accepted, len(walk.tokens))
        self._tokens += len(walk.tokens)
        stats = StepStats(
            step_id=plan.step_id,
            budget=work.budget,
            tree_nodes=len(nodes),
            accepted=walk.accepted,
            emitted=len(walk.tokens),
            batch_sequences=len(plan.works),
            batch_rows=total_rows,
            tree_parents=part.tree.parents if part.tree and sequence.start.want_trees else (),
            tree_tokens=nodes if sequence.start.want_trees else (),
        )
        if sequence.stop is not None:
            self._end(sequence, sequence.stop.finish, work.offset, stats)
        else:
            self._updates.append(sequence.update(work.offset, stats))

    def _take_messages(self) -> None:
        while (message := self._inbox.take()) is not None:
            if isinstance(message, AttachedSequence):
                self._attach(message)
            elif isinstance(message, Committed):
                held = self._held.get(message.session_id)
                if held is not None and held.pair == message.pair:
                    held.committed = max(held.committed, min(message.offset, len(held.output)))
            elif isinstance(message, Cancel):
                held = self._held.get(message.session_id)
                if held is not None and held.pair <= message.pair:
                    self._end(held, Finish.CANCELLED)

    def _attach(self, sequence: AttachedSequence) -> None:
        session_id = sequence.start.session_id
        held = self._held.get(session_id)
        if held is not None:
            fenced = Fenced(session_id, held.pair[0], sequence.pair[0])
            self._end(held, Finish.ERROR, error=fenced)
        self._held[session_id] = sequence
        self.scheduler.add(sequence)
        if sequence.stop is not None:  # all of it was committed before
            self._end(sequence, sequence.stop.finish)

    def _end(
        self,
        sequence: AttachedSequence,
        finish: Finish,
        offset: int | None = None,
        stats: StepStats | None = None,
        error: Exception | None = None,
    ) -> None:
        """Frees all that the sequence holds; its last update goes out with the step's result."""
        sequence.finish = finish
        self.scheduler.remove(sequence)
        self._desk.forget(sequence)
        self._inbox.forget(sequence)
        del self._held[sequence.start.session_id]
        at = len(sequence.output) if offset is None else offset
        self._updates.append(sequence.update(at, stats, error))

    def _fail(self, error: Exception) -> None:
        self._faults += 1
        cause = error if isinstance(error, HedgerowError) else Internal(f"{type(error).__name__}: {error}")
        for sequence in list(self.scheduler.running):
            self._end(sequence, Finish.ERROR, error=cause)


def _pages(config: EngineConfig, max_context: int) -> int:
    page, most = LatentCache.page_size, max_context + config.max_budget
    return max(-(-most // page), config.max_sequences * -(-(most // 4) // page))


def _rows(features: torch.Tensor, first: int, path: Sequence[int]) -> torch.Tensor:
    """The path's rows; a slice where they are neighbours."""
    if path[-1] == len(path) - 1:
        return features[first : first + len(path)]
    return features[[first + row for row in path]]
