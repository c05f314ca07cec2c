"""How much a step takes on, as measured: budgets that nobody fixed, and rows of prompts beside sequences that decode.

The engine tells what each step was asked for and did; its time runs from its plan to the next one's, so a step after
which there was nothing to do is not counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

from hedgerow.engine.budgets import Budgets
from hedgerow.engine.chunk_times import UNKNOWN, ChunkTimes
from hedgerow.engine.config import EngineConfig
from hedgerow.engine.rows import Part, Walk
from hedgerow.engine.scheduler import Work
from hedgerow.engine.sequence import Phase
from hedgerow.engine.step_times import Load, StepTimes, kind
from hedgerow.engine.tree import TreeConfig
from hedgerow.engine.types import DraftBatch, PaceLoad

ALL, EVERY = 200, 5  # first steps, all of which are learned from; of the later ones each fifth
FIRST = 16  # steps whose chunks tell nothing: what such a step takes without one is hardly known
KNOWN, LAST = 8, 32  # steps of a kind from which on it is known without a fit; how many are remembered
KINDS = 64  # of decoding steps


class Ran(NamedTuple):
    """A step whose time is not over."""

    begun_ns: int
    load: Load
    draft_ns: int
    tokens: int


class Alone:
    """What steps without prompts took, by kind, as it was: what the steps beside a prompt are measured against.

    The median of the last ones: a few were the first of their process, or somebody else had the cores. No fit and no
    factor of the machine's is in it, as in `StepTimes`: these follow chunks too, which take longer as their prompts
    do, and would allow them more the more they took.
    """

    def __init__(self) -> None:
        self._kinds: dict[tuple[int, ...], deque[float]] = {}  # ms; the newest stands last

    def took(self, load: Load, ms: float) -> None:
        seen = self._kinds.pop(_kind(load), None)
        self._kinds[_kind(load)] = seen = deque(maxlen=LAST) if seen is None else seen
        seen.append(ms)
        if len(self._kinds) > KINDS:
            del self._kinds[next(iter(self._kinds))]

    def milliseconds(self, load: Load) -> float:
        """0: hardly seen."""
        seen = self._kinds.get(_kind(load), ())
        return median(seen) if len(seen) >= KNOWN else 0.0


def _kind(load: Load) -> tuple[int, ...]:
    return kind(load.sequences), kind(load.rows), kind(load.drafts), kind(load.nodes)


class Pace:
    """One engine's. Not safe for use by several threads at once."""

    def __init__(self, config: EngineConfig, made: Callable[[], int] = lambda: 0) -> None:
        """`made`: as `hedgerow.model.interface.Records.made`."""
        self._factor, self._most = config.prefill_factor, config.prefill_rows
        self.times, self.chunks, self._without = StepTimes(), ChunkTimes(), Alone()
        self.budgets = Budgets(self.times, config.auto_budget) if config.auto_budget else None
        self.predicted_ms = self.measured_ms = 0.0  # of steps that were predicted before they ran, all together
        self._made, self._made_before = made, 0
        self._ran: Ran | None = None
        self._begun_ns = self._count = 0
        self._alone_ms = 0.0  # what the present step would take without its chunk; 0: nothing decodes
        self.fed = False  # steps make their trees themselves (fed.py), and the time of both is known as one
        self._seen: tuple[Sequence[Part], Sequence[Walk]] = ((), ())

    def load(self) -> PaceLoad:
        trials = self.budgets.trials if self.budgets is not None else 0
        return PaceLoad(self.predicted_ms / 1000, self.measured_ms / 1000, trials)

    def begins(self, now_ns: int) -> None:
        """A step is planned: the one before it is over. It teaches nothing if something was recorded in it."""
        ran, self._ran, self._begun_ns = self._ran, None, now_ns
        made, self._made_before = self._made_before, self._made()
        if ran is None or now_ns <= ran.begun_ns or self._made_before != made:
            return
        ms = (now_ns - ran.begun_ns) / 1e6
        self._count += 1
        if self._count < ALL or self._tells(ran.load):
            self._learn_step(ran, ms)
        if not ran.load.chunk:
            self._without.took(ran.load, ms)
        elif self._alone_ms and self._count > FIRST:
            self.chunks.took(ran.load.chunk, ms - self._alone_ms, ms)
        if self.budgets is not None:
            self.budgets.took(ran.tokens, ms)

    def _tells(self, load: Load) -> bool:
        """Whether a step is worth its fit, once there were many. Where no budgets are chosen nothing asks for what
        steps beside a prompt take, and each size of chunk would be a kind of its own: a fit every few steps."""
        if self.budgets is not None and (self.budgets.trying or load.chunk):
            return True
        return self._count % EVERY == 0 and (self.budgets is not None or not load.chunk)

    def _learn_step(self, ran: Ran, ms: float) -> None:
        predicted = self.times.milliseconds(ran.load)
        if predicted:
            self.predicted_ms, self.measured_ms = self.predicted_ms + predicted, self.measured_ms + ms
        asked = ran.load.drafts or ran.load.fed
        draft = ran.draft_ns / 1e6 if asked else 0.0
        self.times.took(ran.load, draft, ms - draft)

    def idle(self) -> None:
        """There is nothing to do: the time that passes is no step's."""
        self._ran = None

    def choose(self, works: Sequence[Work]) -> list[Work]:
        """The decoding sequences' works, with the budgets of this step."""
        return list(works) if self.budgets is None else self.budgets.choose(works)

    def feeds(self) -> bool:
        """Whether prompts' features are worth sending: where no tree is grown they wait until one is."""
        return self.budgets is None or self.budgets.speculates

    def chunk_rows(self, works: Sequence[Work], prompts: int) -> int:
        """Most rows of prompts and replays, of so many sequences, in the step that decodes `works`.

        At least one, so that a prompt always advances, and as many as cost hardly more than one (chunk_times.py); all
        that the configuration allows where nobody decodes. Where
        more sequences wait for their prompts than decode, each of them has as much of the step as one that decodes has:
        a stream that began first must not hold up the many that came with it.
        """
        self._alone_ms = 0.0
        if not works or not self._factor:
            return self._most
        rows = sum(TreeConfig(work.budget).q_len for work in works)
        budgets = [work.budget for work in works if work.budget]
        load = Load(len(works), rows, sum(work.prefix for work in works))
        if budgets and not self.fed:
            load = load._replace(drafts=len(budgets), nodes=sum(budgets), fed=len(works))
        alone = self._alone_ms = self._without.milliseconds(load) or self.times.milliseconds(load)
        if not alone:
            return min(UNKNOWN, self._most)
        allowed = alone * (self._factor - 1) * max(1.0, prompts / len(works))
        return min(self._most, self.chunks.rows(allowed))

    def saw(self, parts: Sequence[Part], walks: Sequence[Walk]) -> None:
        """What the present step has computed, and what came of it."""
        self._seen = parts, walks

    def ran(self, draft: DraftBatch, draft_ns: int, verify_ns: int) -> None:
        """The step that was planned last has run."""
        (parts, walks), self._seen = self._seen, ((), ())
        asked = {work.sequence: work.budget for work in draft.works if work.budget}
        sequences = rows = keys = chunk = scores = tokens = 0
        for part, walk in zip(parts, walks, strict=True):
            work, size = part.work, len(part.rows.tokens)
            if work.phase is not Phase.DECODING:
                chunk, scores = chunk + size, scores + size * work.prefix
                continue
            sequences, rows, keys, tokens = sequences + 1, rows + size, keys + work.prefix, tokens + len(walk.tokens)
            if self.budgets is not None and work.sequence.number in asked:
                self._learn(self.budgets, part, walk, waited=2 * draft_ns > verify_ns)
        fed = sum(work.features.shape[0] for work in draft.works)
        self.loaded(Load(sequences, rows, keys, len(asked), sum(asked.values()), fed, chunk, scores), draft_ns, tokens)

    def loaded(self, load: Load, draft_ns: int = 0, tokens: int = 0) -> None:
        """What the step that was planned last was asked for and brought."""
        self._ran = Ran(self._begun_ns, load, draft_ns, tokens)

    def _learn(self, budgets: Budgets, part: Part, walk: Walk, waited: bool) -> None:
        """A tree that the end of its sequence cut says nothing. One that did not come does, if it was waited for."""
        work = part.work
        if work.room <= work.budget or work.sequence.stop is not None:
            return
        if part.tree is not None:
            budgets.verified(work.sequence, work.budget, [row - 1 for row in walk.path[1:]])
        elif waited:
            budgets.verified(work.sequence, work.budget, ())
