"""Every request that is not allowed is refused with its field, value and limit; everything else gets its defaults."""

from __future__ import annotations

import dataclasses
import math
import threading

import pytest

from hedgerow.errors import HedgerowError, InvalidRequest, Unsupported
from services.gateway.chat import KimiTemplate
from services.gateway.resolve import INLINE_MESSAGES, Limits, Resolver
from services.gateway.templates import template_of
from services.gateway.tokenizer import Tokenizer
from services.gateway.types import Chat, Fingerprint, Generation, Message, Mode, Model, Sampling, Speculation, Trace
from tests.unit.test_tokenizer import BUNDLED

CONTEXT = 64
MODEL = Model("sapling", Fingerprint(), 4096, CONTEXT, max_budget=63, default_budget=8)
ASKED = Generation("", (1, 2, 3, 4))


@pytest.fixture(scope="module")
def resolver() -> Resolver:
    return Resolver(template_of(BUNDLED, Tokenizer.from_folder(BUNDLED)), Limits(1000, 20))


def sampling(**values: object) -> Generation:
    return dataclasses.replace(ASKED, sampling=Sampling(**values))  # type: ignore[arg-type]


def asked(**values: object) -> Generation:
    return dataclasses.replace(ASKED, **values)  # type: ignore[arg-type]


REFUSED = [
    (asked(prompt=None), "prompt"),
    (asked(prompt=""), "text"),
    (asked(prompt=()), "token_ids"),
    (asked(prompt=Chat(())), "chat.messages"),
    (asked(prompt=(1, 4096)), "token_ids"),
    (asked(prompt=(1,) * CONTEXT), "token_ids"),
    (asked(prompt="word " * 64), "text"),
    (asked(prompt="x" * 5_000_000), "text"),
    (asked(prompt=Chat((Message("user", "x" * 5_000_000),))), "chat"),
    (asked(model="other"), "model"),
    (asked(idempotency_key="k" * 129), "idempotency_key"),
    (asked(tenant="t" * 129), "tenant"),
    (asked(deadline_ms=1 << 50), "deadline_ms"),
    (asked(priority=101), "priority"),
    (asked(priority=-(1 << 31)), "priority"),
    (asked(trace=Trace("0" * 129)), "trace.traceparent"),
    (asked(trace=Trace("", "a" * 40_000_000)), "trace.tracestate"),
    (asked(model="m" * 1_000_000), "model"),
    (asked(prompt=Chat((Message("r" * 300, "x"),))), "chat.messages[0].role"),
    (asked(speculation=Speculation(budget=64)), "speculation.budget"),
    (asked(speculation=Speculation(topk_cap=0)), "speculation.topk_cap"),
    (sampling(max_tokens=0), "sampling.max_tokens"),
    (sampling(max_tokens=61), "sampling.max_tokens"),
    (sampling(max_tokens=4, min_tokens=5), "sampling.min_tokens"),
    (sampling(temperature=-0.1), "sampling.temperature"),
    (sampling(temperature=math.nan), "sampling.temperature"),
    (sampling(temperature=math.inf), "sampling.temperature"),
    (sampling(top_p=0.0), "sampling.top_p"),
    (sampling(top_p=1.01), "sampling.top_p"),
    (sampling(top_p=math.nan), "sampling.top_p"),
    (sampling(min_p=-0.1), "sampling.min_p"),
    (sampling(min_p=math.nan), "sampling.min_p"),
    (sampling(seed=1 << 63), "sampling.seed"),
    (sampling(n=0), "sampling.n"),
    (sampling(frequency_penalty=math.nan), "sampling.frequency_penalty"),
    (sampling(presence_penalty=2.1), "sampling.presence_penalty"),
    (sampling(repetition_penalty=0.0), "sampling.repetition_penalty"),
    (sampling(stop=("x",) * 17), "sampling.stop"),
    (sampling(stop=("x", "")), "sampling.stop[1]"),
    (sampling(stop=("é" * 129,)), "sampling.stop[0]"),
    (sampling(stop=("é" * 1_000_000,)), "sampling.stop[0]"),
    (sampling(stop_token_ids=(1,) * 65), "sampling.stop_token_ids"),
    (sampling(stop_token_ids=(4096,)), "sampling.stop_token_ids"),
    (sampling(logit_bias={4096: 1.0}), "sampling.logit_bias"),
    (sampling(logit_bias={5: math.nan}), "sampling.logit_bias[5]"),
    (sampling(logit_bias=dict.fromkeys(range(1025), 0.0)), "sampling.logit_bias"),
]
UNSERVED = [
    (asked(mode=Mode.BEST_EFFORT), "mode"),
    (sampling(n=2), "sampling.n"),
    (sampling(frequency_penalty=0.5), "sampling.frequency_penalty"),
    (sampling(presence_penalty=-0.5), "sampling.presence_penalty"),
    (sampling(repetition_penalty=1.1), "sampling.repetition_penalty"),
    (sampling(logprobs=True), "sampling.logprobs"),
    (sampling(top_logprobs=3), "sampling.top_logprobs"),
    (sampling(bad_words=("x",)), "sampling.bad_words"),
    (sampling(grammar="regex"), "sampling.grammar"),
]


async def refusal(resolver: Resolver, generation: Generation) -> HedgerowError:
    with pytest.raises(HedgerowError) as refused:
        await resolver.resolve(generation, MODEL)
    return refused.value


@pytest.mark.parametrize(("generation", "field"), REFUSED)
async def test_what_is_out_of_its_limits_is_refused(resolver: Resolver, generation: Generation, field: str) -> None:
    error = await refusal(resolver, generation)
    assert isinstance(error, InvalidRequest)
    assert error.field == field
    assert error.limit
    assert len(error.message) < 300, "a message does not repeat a prompt"


@pytest.mark.parametrize(("generation", "field"), UNSERVED)
async def test_what_is_not_served_says_so(resolver: Resolver, generation: Generation, field: str) -> None:
    error = await refusal(resolver, generation)
    assert isinstance(error, Unsupported)
    assert error.metadata["field"] == field


async def test_neutral_values_of_what_is_not_served_are_fine(resolver: Resolver) -> None:
    neutral = sampling(
        n=1, frequency_penalty=0.0, presence_penalty=0.0, repetition_penalty=1.0, logprobs=False, top_logprobs=0
    )
    assert (await resolver.resolve(neutral, MODEL)).prompt == (1, 2, 3, 4)


async def test_defaults_are_filled_in(resolver: Resolver) -> None:
    resolved = (await resolver.resolve(ASKED, MODEL)).sampling
    assert (resolved.temperature, resolved.top_k, resolved.top_p, resolved.min_p) == (0.0, 0, 1.0, 0.0)
    assert (resolved.max_tokens, resolved.min_tokens, resolved.seed) == (20, 0, None)
    model = dataclasses.replace(MODEL, default_sampling=Sampling(temperature=0.6, top_p=0.95, max_tokens=50))
    resolved = (await resolver.resolve(ASKED, model)).sampling
    assert (resolved.temperature, resolved.top_p, resolved.max_tokens) == (0.6, 0.95, 50)
    resolved = (await resolver.resolve(sampling(temperature=0.0), model)).sampling
    assert resolved.temperature == 0.0, "zero is a value, not a default"


async def test_max_tokens_defaults_to_what_is_left(resolver: Resolver) -> None:
    resolved = (await resolver.resolve(asked(prompt=(1,) * 60), MODEL)).sampling
    assert resolved.max_tokens == 4
    assert (await resolver.resolve(sampling(max_tokens=60), MODEL)).sampling.max_tokens == 60


async def test_a_long_text_is_refused_before_it_is_tokenized(resolver: Resolver) -> None:
    small = dataclasses.replace(MODEL, context_length=4)
    longest = resolver.template.tokenizer.longest_piece
    with pytest.raises(InvalidRequest) as refused:
        await resolver.resolve(asked(prompt="y" * (4 * longest + 1)), small)
    assert refused.value.limit == f"at most {4 * longest} bytes"


@pytest.mark.parametrize(("messages", "elsewhere"), [(1, False), (INLINE_MESSAGES, False), (INLINE_MESSAGES + 1, True)])
async def test_a_chat_of_many_empty_messages_is_not_rendered_where_everybody_waits(
    resolver: Resolver, monkeypatch: pytest.MonkeyPatch, messages: int, elsewhere: bool
) -> None:
    threads: list[threading.Thread] = []

    def render(*arguments: object) -> list[int]:
        threads.append(threading.current_thread())
        return [1]

    monkeypatch.setattr(KimiTemplate, "render", render)
    assert await resolver.encode(Chat((Message("user"),) * messages), 10_000_000) == [1]
    assert (threads[0] is not threading.current_thread()) is elsewhere
