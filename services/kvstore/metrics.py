"""What the kvstore counts: a few microseconds an append message, half of one an entry."""

from __future__ import annotations

from collections.abc import Sequence
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


def watch_redis(runner: Redis) -> None:
    """Exports the runner's counters."""
    name = "hedgerow_kvstore_redis"
    telemetry.watch(f"{name}_exchanges", "Round trips to Redis, whoever asked.", lambda: runner.exchanges)
    telemetry.watch(f"{name}_silences", "Round trips without an answer in time.", lambda: runner.silences)
    telemetry.watch(f"{name}_shortfalls", "Writes that too few replicas had in time.", lambda: runner.shortfalls)
