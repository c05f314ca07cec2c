"""What the kvstore counts: a few microseconds an append message, half of one an entry."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from hedgerow.rpc import telemetry
from services.kvstore.records import Answer, Entry, Status

STATUSES = tuple(status.name.lower() for status in Status if status < Status.EXISTS)  # of an append
MOST_ENTRIES = 128  # the last bucket


class AppendMetrics:
    """Counts append messages as they are answered."""

    def __init__(self) -> None:
        self._seconds = telemetry.histogram("hedgerow_kvstore_append_seconds", "A message, Redis's answer included.")
        self._entries = telemetry.tally("hedgerow_kvstore_append_entries", "Entries of a message.", MOST_ENTRIES)
        self._statuses = telemetry.counter(
            "hedgerow_kvstore_appends", "Entries by answer; fenced ones among them.", {"status": STATUSES}
        )
        self._tokens = telemetry.counter("hedgerow_kvstore_tokens", "Tokens of entries that were taken.")

    def count(self, entries: Sequence[Entry], answers: Sequence[Answer], seconds: float) -> None:
        """Takes one message."""
        self._seconds.observe(seconds)
        self._entries.count(len(entries))
        tokens, by_status = 0, dict[Status, int]()
        for entry, answer in zip(entries, answers, strict=True):
            by_status[answer.status] = by_status.get(answer.status, 0) + 1
            tokens += len(entry.tokens) // 4 if answer.status is Status.OK else 0
        for status, count in by_status.items():
            self._statuses.add(count, status.name.lower())
        self._tokens.add(tokens)


class Redis(Protocol):
    """What the runner counts."""

    exchanges: int
    silences: int
    shortfalls: int
    took: Callable[[float], None]


class Memory(Protocol):
    """What each node told of its memory."""

    @property
    def used(self) -> Mapping[str, float]:
        """Bytes."""

    @property
    def limit(self) -> Mapping[str, float]:
        """Bytes; 0: none."""


def watch_redis(runner: Redis, memory: Memory) -> None:
    """Exports the runner's counters, and how full Redis is."""
    name = "hedgerow_kvstore_redis"
    runner.took = telemetry.histogram(f"{name}_seconds", "A round trip to Redis that was answered.").observe
    telemetry.watch(f"{name}_exchanges", "Round trips to Redis, whoever asked.", lambda: runner.exchanges)
    telemetry.watch(f"{name}_silences", "Round trips without an answer in time.", lambda: runner.silences)
    telemetry.watch(f"{name}_shortfalls", "Writes that too few replicas had in time.", lambda: runner.shortfalls)
    used, limit = "Memory that a node uses.", "The most that a node may use; 0: it has no limit."
    telemetry.watch(f"{name}_memory_bytes", used, lambda: memory.used, "node", goes_down=True)
    telemetry.watch(f"{name}_memory_limit_bytes", limit, lambda: memory.limit, "node", goes_down=True)
