"""A prompt goes through every service and comes out as the tokens of plain decoding in one process."""

from __future__ import annotations

import asyncio

import pytest

from bench.probe import appends
from hedgerow.cli.supervisor import Stack
from hedgerow.client import AsyncClient, Options, Result
from tests.stack import Plain, engine_sampling, verifier_load

PROMPT = "def fibonacci(n):\n    "
SETTINGS: dict[str, Options] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0, "seed": 7},
    "top_p": {"temperature": 0.8, "top_p": 0.95, "seed": (1 << 62) + 3},
    "top_k": {"temperature": 0.7, "top_k": 20, "seed": 11},
    "min_p": {"temperature": 1.2, "min_p": 0.02, "seed": 0},
}

pytestmark = pytest.mark.usefixtures("idle")


async def generate(client: AsyncClient, plain: Plain, prompt: str, options: Options) -> tuple[Result, list[int]]:
    """What the stack answered, and what it had to."""
    stream = client.generate(prompt, **options)
    result = await stream.result()
    assert stream.started is not None
    ids = await client.tokenize(prompt)
    assert len(ids) == stream.started.prompt_tokens == result.usage.prompt_tokens
    return result, plain.tokens(ids, engine_sampling(stream.started.sampling))


@pytest.mark.parametrize("budget", [0, 8, 63])
@pytest.mark.parametrize("setting", SETTINGS)
async def test_the_stack_answers_what_plain_decoding_would(
    client: AsyncClient, plain: Plain, setting: str, budget: int
) -> None:
    options: Options = {**SETTINGS[setting], "budget": budget, "max_tokens": 40, "ignore_eos": True}
    result, expected = await generate(client, plain, PROMPT, options)
    assert list(result.tokens) == expected
    assert result.finish_reason == "length"
    assert (result.usage.completion_tokens, result.usage.draft_tokens > 0) == (40, budget > 0)


async def test_an_unset_seed_is_returned_and_gives_the_same_tokens_again(client: AsyncClient, plain: Plain) -> None:
    first, expected = await generate(client, plain, PROMPT, {"temperature": 1.0, "max_tokens": 24})
    assert list(first.tokens) == expected
    again = await client.complete(PROMPT, temperature=1.0, max_tokens=24, seed=first.seed, budget=0)
    assert again.tokens == first.tokens
    other = await client.complete(PROMPT, temperature=1.0, max_tokens=24)
    assert other.seed != first.seed


async def test_a_prompt_that_was_there_before_is_not_computed_again_but_for_another_tenant(
    plain: Plain, stack: Stack
) -> None:
    asked = "".join(f"# {n} lines of a file that two tenants have\n" for n in range(20))
    seen = []
    for tenant in ("a", "a", "b"):
        async with AsyncClient(stack.address("gateway"), tenant=tenant) as of:
            result, expected = await generate(of, plain, asked, {"max_tokens": 24, "ignore_eos": True, "budget": 8})
        assert list(result.tokens) == expected
        seen.append(result.usage.cached_prompt_tokens)
    assert seen == [0, (result.usage.prompt_tokens - 1) // 64 * 64, 0]
    assert seen[1] >= 128


async def test_a_stop_token_ends_the_stream_where_plain_decoding_ends(client: AsyncClient, plain: Plain) -> None:
    free, _ = await generate(client, plain, PROMPT, {"temperature": 1.0, "seed": 5, "max_tokens": 40})
    stop = free.tokens[20]
    end = list(free.tokens).index(stop) + 1
    for budget in (0, 8):
        options: Options = {
            "temperature": 1.0, "seed": 5, "max_tokens": 40, "stop_token_ids": [stop], "budget": budget,
        }  # fmt: skip
        result, expected = await generate(client, plain, PROMPT, options)
        assert list(result.tokens) == expected == list(free.tokens[:end])
        assert result.finish_reason == "stop"


@pytest.mark.parametrize("budget", [0, 8])
async def test_the_end_of_a_stream_says_where_its_time_went(client: AsyncClient, budget: int) -> None:
    """Nothing filled it on the way: Finished.timings was None for every session."""
    stream = client.generate(PROMPT, temperature=0.0, max_tokens=24, ignore_eos=True, budget=budget)
    await stream.result()
    assert stream.finished is not None
    spent = stream.finished.timings
    assert spent is not None
    parts = (spent.queue_ns, spent.prefill_ns, spent.draft_ns, spent.verify_ns, spent.accept_ns)
    assert min(parts) > 0
    assert spent.verify_ns > spent.accept_ns
    assert sum(parts) <= spent.total_ns < 60e9


async def test_eight_streams_at_once_do_not_change_each_other(stack: Stack, client: AsyncClient, plain: Plain) -> None:
    """Budgets, lengths and parameters differ, so that prefills, trees and plain rows share steps."""
    before, stored = verifier_load(stack), appends(stack.admin_address("kvstore"))
    wanted = [
        (f"{PROMPT}# variant {n}\n" * (1 + n), Options(seed=n, max_tokens=24 + 5 * n, budget=(0, 1, 8, 16)[n % 4]))
        for n in range(8)
    ]
    for _, options in wanted[::2]:
        options["temperature"] = 0.9
    results = await asyncio.gather(*(generate(client, plain, prompt, options) for prompt, options in wanted))
    for (_, options), (result, expected) in zip(wanted, results, strict=True):
        assert list(result.tokens) == expected, options
    after = verifier_load(stack)
    tokens, steps = after.tokens - before.tokens, after.steps - before.steps
    assert tokens == sum(len(result.tokens) for result, _ in results)
    assert steps < tokens, "the streams did not share steps"
    assert after.messages_sent - before.messages_sent <= steps, "more than one message to the gateway in a step"
    assert appends(stack.admin_address("kvstore")) - stored <= steps, "more than one message to the store in a step"


async def test_a_long_prompt_is_prefilled_in_chunks_to_the_same_tokens(client: AsyncClient, plain: Plain) -> None:
    options: Options = {"temperature": 0.0, "max_tokens": 16, "budget": 8}
    result, expected = await generate(client, plain, PROMPT * 60, options)
    assert result.usage.prompt_tokens > 2 * 256, "the prompt must be longer than a step's prefill rows"
    assert list(result.tokens) == expected


async def test_steps_say_what_was_drafted_and_accepted(client: AsyncClient) -> None:
    result = await client.complete(
        PROMPT, max_tokens=32, budget=8, temperature=0.0, ignore_eos=True, return_steps=True, return_trees=True
    )
    assert sum(step.emitted for step in result.steps) == len(result.tokens)
    assert sum(step.tree_nodes for step in result.steps) == result.usage.draft_tokens > 0
    for step in result.steps:
        assert step.tree_nodes == len(step.tree_parents) == len(step.tree_tokens) <= step.budget
        assert all(-1 <= parent < node for node, parent in enumerate(step.tree_parents))
