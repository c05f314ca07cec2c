"""The steps of an attempt as a bounded number of events, however long the answer is.

The first steps are an event each; then one event stands for two, for four, ... and has the sums, so that nothing is
lost but the when.
"""

from __future__ import annotations

from collections.abc import Iterator

from services.gateway.messages import StepStats, Timings

OF_ONE_SIZE = 4  # events until each stands for twice as many steps: a thousand steps are 32 events


class Windows:
    """Adds up, one step after the other."""

    def __init__(self) -> None:
        self._size, self._of_size = 1, 0
        self._events: list[tuple[int, dict[str, float]]] = []
        self._now: dict[str, float] = {}
        self._at = 0
        self._total = {"steps": 0.0, "tree_nodes": 0.0, "accepted": 0.0, "emitted": 0.0}

    def add(self, at: int, stats: StepStats, timings: Timings) -> None:
        """A step that ended `at` Unix nanoseconds."""
        if self._now and self._now["steps"] >= self._size:
            self._shut()
        now, self._at = self._now, at
        if not now:
            now.update(steps=0, tree_nodes=0, accepted=0, emitted=0, draft_ns=0, verify_ns=0, accept_ns=0, commit_ns=0)
        now["steps"] += 1
        now["step_id"], now["budget"], now["batch"] = stats.step_id, stats.budget, stats.batch_sequences
        now["tree_nodes"] += stats.tree_nodes
        now["accepted"] += stats.accepted
        now["emitted"] += stats.emitted
        now["draft_ns"] += timings.draft_ns
        now["verify_ns"] += timings.verify_ns
        now["accept_ns"] += timings.accept_ns

    def committed(self, took_ns: int) -> None:
        """The store answered; counted with the steps that come meanwhile."""
        if self._now:
            self._now["commit_ns"] += took_ns

    def events(self) -> Iterator[tuple[int, dict[str, float]]]:
        """When, and what: times in milliseconds."""
        if self._now:
            self._shut()
        for at, sums in self._events:
            yield (
                at,
                {
                    name.replace("_ns", "_ms"): round(value / 1e6, 3) if name.endswith("_ns") else value
                    for name, value in sums.items()
                },
            )

    def total(self) -> dict[str, float]:
        """Of all steps, as attributes."""
        total = {name: sum(sums[name] for _, sums in self._events) for name in self._total}
        return {f"hedgerow.{name}": value for name, value in total.items()}

    def _shut(self) -> None:
        self._events.append((self._at, self._now))
        self._now = {}
        self._of_size += 1
        if self._of_size == OF_ONE_SIZE:
            self._size, self._of_size = 2 * self._size, 0
