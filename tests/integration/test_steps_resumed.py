"""Statistics through real services: what was shown live comes back on Resume, by the key, followed and taken over."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets

from hedgerow.cli.supervisor import Stack
from hedgerow.client import AsyncClient, Options
from hedgerow.v1 import common_pb2 as common
from tests.integration.test_gateway_resume import PROMPT, A, Ends, ends, pair  # noqa: F401  (fixtures)
from tests.resuming_client import Ask, Got


def ask(tokens: int) -> Ask:
    return Ask(PROMPT, tokens, key=secrets.token_hex(8), return_steps=True)


def without_commit(timings: common.Timings) -> common.Timings:
    """The log has no time of the commit."""
    copy = common.Timings()
    copy.CopyFrom(timings)
    copy.commit_ns = 0
    return copy


async def test_steps_shown_live_come_back_on_resume_and_by_the_key(ends: Ends) -> None:  # noqa: F811
    asked = ask(60)
    live, call = Got(), ends.a.generate(asked)
    await live.read(call, 20)
    half = dataclasses.replace(live, tokens=list(live.tokens), steps=list(live.steps))
    await live.read(call)
    assert live.error is None
    assert sum(step.emitted for step in live.steps) == len(live.tokens) == 60
    assert live.finished is not None
    assert len(live.steps) == live.finished.usage.steps
    for channel in (ends.a, ends.b):
        joined = await Got().read(channel.generate(asked))
        assert (joined.steps, joined.finished and joined.finished.usage) == (live.steps, live.finished.usage)
        assert joined.timings[-1] == without_commit(live.timings[-1])
    assert 0 < len(half.steps) < len(live.steps)
    await half.read(ends.b.resume(half.request()))
    assert (half.steps, half.tokens) == (live.steps, live.tokens)


async def test_steps_outlive_the_gateway_that_showed_them(pair: Stack, ends: Ends) -> None:  # noqa: F811
    """A follower at the other one sees them, and so does whoever reads after the take-over; the bill is for both."""
    asked = ask(200)
    first, follower = Got(), Got()
    call = ends.a.generate(asked)
    await first.read(call, 30)
    following = ends.b.generate(asked)
    await follower.read(following, 30)
    assert follower.steps[: len(first.steps)] == first.steps or first.steps[: len(follower.steps)] == follower.steps
    pair.kill(A)
    await asyncio.gather(follower.read(following), first.read(ends.b.resume(first.request())))
    afterwards = await Got().read(ends.b.resume(Got(first.started).request()))
    for got in (first, follower, afterwards):
        assert got.error is None
        assert got.finished is not None
        assert (got.tokens, got.steps) == (afterwards.tokens, afterwards.steps)
        # tokens that were told again, after the take-over, are of no step
        assert len(got.steps) <= got.finished.usage.steps <= len(got.steps) + 1
    assert sum(step.emitted for step in afterwards.steps) > 30


async def test_the_sdk_gives_the_trees_of_a_session_that_it_resumes(client: AsyncClient, idle: None) -> None:
    options: Options = {"max_tokens": 40, "ignore_eos": True, "return_steps": True, "return_trees": True, "budget": 8}
    live = await client.complete(PROMPT, **options)
    again = await client.resume(live.session_id).result()
    assert (again.steps, again.tokens, again.usage) == (live.steps, live.tokens, live.usage)
    assert sum(step.emitted for step in again.steps) == 40
    assert all(len(step.tree_tokens) == step.tree_nodes for step in again.steps)
    assert any(step.tree_nodes for step in again.steps)
