"""What the drafter counts: a few microseconds a request."""

from __future__ import annotations

from collections.abc import Callable

from hedgerow.engine.types import DraftAnswer
from hedgerow.rpc import telemetry

MOST_SEQUENCES = 128  # the last bucket


def watch_device(waited: Callable[[], float]) -> None:
    """Exports the seconds that drafts have waited for a GPU; 0 on a CPU."""
    telemetry.watch("hedgerow_drafter_device_wait_seconds", "Seconds that drafts waited for a GPU.", waited)


class DraftMetrics:
    """Counts requests as they are answered."""

    def __init__(self) -> None:
        self._forward = telemetry.histogram("hedgerow_drafter_forward_seconds", "A request's forward pass.")
        self._build = telemetry.histogram("hedgerow_drafter_build_seconds", "Building a request's trees.")
        self._trees = telemetry.tally("hedgerow_drafter_request_trees", "Trees in an answer.", MOST_SEQUENCES)
        self._nodes = telemetry.counter("hedgerow_drafter_nodes", "Nodes of all trees.")
        self._verifiers = telemetry.gauge("hedgerow_drafter_verifiers", "Draft streams that are open.")

    def count(self, answer: DraftAnswer) -> None:
        """Takes one answer."""
        self._forward.observe(answer.forward_ns / 1e9)
        self._build.observe(answer.build_ns / 1e9)
        self._trees.count(len(answer.trees))
        self._nodes.add(sum(len(tree.nodes.tokens) for tree in answer.trees))

    def verifiers(self, streams: int) -> None:
        """A stream opened or ended."""
        self._verifiers.set(streams)
