"""The caller's trace context, as metadata: what the gateway does is then part of the caller's trace.

Only where the caller uses OpenTelemetry itself: this package needs nothing of it.
"""

from __future__ import annotations

import sys
from typing import Any

MOST_STATE = 512
"""Characters of a tracestate that are passed on, as the specification asks for."""


def context() -> tuple[tuple[str, str], ...]:
    """Of the span that is current in the caller's task or thread; nothing where there is none."""
    api: Any = sys.modules.get("opentelemetry.trace")
    if api is None or not hasattr(api, "get_current_span"):  # it is being imported
        return ()
    here = api.get_current_span().get_span_context()
    if not here.is_valid:
        return ()
    parent = f"00-{here.trace_id:032x}-{here.span_id:016x}-{int(here.trace_flags):02x}"
    state = here.trace_state.to_header()
    return (("traceparent", parent), *((("tracestate", state),) if 0 < len(state) <= MOST_STATE else ()))
