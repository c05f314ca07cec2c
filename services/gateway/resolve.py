"""From what a client asks for to what a verifier is given: checks, defaults, prompt ids.

Everything that can be wrong with a request is found here, before anything is started. Errors name the field as the
protos name it, its value and its limit.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hedgerow.errors import InvalidRequest, Unsupported
from services.gateway import chat, limits
from services.gateway.chat import Template
from services.gateway.types import Chat, Generation, Mode, Model, Prompt, Sampling, Speculation

SEEDS = 1 << 63
# More than this takes the tokenizer, or the chat template, longer than the event loop should wait.
INLINE_BYTES, INLINE_MESSAGES = 16_384, 128


class Limits(NamedTuple):
    """What this gateway allows, whatever the model could do."""

    prompt_bytes: int
    default_max_tokens: int


class Resolved(NamedTuple):
    """What will be generated."""

    prompt: tuple[int, ...]
    sampling: Sampling  # seed may still be None: it comes from the session id
    speculation: Speculation


@dataclass
class Resolver:
    """Checks requests against one model; the limits may change."""

    template: Template
    limits: Limits

    async def resolve(self, asked: Generation, model: Model) -> Resolved:
        """Raises InvalidRequest or Unsupported."""
        check_model(asked.model, model)
        _check_envelope(asked)
        _check_unserved(asked.sampling)
        _check_ranges(asked.sampling, model.vocab_size)
        speculation = _check_speculation(asked.speculation, model)
        prompt = await self.prompt_ids(asked.prompt, model)
        return Resolved(tuple(prompt), self._with_defaults(asked.sampling, model, len(prompt)), speculation)

    async def prompt_ids(self, prompt: Prompt | None, model: Model) -> Sequence[int]:
        """The ids of a prompt that leaves room for a token. Raises InvalidRequest or Unsupported."""
        if not isinstance(prompt, tuple):
            # No token is longer than the longest, so a longer text cannot fit and need not be tokenized.
            most = min(self.limits.prompt_bytes, model.context_length * self.template.tokenizer.longest_piece)
            ids: Sequence[int] = await self.encode(prompt, most)
        else:
            ids = prompt
            if ids and max(ids) >= model.vocab_size:
                raise InvalidRequest("token_ids", max(ids), f"below the vocabulary's {model.vocab_size}")
        if not ids:
            raise InvalidRequest(_field(prompt), prompt, "at least one token")
        limits.check_tokens(_field(prompt), len(ids), model.context_length)
        return ids

    async def encode(self, prompt: str | Chat | None, most_bytes: int | None = None) -> list[int]:
        """The ids of text or messages. Raises InvalidRequest or Unsupported."""
        if prompt is None:
            raise InvalidRequest("prompt", None, "exactly one of text, token_ids and chat")
        limit = self.limits.prompt_bytes if most_bytes is None else most_bytes
        if _is_quick(prompt) and (isinstance(prompt, str) or self.template.quick):
            return self._encode_now(prompt, limit)
        return await asyncio.to_thread(self._encode_now, prompt, limit)

    def _encode_now(self, prompt: str | Chat, limit: int) -> list[int]:
        size = len(prompt.encode()) if isinstance(prompt, str) else chat.size(prompt)
        if size > limit:
            raise InvalidRequest(_field(prompt), f"{size} bytes", f"at most {limit} bytes")
        if isinstance(prompt, str):
            return self.template.tokenizer.encode(prompt)
        return self.template.render(prompt)

    def _with_defaults(self, asked: Sampling, model: Model, prompt_tokens: int) -> Sampling:
        defaults = model.default_sampling
        room = model.context_length - prompt_tokens
        max_tokens = asked.max_tokens
        if max_tokens is None:
            max_tokens = min(room, defaults.max_tokens or self.limits.default_max_tokens)
        if not 1 <= max_tokens <= room:
            limit = f"in [1, {room}]: the context of {model.context_length} holds {prompt_tokens} tokens of prompt"
            raise InvalidRequest("sampling.max_tokens", max_tokens, limit)
        min_tokens = asked.min_tokens or 0
        if min_tokens > max_tokens:
            raise InvalidRequest("sampling.min_tokens", min_tokens, f"at most max_tokens, {max_tokens}")
        return dataclasses.replace(
            asked,
            temperature=_first(asked.temperature, defaults.temperature, 0.0),
            top_k=_first(asked.top_k, defaults.top_k, 0),
            top_p=_first(asked.top_p, defaults.top_p, 1.0),
            min_p=_first(asked.min_p, defaults.min_p, 0.0),
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            ignore_eos=bool(asked.ignore_eos),
            sample_index=asked.sample_index or 0,
        )


def check_model(name: str, model: Model) -> None:
    """Raises InvalidRequest unless `name` is the model's, or empty."""
    if name not in ("", model.name):
        raise InvalidRequest("model", limits.brief(name), f"one of: {model.name}")


def _check_envelope(asked: Generation) -> None:
    limits.check_bytes("idempotency_key", asked.idempotency_key, limits.KEY_BYTES)
    limits.check_bytes("tenant", asked.tenant, limits.KEY_BYTES)
    limits.check_bytes("trace.traceparent", asked.trace.traceparent, limits.TRACEPARENT)
    limits.check_bytes("trace.tracestate", asked.trace.tracestate, limits.TRACESTATE)
    if abs(asked.priority) > limits.PRIORITY:
        raise InvalidRequest("priority", asked.priority, f"in [-{limits.PRIORITY}, {limits.PRIORITY}]")
    if asked.deadline_ms > limits.DEADLINE_MS:
        raise InvalidRequest("deadline_ms", asked.deadline_ms, f"at most {limits.DEADLINE_MS}")
    if asked.mode is Mode.BEST_EFFORT:
        raise Unsupported("mode", "BEST_EFFORT is not served yet; EXACT is")


def _check_unserved(s: Sampling) -> None:
    """Refuse what is valid but not served; first what is not even valid."""
    if s.n is not None and s.n < 1:
        raise InvalidRequest("sampling.n", s.n, "at least 1")
    for field in ("frequency_penalty", "presence_penalty"):
        _in_range(field, getattr(s, field), -2.0, 2.0)
    if s.repetition_penalty is not None and not 0 < s.repetition_penalty < math.inf:
        raise InvalidRequest("sampling.repetition_penalty", s.repetition_penalty, "above 0")
    unserved = {
        "n": (s.n or 1) > 1,
        "frequency_penalty": bool(s.frequency_penalty),
        "presence_penalty": bool(s.presence_penalty),
        "repetition_penalty": s.repetition_penalty not in (None, 1.0),
        "logprobs": bool(s.logprobs),
        "top_logprobs": bool(s.top_logprobs),
        "bad_words": bool(s.bad_words),
        "grammar": bool(s.grammar),
    }
    for field, asked in unserved.items():
        if asked:
            raise Unsupported(f"sampling.{field}", "not served yet")


def _check_ranges(s: Sampling, vocab_size: int) -> None:
    _in_range("temperature", s.temperature, 0.0, 100.0)
    _in_range("min_p", s.min_p, 0.0, 1.0)
    if s.top_p is not None and not 0.0 < s.top_p <= 1.0:
        raise InvalidRequest("sampling.top_p", s.top_p, "in (0, 1]")
    if s.seed is not None and s.seed >= SEEDS:
        raise InvalidRequest("sampling.seed", s.seed, f"below {SEEDS}")
    limits.check_lists(s)
    for i, stop in enumerate(s.stop):
        if not 1 <= len(stop.encode()) <= limits.STOP_BYTES:
            raise InvalidRequest(f"sampling.stop[{i}]", limits.brief(stop), f"of 1 to {limits.STOP_BYTES} bytes")
    for field, tokens in (("stop_token_ids", s.stop_token_ids), ("logit_bias", s.logit_bias)):
        for token in tokens:
            if token >= vocab_size:
                raise InvalidRequest(f"sampling.{field}", token, f"below the vocabulary's {vocab_size}")
    for token, bias in s.logit_bias.items():
        _in_range(f"logit_bias[{token}]", bias, -limits.BIAS, limits.BIAS)


def _check_speculation(s: Speculation, model: Model) -> Speculation:
    if s.budget is not None and s.budget > model.max_budget:
        raise InvalidRequest("speculation.budget", s.budget, f"at most {model.max_budget}")
    if s.topk_cap is not None and s.topk_cap < 1:
        raise InvalidRequest("speculation.topk_cap", s.topk_cap, "at least 1")
    return s


def _is_quick(prompt: str | Chat) -> bool:
    if isinstance(prompt, str):
        return len(prompt) <= INLINE_BYTES and len(prompt.encode()) <= INLINE_BYTES
    calls = sum(len(message.tool_calls) for message in prompt.messages[:INLINE_MESSAGES])
    return len(prompt.messages) + calls <= INLINE_MESSAGES and chat.size(prompt) <= INLINE_BYTES


def _field(prompt: Prompt | None) -> str:
    return {str: "text", tuple: "token_ids", Chat: "chat"}.get(type(prompt), "prompt")


def _in_range(field: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not low <= value <= high:  # written so that NaN fails too
        raise InvalidRequest(f"sampling.{field}", value, f"in [{low:g}, {high:g}]")


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)
