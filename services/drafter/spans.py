"""The drafter's spans: of steps that the verifier chooses, in traces of their own, linked to the requests in them."""

from __future__ import annotations

import time
from collections.abc import Sequence

from hedgerow.engine.types import DraftAnswer
from hedgerow.rpc import tracing


def drafted(answer: DraftAnswer, requests: Sequence[str]) -> None:
    """A request was answered just now; `requests` are traceparents."""
    end = time.time_ns()
    built = end - answer.build_ns
    about = {"hedgerow.step_id": answer.step_id, "hedgerow.trees": len(answer.trees)}
    begun = built - answer.forward_ns
    parent = tracing.told("draft", (begun, end), links=requests, kind="server", attributes=about)
    tracing.told("forward", (begun, built), parent)
    tracing.told("build", (built, end), parent)
