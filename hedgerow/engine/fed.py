"""The verifier's engine where acceptance feeds the next step on the device, for a drafter beside it in this process.

While nothing but decoding happens, the running sequences are a line: the host enters them once, then launches the step
after the next before it reads what the last one did. Draft, verification, acceptance and the next step's inputs stay on
the device (`hedgerow.model.fed`); the host checks trees, follows stops and lengths, and tells the owners afterwards,
beside the device's next step. What a step did for a sequence that has ended, was cancelled or attached anew meanwhile,
or whose tree fails the check, is dropped, and so is all that was computed from it: cache and context before the last
step that counted are untouched, and the next one goes on from there.

Prompts are computed beside a line: a chunk is launched between two steps, and kept before the next one is. Their
features go to the drafter meanwhile.

The line ends, and steps are those of `VerifierEngine` with all waiting, while a replay is computed, while a sequence
changes its logits (logit_bias, min_tokens), where the store is so far behind that a sequence may be held, at the last
positions of the models, and for one step where sequences came or so many went that a smaller step will do.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch

from hedgerow.engine import rows
from hedgerow.engine.config import EngineConfig
from hedgerow.engine.drafter import DrafterEngine
from hedgerow.engine.fed_line import Chunk, Flight, Member, apart_from_prompts, entering, now
from hedgerow.engine.reads import Reads
from hedgerow.engine.sampler import RowDraw, edits, walk_rows
from hedgerow.engine.scheduler import Work
from hedgerow.engine.sequence import AttachedSequence, Phase
from hedgerow.engine.step_times import Load
from hedgerow.engine.tree import Tree
from hedgerow.engine.types import DraftAnswer, DraftBatch, DraftTree, DraftWork, EngineLoad, StepResult, TreeNodes
from hedgerow.engine.verifier import Plan, VerifierEngine
from hedgerow.model.batch import SequenceRows
from hedgerow.model.fed import AHEAD, FedLine, FedSteps
from hedgerow.model.interface import Context, Target

log = logging.getLogger(__name__)
NO_FEATURES = torch.empty(0, 0)
NO_ROWS = SequenceRows(0, (), (), (), ())


class Beside(Protocol):
    """A drafter in this process: `hedgerow.engine.step.LocalDrafter`."""

    @property
    def engine(self) -> DrafterEngine: ...
    def propose(self, batch: DraftBatch) -> DraftAnswer | None: ...
    def made(self) -> None:
        """Trees were made without its being asked."""


class FedVerifier(VerifierEngine):
    """As VerifierEngine, whose steps are taken by `step`: the same tokens."""

    def __init__(
        self,
        model: Target,
        config: EngineConfig,
        vocabulary: Sequence[bytes],
        eos: frozenset[int],
        reads: Reads | None = None,
    ) -> None:
        super().__init__(model, config, vocabulary, eos, reads)
        self._feed: FedSteps | None = None
        self._line: Sequence[Member] = ()
        self._flights = deque[Flight]()
        self._chunk: Chunk | None = None
        self._most = 0  # nodes of a tree
        self._apart = False  # the next step is not fed: what failed a check must get on
        self.fed_steps = 0  # that were read

    def feed(self, steps: FedSteps | None) -> None:
        """From now on steps feed each other where they can; None: none does."""
        assert not self._line, "between two lines"
        self._feed, self._chunk = steps, None

    @torch.inference_mode()
    def step(self, drafter: Beside) -> StepResult | None:
        """The next step's result; None when there is nothing to do."""
        begun = time.perf_counter_ns()
        kept = self._keep_chunk()
        self.pace.fed = bool(self._line)
        if self._line:
            works = self._works()
        else:
            plan = self.plan()
            if plan is None:
                return None
            if not self._enter(plan, drafter):
                given = plan.draft.works or plan.draft.release
                return self.verify(plan, drafter.propose(plan.draft) if given else None)
            works = plan.works
        if not any(member.here for member in self._line):
            self._drop()
            return self.step(drafter)
        works, prompts = apart_from_prompts(works)
        try:
            if not self._compute(prompts, drafter):
                works, prompts = [*works, *prompts], []  # there is no room for them beside a line
            while len(self._flights) < AHEAD and (asked := self._asks(works)) is not None:
                self._launch(works, asked)
            self._send(kept, drafter)  # while the device has something to do
            if not self._flights:  # entered, and yet nothing can be launched
                self._apart = True
                self._leave()
                return self.step(drafter)
            flight = self._flights.popleft()
            lines = self._steps.collect(flight.launched)
        except Exception:
            log.exception("a step that feeds the next one failed: steps wait for each other from now on")
            self._drop()
            self._feed = self._chunk = None
            return self.step(drafter)
        return self._read(flight, lines, begun, drafter, prompts)

    def load(self) -> EngineLoad:
        return super().load()._replace(fed=self.fed_steps)

    @property
    def _steps(self) -> FedSteps:
        assert self._feed is not None
        return self._feed

    def _enter(self, plan: Plan, drafter: Beside) -> bool:
        """Begins a line with the plan's works, if that is possible. The drafter has taken their features then."""
        feed, works = self._feed, apart_from_prompts(plan.works)[0]
        apart, self._apart = self._apart, False
        if feed is None or apart or not 0 < len(works) <= feed.most_members:
            return False
        if not all(self._serves(work) and self._has_room(work.sequence, feed.block * AHEAD) for work in works):
            return False
        self._most = min(feed.most_nodes, drafter.engine.config.max_budget)
        asked = [min(work.budget, self._most) for work in works]
        contexts: list[Context | None] = [None] * len(works)
        if any(asked):
            taken = replace(plan.draft, works=[replace(work, budget=0) for work in plan.draft.works])
            answer = drafter.propose(taken)
            self._desk.trees(works, taken, answer)
            if answer is None:
                return False
            contexts = [drafter.engine.context(work.sequence.number, work.prefix) for work in works]
        if any(work.sequence.budget and context is None for work, context in zip(works, contexts, strict=True)):
            return False  # its features must be kept here
        line = [self._member(work, most, context) for work, most, context in zip(works, asked, contexts, strict=True)]
        try:
            until = feed.enter([entering(member) for member in line], self.cache)
        except Exception:
            log.exception("steps could not be made to feed each other: they wait from now on")
            self._feed = None
            return False
        for member, position in zip(line, until, strict=True):
            member.until = position
        self._line = line
        return True

    def _member(self, work: Work, asked: int, context: Context | None) -> Member:
        sequence = work.sequence
        last = len(sequence.start.prompt) + sequence.start.sampling.max_tokens - 2
        return Member(sequence, context, len(sequence.output), sequence.start.topk_cap, 0, last, asked)

    def _serves(self, work: Work) -> bool:
        """`curve`: budgets that follow what steps take and trees bring are those of steps that wait."""
        sampling, offset = work.sequence.start.sampling, len(work.sequence.output)
        apart = edits(RowDraw(sampling, 0, offset)) or work.sequence.curve is not None
        return work.phase is Phase.DECODING and not apart

    def _has_room(self, sequence: AttachedSequence, tokens: int) -> bool:
        """Whether so many more do not hold the sequence back, and the models have positions for them and a tree."""
        positions = self._model.config.max_position_embeddings
        end = sequence.cached + tokens + self._steps.block
        return sequence.run_ahead() + tokens <= self.config.run_ahead and end <= min(positions, self._steps.positions)

    def _asks(self, works: Sequence[Work]) -> list[int] | None:
        """Most nodes of each member's tree in one more step, -1 of one that has left; None where there can be none."""
        feed, ahead = self._steps, len(self._flights)
        wanted = {work.sequence.number: work for work in works}
        here = [member for member in self._line if member.here]
        if feed.stale or len(works) != len(here) or not any(m.sequence.remaining > ahead for m in here):
            return None
        for member in here:
            work = wanted.get(member.sequence.number)
            if work is None or not self._serves(work) or not self._has_room(work.sequence, feed.block * (ahead + 1)):
                return None
            if min(work.prefix + feed.block * (ahead + 1), member.last) > member.until:  # what it accepts goes there
                return None
            if work.room > 1:  # the last token wants no tree, and a smaller step for it is not worth it
                member.asked = min(work.budget, self._most) if member.context is not None else 0
        asked = [member.asked if member.here else -1 for member in self._line]
        return asked if feed.suits(asked) else None

    def _launch(self, works: Sequence[Work], asked: Sequence[int]) -> None:
        launched = self._steps.launch(asked)
        self._step_id += 1
        self._flights.append(Flight(now(self._step_id, works), launched, asked))

    def _compute(self, prompts: Sequence[Work], drafter: Beside) -> bool:
        """Launches prompts' chunks behind the last step. Where logits are changed they are waited for. False: they can
        only be computed without a line."""
        if not prompts:
            return True
        parts = rows.build(prompts, {}, self.cache.page_size)
        drawn = [part.drawn for part in parts if part.drawn is not None]
        if any(edits(tree.draw) for tree in drawn):
            self._accept(now(self._step_id, prompts), parts, rows.compute(parts, self._model, None, self.cache))
            self._send(prompts, drafter)
            return True
        launched = self._steps.compute([part.rows for part in parts], self.cache, walk_rows(drawn))
        if launched is not None:
            self._chunk = Chunk(parts, launched)
        return launched is not None

    def _keep_chunk(self) -> list[Work]:
        """Waits for what was launched of prompts, and gives those whose features the drafter lacks. The step behind it
        is still under way: what is launched before that one is done follows without a gap."""
        chunk, self._chunk = self._chunk, None
        if chunk is None:
            return []
        try:
            done = self._steps.computed(chunk.launched)
        except Exception:
            log.exception("a prompt's chunk failed beside steps that feed each other: they wait from now on")
            self._drop()
            self._feed = None
            return []
        works = [part.work for part in chunk.parts]
        if any(work.sequence.finish for work in works):  # a step that failed has ended all of them
            return []
        self._accept(now(self._step_id, works), list(chunk.parts), done)
        return works

    def _send(self, works: Sequence[Work], drafter: Beside) -> None:
        """Gives the drafter the prompts' features. What is not sent here is with the next step that asks it."""
        batch = self._desk.compose(self._step_id, list(works))
        if batch.works:
            self._desk.trees(list(works), batch, drafter.propose(batch))

    def _read(
        self, flight: Flight, lines: Sequence[FedLine], begun: int, drafter: Beside, prompts: Sequence[Work]
    ) -> StepResult:
        """What the step did, told. Where none is under way behind it, the line ends: none could be launched."""
        there, plan = time.perf_counter_ns(), replace(flight.plan, begun_ns=begun)
        try:
            self._accept_lines(flight, lines, prompts)
        except Exception as error:  # noqa: BLE001  as in `verify`
            self._fail(plan, error)
        self.fed_steps += 1
        if any(flight.asked):
            drafter.made()
        if not any(member.here for member in self._line):
            self._drop()
        elif not self._flights:
            self._leave()
        plan.works.extend(prompts)
        return self._result(plan, 0, there - begun, time.perf_counter_ns() - there)

    def _accept_lines(self, flight: Flight, lines: Sequence[FedLine], prompts: Sequence[Work]) -> None:
        works = {work.sequence.number: work for work in flight.plan.works}
        counted = [line for line in lines if line.path]
        total, keys = sum(len(line.tokens) + 1 for line in counted), sum(work.prefix for work in works.values())
        chunk, scores = sum(work.rows for work in prompts), sum(work.rows * work.prefix for work in prompts)
        self.pace.loaded(Load(len(counted), total, keys, chunk=chunk, scores=scores))  # the draft is in it
        for member, line, asked in zip(self._line, lines, flight.asked, strict=True):
            if asked < 0 or not member.here:
                continue
            work = works[member.sequence.number]._replace(prefix=member.sequence.cached, budget=asked)
            tree = self._tree(member, line, work)
            if tree is None:
                member.gone = self._apart = True  # so is the next step, which began behind this one
                continue
            tokens = member.sequence.truncate([*(line.tokens[row - 1] for row in line.path[1:]), line.bonus])
            walk = rows.Walk(line.path[: len(tokens)], tokens, len(line.path) - 1)
            member.sequence.pass_by(len(walk.path))
            part = rows.Part(work, tree if tree.tokens else None, NO_ROWS, 0, None)
            self._emit(flight.plan, part, walk, total)
            member.output = len(member.sequence.output)

    def _tree(self, member: Member, line: FedLine, work: Work) -> Tree | None:
        """The tree that was verified; None where it should not have been, or nothing was."""
        if not line.path or line.bonus < 0:
            return None
        drafted = DraftTree(member.sequence.number, TreeNodes(line.tokens, line.parents, line.logprobs), 0)
        draft = DraftWork(member.sequence.number, 0, NO_FEATURES, 0, 0, work.budget, member.cap)
        return self._desk.checked(drafted, draft)

    def _leave(self) -> None:
        """The line ends after the step that was read last: contexts then reach up to every anchor."""
        line, self._line = self._line, ()
        self._steps.leave([member.sequence.cached for member in line])

    def _drop(self) -> None:
        """The line ends, and steps under way do not count. Contexts of sequences that go on begin anew."""
        for member in self._line:
            if member.context is not None and not member.sequence.finish:
                member.context.reset(member.sequence.cached)
        self._line = ()
        self._flights.clear()
