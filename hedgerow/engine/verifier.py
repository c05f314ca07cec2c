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
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from hedgerow.engine import adopt, rows
from hedgerow.engine.config import EngineConfig
from hedgerow.engine.drafts import DraftDesk
from hedgerow.engine.inbox import Cancel, Committed, Inbox, Limits
from hedgerow.engine.kv_cache import PagePool
from hedgerow.engine.pace import Pace
from hedgerow.engine.reads import Hidden, Reads
from hedgerow.engine.scheduler import Scheduler, Work, expired
from hedgerow.engine.sequence import AttachedSequence
from hedgerow.engine.types import (
    DraftAnswer,
    DraftBatch,
    EngineLoad,
    Finish,
    Start,
    StepResult,
    StepStats,
    StepTimings,
    Update,
)
from hedgerow.errors import HedgerowError, Internal, InvalidRequest
from hedgerow.model.interface import Target, WholeSteps, made_of

log = logging.getLogger(__name__)
NAMED = 32  # sessions in one line of the log


@dataclass(frozen=True)
class Plan:
    """One step that is about to run. It may be dropped: the next plan then has the same work again."""

    step_id: int
    works: list[Work]
    draft: DraftBatch  # its features are views, valid until `verify`
    begun_ns: int  # perf_counter_ns
    planned_ns: int


class VerifierEngine:
    """Continuous batching with tree verification over one target model.

    vocabulary: what each token adds to the text, b"" for control tokens. eos: tokens that end a sequence by default.
    reads: what the drafter does; None: the model's hidden states.
    """

    def __init__(
        self,
        model: Target,
        config: EngineConfig,
        vocabulary: Sequence[bytes],
        eos: frozenset[int],
        reads: Reads | None = None,
    ) -> None:
        if len(vocabulary) != model.config.vocab_size:
            raise InvalidRequest("vocabulary", len(vocabulary), f"the model has {model.config.vocab_size} tokens")
        self._reads = reads or Hidden(model.feature_width)
        if not self._reads.width:
            config = replace(config, max_budget=0, default_budget=0, auto_budget=0)
        self.config = config
        positions = model.config.max_position_embeddings
        self.max_context = min(config.max_context or positions, positions)
        self._model, self._eos, self.pace = model, eos, Pace(config, made_of(model))
        self._whole = model if isinstance(model, WholeSteps) else None
        self.cache = model.new_cache(config.pages_for(self.max_context))
        self.pool = PagePool(self.cache.pages, self.cache.page_size)
        self.scheduler = Scheduler(config, self.pool, self.pace)
        self._desk = DraftDesk(config.feature_rows, model.config.vocab_size)
        slots = self.cache.pages * self.cache.page_size
        self._inbox = Inbox(config, Limits(vocabulary, eos, self.max_context, slots), self.scheduler)
        self._held: dict[str, AttachedSequence] = {}
        self._kept = adopt.KeptEnds(config.kept_ends, config.kept_tokens, config.kept_seconds)
        self._updates: list[Update] = []  # to be told with the next step's result
        self._behind: list[AttachedSequence] = []  # adopted, and their owners lack some of their output
        self._step_id = self._tokens = self._adopted = self._rebuilt = self._faults = 0

    # What callers may do, from any thread. Each raises as in `Inbox`.

    def start(self, start: Start) -> None:
        self._inbox.start(start)

    def cancel(self, session_id: str, epoch: int, attempt: int) -> None:
        self._inbox.cancel(session_id, epoch, attempt)

    def committed(self, session_id: str, epoch: int, attempt: int, offset: int) -> None:
        self._inbox.committed(session_id, epoch, attempt, offset)

    def holds(self, session_id: str) -> bool:
        return self._inbox.holds(session_id)

    def load(self) -> EngineLoad:
        return EngineLoad(
            running=len(self.scheduler.running),
            waiting=self._inbox.waiting,
            waiting_limit=self.config.max_waiting,
            free_pages=self.scheduler.prefixes.available,
            total_pages=self.pool.pages,
            held_sequences=self._inbox.held,
            steps=self._step_id,
            tokens=self._tokens,
            refused_trees=dict(self._desk.refused),
            missed_drafts=self._desk.missed,
            adopted=self._adopted,
            rebuilt=self._rebuilt,
            kept_ends=len(self._kept),
            faults=self._faults,
            prefixes=self.scheduler.prefixes.load(),
            pace=self.pace.load(),
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
            or bool(self._updates or self._behind)
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
        works = self._works()
        if not (works or self._updates or self._behind or self._desk.has_releases):
            return None
        self._step_id += 1
        draft = self._desk.compose(self._step_id, works)
        return Plan(self._step_id, works, draft, begun, time.perf_counter_ns())

    @torch.inference_mode()
    def verify(self, plan: Plan, answer: DraftAnswer | None) -> StepResult:
        """Runs the step. `answer` None, of another step, or with bad trees: those sequences decode plainly."""
        begun, verify_ns = time.perf_counter_ns(), 0
        try:
            trees = self._desk.trees(plan.works, plan.draft, answer)
            parts = rows.build(plan.works, trees, self.cache.page_size)
            if parts:
                forward_begun = time.perf_counter_ns()
                done = rows.compute(parts, self._model, self._whole, self.cache)
                verify_ns = time.perf_counter_ns() - forward_begun
                self._accept(plan, parts, done)
                self.pace.ran(plan.draft, begun - plan.planned_ns, verify_ns)
        except Exception as error:  # noqa: BLE001  whatever it is, no sequence may wait for ever
            self._fail(plan, error)
        return self._result(plan, begun - plan.planned_ns, verify_ns, time.perf_counter_ns() - begun - verify_ns)

    def _works(self) -> list[Work]:
        """Takes in what callers asked, and what time has ended; then what runs next."""
        self._take_messages()
        now = time.monotonic()
        self._kept.prune(now)
        for sequence in [s for s in self._held.values() if expired(s, now)]:
            self._end(sequence, Finish.DEADLINE)
        return self.scheduler.schedule()

    def _result(self, plan: Plan, draft_ns: int, verify_ns: int, accept_ns: int) -> StepResult:
        self._catch_up()
        updates, self._updates = self._updates, []
        timings = StepTimings(draft_ns, verify_ns, accept_ns, time.perf_counter_ns() - plan.begun_ns, time.time_ns())
        for work in plan.works:
            work.sequence.spend(work.phase, work.rows, timings)
        return StepResult(plan.step_id, updates, timings)

    def check(self) -> None:
        """InvariantViolation where pages, queues and sequences contradict each other."""
        self.scheduler.check()

    def _accept(self, plan: Plan, parts: list[rows.Part], done: rows.Done) -> None:
        """Draws, walks, moves the accepted latents into place, keeps their features, and hands out the tokens."""
        walks, features = rows.accept(parts, done, self._model, self.cache, self._eos), done.features
        total, read = features.shape[0], self._reads.rows(features, parts, walks)
        for part, walk, more in zip(parts, walks, read, strict=True):
            part.work.sequence.keep(more)
            if walk.tokens:
                self._emit(plan, part, walk, total)
        self.pace.saw(parts, walks)

    def _emit(self, plan: Plan, part: rows.Part, walk: rows.Walk, total_rows: int) -> None:
        """Appends the tokens to the output, tells the owner, and ends the sequence where it stopped."""
        sequence = part.work.sequence
        sequence.output += walk.tokens
        sequence.steps += 1
        sequence.draft_tokens += len(part.tree.tokens) if part.tree else 0
        sequence.accepted_draft_tokens += min(walk.accepted, len(walk.tokens))
        self._tokens += len(walk.tokens)
        stats = rows.stats(part, walk, plan.step_id, len(plan.works), total_rows)
        if sequence.stop is not None:
            self._end(sequence, sequence.stop.finish, stats)
        else:
            self._updates.append(sequence.update(stats))

    def _take_messages(self) -> None:
        while (message := self._inbox.take()) is not None:
            if isinstance(message, AttachedSequence):
                self._attach(message)
            elif isinstance(message, Committed):
                held = self._held.get(message.session_id)
                if held is not None and held.pair == message.pair:
                    held.committed = max(held.committed, min(message.offset, len(held.output)))
                self._kept.committed(*message)
            elif isinstance(message, Cancel):
                held = self._held.get(message.session_id)
                if held is not None and held.pair <= message.pair:
                    self._end(held, Finish.CANCELLED)
                self._kept.cancel(*message)

    def _attach(self, sequence: AttachedSequence) -> None:
        """Goes on with what is held of the session, or has ended and was kept; else computes it from its tokens."""
        session_id, start = sequence.start.session_id, sequence.start
        held, ended = self._held.get(session_id), self._kept.take(session_id, time.monotonic())
        if held is not None:
            self._updates.append(adopt.refusal(held, sequence.pair))
            if (why := adopt.mismatch(held, start)) is None:
                return self._adopt(held, sequence)
            fields = start.named | {"step": self._step_id + 1, "differs": why}
            log.error("attached with another text than it has here: computed again", extra={"fields": fields})
            held.finish = Finish.ERROR
            self._release(held)
        elif ended is not None and adopt.mismatch(ended, start) is None:
            return self._end_again(ended, sequence)
        self._rebuilt += bool(start.committed)
        self._held[session_id] = sequence
        self.scheduler.add(sequence)
        if sequence.stop is not None:  # all of it was committed before
            self._end(sequence, sequence.stop.finish)
        return None

    def _adopt(self, held: AttachedSequence, sequence: AttachedSequence) -> None:
        held.attach(sequence.start, sequence.budget)
        self._adopted += 1
        self.scheduler.reorder(held)
        self._behind.append(held)
        if held.stop is not None:  # another verifier brought it to its end
            self._end(held, held.stop.finish)

    def _end_again(self, ended: AttachedSequence, sequence: AttachedSequence) -> None:
        """The sequence is over and its end was lost on the way: nothing is computed, all of it is told again."""
        self._inbox.forget(sequence)
        if sequence.pair < ended.pair:
            self._updates.append(adopt.refusal(sequence, ended.pair))
        else:
            ended.attach(sequence.start, sequence.budget)
            self._adopted += 1
            self._updates.append(ended.update())
        if ended.run_ahead():
            self._kept.add(ended, time.monotonic())

    def _catch_up(self) -> None:
        """Tells owners of adopted sequences what they lack, where this step did not."""
        behind, self._behind = self._behind, []
        self._updates += [s.update() for s in behind if s.told < len(s.output)]

    def _end(
        self, sequence: AttachedSequence, finish: Finish, stats: StepStats | None = None, error: Exception | None = None
    ) -> None:
        """Frees all that the sequence holds; its last update goes out with the step's result."""
        sequence.finish = finish
        self._release(sequence)
        self._updates.append(sequence.update(stats, error))
        if sequence.stop is not None and finish is sequence.stop.finish and sequence.run_ahead():
            self._kept.add(sequence, time.monotonic())

    def _release(self, sequence: AttachedSequence) -> None:
        self.scheduler.remove(sequence)
        self._desk.forget(sequence)
        self._inbox.forget(sequence)
        del self._held[sequence.start.session_id]

    def _fail(self, plan: Plan, error: Exception) -> None:
        named = [work.sequence.start.session_id for work in plan.works[:NAMED]]
        fields = {"step": plan.step_id, "sequences": len(plan.works), "sessions": named}
        log.exception("a step failed: every running sequence ends with an error", extra={"fields": fields})
        self._faults += 1
        cause = error if isinstance(error, HedgerowError) else Internal(f"{type(error).__name__}: {error}")
        for sequence in list(self.scheduler.running):
            self._end(sequence, Finish.ERROR, error=cause)
        self.scheduler.prefixes.clear()
