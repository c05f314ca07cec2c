"""State of one sequence that is attached to this engine."""

from __future__ import annotations

import enum
import time
from collections.abc import Sequence

import torch

from hedgerow.engine.chunks import Chunks
from hedgerow.engine.curves import Curve
from hedgerow.engine.features import FeatureRing
from hedgerow.engine.stops import Stop, StopWatch
from hedgerow.engine.tree import TreeConfig
from hedgerow.engine.types import (
    Finish,
    PrefillChunk,
    SequenceTimings,
    Start,
    StepStats,
    StepTimings,
    Update,
    UsageCount,
)


class Phase(enum.Enum):
    """What the next rows of a sequence are."""

    WAITING = "waiting"  # for pages
    PREFILLING = "prefilling"  # prompt positions, path P
    REPLAYING = "replaying"  # output that was committed before, as forced chains, path D
    DECODING = "decoding"  # the anchor and its tree, path D
    FINISHED = "finished"


class AttachedSequence:
    """One attachment of a session: prompt, output, and how far the cache has got.

    `output` only grows, a step's tokens at a time, and is never copied. `cached` counts the positions whose latents are
    final in the cache; the phase follows from it. In DECODING the last output token is at `cached`. `told` counts the
    output tokens that the owner has been sent, or came with; `committed` those that the store has.
    """

    def __init__(
        self,
        number: int,
        start: Start,
        budget: int,
        ring: int,
        vocabulary: Sequence[bytes],
        eos: frozenset[int],
    ) -> None:
        self.number, self.start, self.budget = number, start, budget
        self.pair = (start.epoch, start.attempt)
        self.output: list[int] = []
        self.committed = self.told = len(start.committed)
        self.cached = 0
        self.pages: tuple[int, ...] = ()
        self.keys: tuple[bytes, ...] | None = None  # of its prompt's whole pages; None: not asked for yet
        self.shared = self.found = 0  # leading pages that the prefix cache has too; prompt tokens that it had before
        self.features = FeatureRing(ring) if budget else None
        self.curve: Curve | None = None  # of a sequence whose budgets are chosen, up to `budget`
        self.finish = Finish.NONE
        self._watch = StopWatch(start.sampling, vocabulary, eos)
        self.stop: Stop | None = None
        self._follow(start.committed)
        self.steps = self.draft_tokens = self.accepted_draft_tokens = 0
        self.timings, self._chunks = SequenceTimings(), Chunks()
        self._begun_ns = time.perf_counter_ns()

    @property
    def order(self) -> tuple[int, int]:
        """Sorts sequences: larger priority first, then first come, first served."""
        return (-self.start.priority, self.number)

    @property
    def phase(self) -> Phase:
        if self.finish:
            return Phase.FINISHED
        if not self.pages:
            return Phase.WAITING
        if self.cached < len(self.start.prompt):
            return Phase.PREFILLING
        return Phase.DECODING if self.cached == self.anchor_position else Phase.REPLAYING

    @property
    def anchor_position(self) -> int:
        """Position of the last output token."""
        return len(self.start.prompt) + len(self.output) - 1

    @property
    def remaining(self) -> int:
        """Tokens that may still be emitted."""
        return self.start.sampling.max_tokens - len(self.output)

    @property
    def slots(self) -> int:
        """Cache slots that the sequence can need at most: at the last anchor but one, with a whole tree below."""
        last_anchor = len(self.start.prompt) + self.start.sampling.max_tokens - 2
        return last_anchor + TreeConfig(self.budget).q_len

    def run_ahead(self) -> int:
        """Emitted tokens that the store has not acknowledged."""
        return len(self.output) - self.committed

    def attach(self, start: Start, budget: int) -> None:
        """Goes on under `start`, whose text agrees with this one's; what its owner lacks is told again.

        Committed tokens that were not here yet are replayed. The budget cannot grow: pages are reserved for it.
        """
        self.start, self.pair, self._chunks = start, (start.epoch, start.attempt), Chunks()
        self.budget = min(self.budget, budget)
        if start.budget is not None:
            self.curve = None
        self._follow(start.committed[len(self.output) :])
        self.committed = self.told = len(start.committed)

    def admit(self, pages: tuple[int, ...]) -> None:
        """Out of the queue: the sequence runs, in these pages."""
        self.pages = pages
        self.timings.queue_ns = time.perf_counter_ns() - self._begun_ns

    def spend(self, phase: Phase, rows: int, step: StepTimings) -> None:
        """Counts a step in which the sequence took part with `rows`, as what it was when the step began."""
        timings = self.timings
        if phase is Phase.DECODING:
            timings.draft_ns += step.draft_ns
            timings.verify_ns += step.verify_ns
            timings.accept_ns += step.accept_ns
        else:
            timings.prefill_ns += step.total_ns
            of_prompt = rows if phase is Phase.PREFILLING else 0
            self._chunks.add(PrefillChunk(1, of_prompt, rows - of_prompt, step.total_ns, step.step_end_unix_ns))
        timings.step_end_unix_ns = step.step_end_unix_ns
        timings.total_ns = time.perf_counter_ns() - self._begun_ns

    def truncate(self, tokens: Sequence[int]) -> list[int]:
        """The tokens up to and including the one that ends the sequence; `stop` then says why. Fed once each."""
        for count, token in enumerate(tokens, 1):
            self._feed(token)
            if self.stop is not None:
                return list(tokens[:count])
        return list(tokens)

    def _follow(self, committed: Sequence[int]) -> None:
        """Takes tokens that were decided elsewhere. Where they contain an end, the sequence has ended."""
        for token in committed:
            if self.stop is None:
                self._feed(token)
        self.output += committed

    def _feed(self, token: int) -> None:
        """Moves on, by one token, all state that follows from the output before a position. The one place that does:
        for a step, a rebuilt and an adopted sequence alike, so whoever adds such state (a grammar's automaton) adds it
        here and gets it back from tokens everywhere. What offset or position decide, min_tokens and noise, is no state.
        """
        self.stop = self._watch.feed(token)

    def keep(self, features: torch.Tensor) -> None:
        """Takes the features [n, width] of the next n positions, which are now final in the cache."""
        self.cached += features.shape[0]
        if self.features is not None:
            self.features.put(features)

    def pass_by(self, rows: int) -> None:
        """As `keep` where the features never come here: the drafter has them."""
        self.cached += rows
        if self.features is not None:
            self.features.skip(rows)

    def find(self, pages: Sequence[torch.Tensor | None], size: int) -> None:
        """Takes the next pages of the prompt, `size` positions each, as final; with their features where known."""
        self.cached += size * len(pages)
        self.found += size * len(pages)
        if (ring := self.features) is None:
            return
        for features in pages:
            if features is None:
                ring.skip(size)
            else:
                ring.put(features)

    def update(self, stats: StepStats | None = None, error: Exception | None = None) -> Update:
        """What to tell the owner: the output not told yet and, if the sequence has ended, how and at what cost."""
        ended = self.finish is not Finish.NONE
        if ended:
            self.timings.total_ns = time.perf_counter_ns() - self._begun_ns
            self.timings.queue_ns = self.timings.queue_ns or self.timings.total_ns
        stop = self.stop if ended and self.stop is not None and self.finish is self.stop.finish else None
        offset, self.told = self.told, len(self.output)
        timed = ended or offset == len(self.start.committed)
        return Update(
            owner=self.start.owner,
            session_id=self.start.session_id,
            epoch=self.start.epoch,
            attempt=self.start.attempt,
            offset=offset,
            tokens=tuple(self.output[offset:]),
            finish=self.finish,
            matched_stop=stop.string if stop else "",
            matched_token=stop.token if stop else None,
            usage=self.usage() if ended else None,
            stats=stats,
            error=error,
            timings=self.timings if timed else None,
            chunks=self._chunks.seen if timed else (),
            cached_prompt_tokens=self.found if timed else 0,
            trace=self.start.trace,
        )

    def usage(self) -> UsageCount:
        return UsageCount(
            prompt_tokens=len(self.start.prompt),
            completion_tokens=len(self.output),
            cached_prompt_tokens=self.found,
            steps=self.steps,
            draft_tokens=self.draft_tokens,
            accepted_draft_tokens=self.accepted_draft_tokens,
        )
