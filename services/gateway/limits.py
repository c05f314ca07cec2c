"""How much of anything a request may have.

Counts are checked on the wire message, before anything is copied: a list costs a client a byte or two an element and
this process a hundred. So arguments here are protobuf messages or the plain data of types.py, by the same field names.
"""

from __future__ import annotations

import re
from typing import Any

from hedgerow.errors import InvalidRequest

KEY_BYTES = 128  # of an idempotency key, a tenant, a session id
PRIORITY = 100
DEADLINE_MS = 1 << 40  # 35 years
STOP_BYTES, BIAS = 256, 100.0
LISTS = {
    "stop": (16, "stop strings"),
    "stop_token_ids": (64, "tokens"),
    "bad_words": (64, "strings"),
    "logit_bias": (1024, "entries"),
}
TOOLS, TOOL_BYTES, TOOL_DEPTH = 128, 1 << 16, 32  # declarations, bytes of one as JSON, levels of its schema
TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
TURN_TOKENS = 3  # markers of a chat's message, and of a tool call, at least
# W3C: 55 characters in version 00, later ones may have more; at least 512 of the state are to be passed on.
TRACEPARENT, TRACESTATE = 128, 512
_TRACEPARENT = re.compile(
    r"(?!ff|00.{54})[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?:-[!-~]*)?"
)


def check_generate(request: Any, context_length: int) -> None:
    """The counts of a GenerateRequest. Raises InvalidRequest."""
    check_tokens("token_ids", len(request.token_ids.ids), context_length)
    check_chat(request, context_length)
    check_lists(request.sampling)
    check_bytes("trace.traceparent", request.trace.traceparent, TRACEPARENT)
    check_bytes("trace.tracestate", request.trace.tracestate, TRACESTATE)


def check_tokens(field: str, count: int, context_length: int) -> None:
    """Tokens of a prompt that is to leave room for one. Raises InvalidRequest."""
    if count >= context_length:
        raise InvalidRequest(field, f"{count} tokens", f"below the model's context of {context_length}")


def check_chat(request: Any, context_length: int) -> None:
    """Messages and tool calls of a request's chat that a context could hold. Raises InvalidRequest."""
    most = context_length // TURN_TOKENS
    limit = f"at most {most}: each takes {TURN_TOKENS} of the context's {context_length} tokens or more"
    messages = request.chat.messages
    if len(messages) > most:
        raise InvalidRequest("chat.messages", f"{len(messages)} messages", limit)
    calls = 0
    for i, message in enumerate(messages):
        calls += len(message.tool_calls)
        if calls > most:
            raise InvalidRequest(f"chat.messages[{i}].tool_calls", f"{calls} calls with those before", limit)


def check_lists(sampling: Any) -> None:
    """The lists of sampling parameters. Raises InvalidRequest."""
    for field, (most, what) in LISTS.items():
        count = len(getattr(sampling, field))
        if count > most:
            raise InvalidRequest(f"sampling.{field}", f"{count} {what}", f"at most {most} {what}")


def check_bytes(field: str, text: str, most: int) -> None:
    """The UTF-8 size of a field. Raises InvalidRequest."""
    size = len(text.encode())
    if size > most:
        raise InvalidRequest(field, f"{size} bytes", f"at most {most} bytes")


def brief(text: str) -> str:
    """A text as an error shows it: an error does not repeat a megabyte."""
    return text if len(text) <= KEY_BYTES else f"{len(text)} characters"


def known_trace(traceparent: str, tracestate: str) -> tuple[str, str]:
    """Trace context from a header: what is malformed or too long counts as absent, as W3C's specification says."""
    if len(traceparent) > TRACEPARENT or not _TRACEPARENT.fullmatch(traceparent):
        return "", ""
    return traceparent, tracestate if len(tracestate) <= TRACESTATE and tracestate.isprintable() else ""
