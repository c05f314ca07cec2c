"""Which sequences run in the next step, and with how many rows.

Continuous batching: a sequence joins between two steps and leaves after the one that ends it. Decoding sequences take
part in every step; prompts and replays share `prefill_rows` rows beside them, so that a long prompt delays a decoding
sequence by one chunk a step and never by more.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from hedgerow.engine.config import EngineConfig
from hedgerow.engine.kv_cache import PagePool
from hedgerow.engine.prefix_cache import PrefixCache
from hedgerow.engine.sequence import AttachedSequence, Phase
from hedgerow.engine.types import Finish


class Work(NamedTuple):
    """One sequence's part in a step."""

    sequence: AttachedSequence
    phase: Phase
    prefix: int  # positions already in the cache
    rows: int  # prompt or replay rows; the anchor's one row in DECODING
    budget: int  # most nodes of the tree below the anchor; 0: plain
    room: int = 1  # most tokens to emit: the sequence's end, or what the store may be behind
    feed: bool = True  # whether features of rows that draw nothing go to the drafter at once


class Paces(Protocol):
    """Decides how much a step takes on: hedgerow/engine/pace.py."""

    def begins(self, now_ns: int) -> None: ...
    def idle(self) -> None: ...
    def choose(self, works: Sequence[Work]) -> list[Work]: ...
    def chunk_rows(self, works: Sequence[Work], prompts: int) -> int: ...
    def feeds(self) -> bool: ...


class Scheduler:
    """The running batch and the waiting queue. Not safe for use by several threads at once.

    Admission is in order (priority, then first come) and by the worst case: a sequence runs once `slots` of it fit
    into pages that no other one holds, or that it shares. So a running sequence never waits for memory, and whoever is
    first in the queue gets the next pages that are freed; nothing overtakes it.
    """

    def __init__(self, config: EngineConfig, pool: PagePool, pace: Paces | None = None) -> None:
        self.config, self.pool, self.prefixes = config, pool, PrefixCache(config, pool)
        self._measured = pace
        self.waiting: list[AttachedSequence] = []  # sorted by `order`
        self.running: list[AttachedSequence] = []
        self._pace = 1.0  # seconds between two ends of sequences, smoothed
        self._last_end: float | None = None

    @property
    def free_places(self) -> int:
        return self.config.max_sequences - len(self.running)

    @property
    def retry_after(self) -> float:
        """Seconds after which a place in the queue is likely to be free."""
        return min(max(self._pace, 0.1), 30.0)

    def add(self, sequence: AttachedSequence) -> None:
        bisect.insort(self.waiting, sequence, key=lambda item: item.order)

    def reorder(self, sequence: AttachedSequence) -> None:
        """The sequence's priority may have changed."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
            self.add(sequence)

    def remove(self, sequence: AttachedSequence) -> None:
        """Takes the sequence out, wherever it is, and frees its pages."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._note_end(time.monotonic())
        else:
            self.waiting.remove(sequence)
        self.prefixes.release(sequence)

    def ready(self) -> bool:
        """Whether `schedule` would give any work."""
        return self._admissible() or any(not self._held(sequence) for sequence in self.running)

    def schedule(self) -> list[Work]:
        """Admits what fits, then the next step's work; decoding sequences first."""
        begun = time.perf_counter_ns()
        self.prefixes.publish()
        while self._admissible():
            sequence = self.waiting.pop(0)
            self.prefixes.admit(sequence)
            self.running.append(sequence)
        self.prefixes.follow()
        decoding = [self._decode(s) for s in self.running if s.phase is Phase.DECODING and not self._held(s)]
        if self._measured is None:
            return decoding + self._chunks(decoding)
        self._measured.begins(begun)
        decoding = self._measured.choose(decoding)
        works = decoding + self._chunks(decoding)
        if not works:
            self._measured.idle()
        return works

    def check(self) -> None:
        """InvariantViolation unless the pool's counts are those of the sequences here."""
        self.pool.check([*(sequence.pages for sequence in self.running), tuple(self.prefixes.pages)])
        self.prefixes.check(self.running)

    def _admissible(self) -> bool:
        if not self.waiting or self.free_places <= 0:
            return False
        return self.prefixes.needed(self.waiting[0]) <= self.prefixes.available

    def _held(self, sequence: AttachedSequence) -> bool:
        """A store that does not acknowledge must not be buried: the sequence pauses, its pages stay."""
        return sequence.run_ahead() >= self.config.run_ahead

    def _decode(self, sequence: AttachedSequence) -> Work:
        room = min(sequence.remaining, self.config.run_ahead - sequence.run_ahead())
        # the last token needs no tree: its row alone draws it
        budget = sequence.budget if room > 1 else 0
        return Work(sequence, Phase.DECODING, sequence.cached, 1, budget, room)

    def _chunks(self, decoding: list[Work]) -> list[Work]:
        """Replay chains and prompt chunks within the rows that the step has for them, shared out in the queue's order.

        Replays stand first: rows of output lie together, before those of prompts.
        """
        works: list[Work] = []
        behind = [s for s in self.running if s.phase in (Phase.PREFILLING, Phase.REPLAYING)]
        behind.sort(key=lambda item: item.order)
        left, feed = self.config.prefill_rows, True
        if behind and self._measured is not None:
            left, feed = self._measured.chunk_rows(decoding, len(behind)), self._measured.feeds()
        for sequence in behind:
            phase, prompt = sequence.phase, len(sequence.start.prompt)
            if phase is Phase.PREFILLING:
                rows = min(prompt - sequence.cached, left)
            else:
                rows = min(sequence.anchor_position - sequence.cached, self.config.replay_rows, left)
            if rows == 0:
                break
            left -= rows
            works.append(Work(sequence, phase, sequence.cached, rows, 0, feed=feed or sequence.curve is None))
        return sorted(works, key=lambda work: work.phase is Phase.PREFILLING)

    def _note_end(self, now: float) -> None:
        if self._last_end is not None:
            self._pace += 0.2 * (now - self._last_end - self._pace)
        self._last_end = now


def expired(sequence: AttachedSequence, now: float) -> bool:
    """Whether the sequence's deadline has passed."""
    return sequence.start.deadline is not None and now >= sequence.start.deadline and sequence.finish is Finish.NONE
