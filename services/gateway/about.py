"""What a call's span says of it, in the names of OpenTelemetry's conventions for RPC and generative AI.

Prompts, answers and stop strings are said only where the operator wants that.
"""

from __future__ import annotations

import json

from hedgerow import errors
from hedgerow.rpc import tracing
from hedgerow.rpc.status import code_of
from services.gateway.session import Session
from services.gateway.types import Chat, Finish, Generation

MOST_CONTENT = 1 << 16  # characters
FINISHES = {finish.name.lower() for finish in Finish if finish}
SAMPLING = ("temperature", "top_p", "top_k", "max_tokens")
DOUBLES = ("temperature", "top_p", "top_k")  # as the conventions have them


class Told:
    """Writes attributes to one span; does nothing where nobody takes it."""

    def __init__(self, span: tracing.Span, *, content: bool) -> None:
        self._span, self._takes = span, span.is_recording()
        self._content = content and self._takes
        self._text: list[str] = []
        self._size = 0
        self._session: Session | None = None

    def asked(self, asked: Generation) -> None:
        """What the client wants."""
        if not self._takes:
            return
        operation = "chat" if isinstance(asked.prompt, Chat) else "text_completion"
        about: dict[str, tracing.Attribute] = {"gen_ai.operation.name": operation, "gen_ai.provider.name": "hedgerow"}
        about["gen_ai.request.stream"] = True
        if asked.model:
            about["gen_ai.request.model"] = asked.model
        if self._content:
            about["gen_ai.input.messages"] = _messages(asked)
            about["gen_ai.request.stop_sequences"] = list(asked.sampling.stop)
        self._span.set_attributes(about)

    def session(self, session: Session) -> None:
        """Which session it is about."""
        self._session = session
        if not self._takes:
            return
        record = session.record
        about: dict[str, tracing.Attribute] = {
            "gen_ai.response.id": session.id,
            "gen_ai.response.model": record.model,
            "gen_ai.usage.input_tokens": len(record.prompt),
            "hedgerow.session.id": session.id,
            "hedgerow.mode": record.mode.name.lower(),
        }
        if (seed := record.resolved.seed) is not None:
            about |= {
                "gen_ai.request.seed": seed,
                "hedgerow.seed": str(seed),
            }  # of 63 bits; many tools read 53 of numbers
        for name in SAMPLING:
            if (value := getattr(record.resolved, name)) is not None:
                about[f"gen_ai.request.{name}"] = float(value) if name in DOUBLES else value
        self._span.set_attributes(about)

    def text(self, text: str) -> None:
        """Some of the answer."""
        if self._content and self._size < MOST_CONTENT:
            self._text.append(text)
            self._size += len(text)

    def over(self, outcome: str, tokens: int, first: float, error: BaseException | None) -> str | None:
        """How it ended; why it failed, None where it did not. `first`: seconds to the first token."""
        end = self._session.end if self._session is not None else None
        late = outcome == "deadline" or (end is not None and end.reason is Finish.DEADLINE)
        code, kind = _status(error, late=late)
        finish = outcome if outcome in FINISHES or end is None else end.reason.name.lower()
        about: dict[str, tracing.Attribute] = {
            "rpc.response.status_code": code,
            "gen_ai.usage.output_tokens": tokens,
            "hedgerow.outcome": outcome,
        }
        if kind:
            about["error.type"] = kind
        if tokens:
            about["gen_ai.response.time_to_first_chunk"] = round(first, 6)
        if end is not None:
            about["gen_ai.response.finish_reasons"] = [finish]
        if self._text:
            parts = [{"type": "text", "content": "".join(self._text)[:MOST_CONTENT]}]
            said = {"role": "assistant", "parts": parts, "finish_reason": finish}
            about["gen_ai.output.messages"] = json.dumps([said], ensure_ascii=False)
        if self._takes:
            self._span.set_attributes(about)
        if isinstance(error, Exception) or late:
            return kind if code in tracing.FAULTS or late else None
        return None


def _status(error: BaseException | None, *, late: bool) -> tuple[str, str]:
    """The gRPC code and the error's kind."""
    if error is None:
        return "OK", "DEADLINE" if late else ""
    if isinstance(error, errors.HedgerowError):
        return code_of(error).name, error.reason
    if isinstance(error, Exception):
        return "INTERNAL", "INTERNAL"
    return ("DEADLINE_EXCEEDED", "DEADLINE") if late else ("CANCELLED", "CANCELLED")


def _messages(asked: Generation) -> str:
    if isinstance(asked.prompt, Chat):
        said = [(message.role, message.content) for message in asked.prompt.messages]
    else:
        said = [("user", asked.prompt if isinstance(asked.prompt, str) else f"{len(asked.prompt or ())} token ids")]
    messages = [{"role": role, "parts": [{"type": "text", "content": text}]} for role, text in said]
    return json.dumps(messages, ensure_ascii=False)[:MOST_CONTENT]
