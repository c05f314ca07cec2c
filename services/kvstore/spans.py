"""The kvstore's span of an append message: where its gateway asks for one, in a trace of its own, with links.

No span is below another process's: that one may die before it gives its own out.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from hedgerow.rpc import tracing
from services.kvstore.records import Answer, Entry, Status

NAMED = 32  # traces in one line of the log


def named(requests: Sequence[str]) -> dict[str, object]:
    """For the log lines of a message: the traces of those requests in it that its gateway named, by traceparents."""
    known = [tracing.trace_id(each) for each in requests[:NAMED]]
    return {"trace": known[0] if len(known) == 1 else "", "traces": known if len(known) > 1 else ""}


def appended(requests: Sequence[str], entries: Sequence[Entry], answers: Sequence[Answer], seconds: float) -> None:
    """A message was answered just now, after so long; `requests` are traceparents."""
    end = time.time_ns()
    about: dict[str, tracing.Attribute] = {
        "hedgerow.entries": len(entries),
        "hedgerow.tokens": sum(len(entry.tokens) // 4 for entry in entries),
    }
    for status, count in Counter(answer.status for answer in answers).items():
        about[f"hedgerow.answers.{status.name.lower()}"] = count
    away = any(answer.status is Status.UNAVAILABLE for answer in answers)
    times = (end - int(seconds * 1e9), end)
    error = "UNAVAILABLE" if away else None
    tracing.told("append", times, links=requests, kind="server", error=error, attributes=about)
