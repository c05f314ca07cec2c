"""Two real gateways before one store and one verifier: a client that comes back anywhere gets the undisturbed run."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, NamedTuple

import pytest
import pytest_asyncio
import redis

from hedgerow.cli.child import Backoff
from hedgerow.cli.supervisor import Stack, StackConfig
from hedgerow.errors import Fenced, KeyConflict, LostSuffix, Unavailable
from hedgerow.v1 import common_pb2 as common
from hedgerow.v1 import gateway_pb2 as pb
from tests.resuming_client import Ask, Channel, Got
from tests.stack import ROOT, Models, verifier_load

LEASE, ORPHAN = 1.0, 0.8
A, B = "gateway", "gateway-2"
PROMPT = 'def greet(name: str) -> str:\n    """Grüße, 你好"""\n    return '
KINDS = pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "seeded"])
CANCELLED, DEADLINE, LENGTH = (
    common.FINISH_REASON_CANCELLED, common.FINISH_REASON_DEADLINE, common.FINISH_REASON_LENGTH,
)  # fmt: skip


@pytest.fixture(scope="module")
def pair(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A killed gateway comes back after a second, as another one."""
    settings = {
        "gateway": {"LEASE_SECONDS": str(LEASE), "ORPHAN_SECONDS": str(ORPHAN)},
        "verifier": {"ORPHAN_MS": "3000"},  # a dead gateway's sequences are held for the next one
    }
    config = StackConfig(
        ROOT, models.target, tmp_path_factory.mktemp("pair"), gateways=2, grace=2.0,
        backoff=Backoff(first=1.0, most=1.0), settings=settings,
    )  # fmt: skip
    with Stack(config) as running:
        yield running


class Ends(NamedTuple):
    """A client's ways to both gateways."""

    a: Channel
    b: Channel


@pytest_asyncio.fixture
async def ends(pair: Stack) -> AsyncIterator[Ends]:
    for name in (A, B):
        pair.wait_ready(name)
    async with Channel(pair.address(A)) as a, Channel(pair.address(B)) as b:
        yield Ends(a, b)
    await until(lambda: idle(pair), 20)


async def idle(pair: Stack) -> bool:
    return verifier_load(pair).held_sequences == 0


async def until(what: Callable[[], Awaitable[Any]], seconds: float = 10) -> Any:
    """Polls; gives the first answer that is true."""
    end = time.monotonic() + seconds
    while not (answer := await what()):
        assert time.monotonic() < end, "it never came true"
        await asyncio.sleep(0.02)
    return answer


async def still(channel: Channel, session_id: str) -> int:
    """The committed tokens of a session to which nobody appends; 0: somebody does."""
    before = (await channel.get(session_id)).token_count
    await asyncio.sleep(0.2)
    return before if (await channel.get(session_id)).token_count == before else 0


WHOLE: dict[str, tuple[list[int], str]] = {}


async def whole(channel: Channel, ask: Ask) -> tuple[list[int], str]:
    """The undisturbed run."""
    name = repr((ask.text, ask.tokens, ask.temperature, ask.seed, ask.stop))
    if name not in WHOLE:
        got = await Got().read(channel.generate(Ask(ask.text, ask.tokens, ask.temperature, ask.seed, stop=ask.stop)))
        assert got.error is None
        WHOLE[name] = got.tokens, got.text
    return WHOLE[name]


@KINDS
async def test_a_gateway_is_killed_and_the_other_one_goes_on(pair: Stack, ends: Ends, temperature: float) -> None:
    ask = Ask(PROMPT, 200, temperature)
    expected = await whole(ends.b, ask)
    got = await Got().read(ends.a.generate(ask), 40)
    pair.kill(A)
    killed = time.monotonic()
    await got.read(ends.b.resume(got.request()))
    assert got.error is None
    assert (got.tokens, got.text) == expected
    assert got.finished is not None
    assert (got.finished.reason, got.finished.mode) == (LENGTH, common.EXECUTION_MODE_EXACT)
    assert got.first_at - killed < 2 * LEASE + 8.0
    there = await ends.b.get(got.id)
    assert (there.token_count, there.digest, there.finish_reason) == (200, got.digest, LENGTH)


@KINDS
async def test_readers_of_the_other_gateway_do_not_notice_that_its_owner_is_killed(
    pair: Stack, ends: Ends, temperature: float
) -> None:
    """One joined by its key, one resumed from the middle; the first client comes back as well."""
    ask = Ask(PROMPT, 260, temperature, key=secrets.token_hex(8))
    expected = await whole(ends.b, ask)
    first, joined = Got(), Got()
    call = ends.a.generate(ask)
    await first.read(call, 20)
    from_start = ends.b.generate(ask)
    await joined.read(from_start, 20)
    assert joined.id == first.id
    middle = Got(first.started, None, list(first.tokens), first.text, first.digest)
    from_middle = ends.b.resume(first.request())
    await asyncio.gather(joined.read(from_start, 60), middle.read(from_middle, 60))
    pair.kill(A)
    await asyncio.gather(joined.read(from_start), middle.read(from_middle), first.read(ends.b.resume(first.request())))
    for got in (joined, middle, first):
        assert got.error is None
        assert (got.tokens, got.text) == expected
        assert got.finished is not None


async def test_a_gateway_that_was_stopped_past_its_lease_is_fenced_and_its_client_told_to_resume(
    pair: Stack, ends: Ends
) -> None:
    ask = Ask(PROMPT, 1800, 1.0)
    expected = await whole(ends.b, ask)
    stale = Got()
    call = ends.a.generate(ask)
    await stale.read(call, 20)
    pair.pause(A)
    try:
        resumed = Got(stale.started, None, list(stale.tokens), stale.text, stale.digest)
        other = ends.b.resume(stale.request())
        await resumed.read(other, len(resumed.tokens) + 40)
        assert resumed.error is None
    finally:
        pair.resume(A)
    await asyncio.gather(stale.read(call), resumed.read(other))
    assert isinstance(stale.error, Fenced | Unavailable)
    assert stale.error.retry_after is not None
    assert stale.tokens == expected[0][: len(stale.tokens)], "what it still gave is the log's"
    await stale.read(ends.a.resume(stale.request()))
    for got in (stale, resumed):
        assert got.error is None
        assert (got.tokens, got.text) == expected


@KINDS
async def test_a_gateway_that_drains_hands_its_sessions_over_at_once(
    pair: Stack, ends: Ends, temperature: float
) -> None:
    ask = Ask(PROMPT, 1000, temperature)
    expected = await whole(ends.b, ask)
    for _ in range(3):
        pair.wait_ready(A)
        got = await Got().read(call := ends.a.generate(ask), 20)
        pair.terminate(A)
        await got.read(call, 60)
        assert got.error is None, "running streams go on within the grace"
        pair.pause("verifier")  # no machine is so quick that the text is done within the grace
        try:
            await got.read(call)
        finally:
            pair.resume("verifier")
        assert isinstance(got.error, Unavailable), "it runs longer than the grace"
        assert got.error.retry_after is not None
        ended = time.monotonic()
        await got.read(ends.b.resume(got.request()))
        assert got.error is None
        assert (got.tokens, got.text) == expected
        if got.first_at - ended < 0.75 * LEASE:
            return
    raise AssertionError("somebody waited for a lease to end")


@KINDS
async def test_an_orphan_pauses_and_goes_on_when_its_client_is_back(
    pair: Stack, ends: Ends, temperature: float
) -> None:
    ask = Ask(PROMPT, 1900, temperature)
    expected = await whole(ends.b, ask)
    call = ends.a.generate(ask)
    got = await Got().read(call, 10)
    call.cancel()
    before = verifier_load(pair).tokens
    await until(lambda: idle(pair))
    assert verifier_load(pair).tokens - before > 10, "it went on for a while without a client"
    there = await ends.b.get(got.id)
    assert (there.finish_reason, there.token_count < 1900) == (0, True)
    await got.read(ends.b.resume(got.request()))
    assert got.error is None
    assert (got.tokens, got.text) == expected


@pytest.mark.parametrize("resumed", [False, True], ids=["generate", "resume"])
async def test_a_call_that_is_not_detached_ends_its_session_with_it(pair: Stack, ends: Ends, resumed: bool) -> None:
    """Also through the gateway that does not run it."""
    call = ends.a.generate(Ask(PROMPT, 900, detach=resumed))
    got = await Got().read(call, 10)
    if resumed:
        other = ends.b.resume(got.request(detach=False))
        call.cancel()
        await got.read(other, len(got.tokens) + 10)
        other.cancel()
    else:
        call.cancel()

    async def ended() -> bool:
        return (await ends.b.get(got.id)).finish_reason == CANCELLED

    await until(ended)
    await until(lambda: idle(pair))


async def test_any_gateway_cancels_and_the_owner_obeys_within_a_step(pair: Stack, ends: Ends) -> None:
    took: list[float] = []
    while not took or (took[-1] > 0.25 and len(took) < 5):
        call = ends.a.generate(Ask(PROMPT, 900))
        got = await Got().read(call, 10)
        assert (await ends.b.ask("Cancel", pb.CancelRequest(session_id=got.id))).was_running
        asked = time.monotonic()
        await until(lambda: idle(pair))
        took.append(time.monotonic() - asked)
        await got.read(call)
        assert got.finished is not None
        assert got.finished.reason == CANCELLED
        assert not (await ends.b.ask("Cancel", pb.CancelRequest(session_id=got.id))).was_running
    assert min(took) < 0.25, "seconds; the next renewal would tell too, later"


@pytest.mark.parametrize("detach", [True, False], ids=["detached", "not detached"])
async def test_a_cancel_of_what_no_gateway_runs_ends_it(pair: Stack, ends: Ends, detach: bool) -> None:
    """A session whose call died with its gateway ends by itself, but its client has time to come back."""
    got = await Got().read(ends.a.generate(Ask(PROMPT, 900, detach=detach)), 10)
    pair.kill(A)
    await asyncio.sleep(LEASE)
    assert (await ends.b.get(got.id)).finish_reason == 0
    if detach:
        assert (await ends.b.ask("Cancel", pb.CancelRequest(session_id=got.id))).was_running

    async def ended() -> bool:
        return (await ends.b.get(got.id)).finish_reason == CANCELLED

    await until(ended, 3 * LEASE + 2 * ORPHAN)
    await got.read(ends.b.resume(got.request()))
    assert got.finished is not None
    assert (got.finished.reason, got.finished.token_offset) == (CANCELLED, len(got.tokens))


async def test_a_deadline_outlives_its_gateway(pair: Stack, ends: Ends) -> None:
    began = time.monotonic()
    got = await Got().read(ends.a.generate(Ask(PROMPT, 1800, deadline_ms=2_500)), 10)
    pair.kill(A)
    await got.read(ends.b.resume(got.request()))
    took = time.monotonic() - began
    assert got.finished is not None
    assert got.finished.reason == DEADLINE
    assert 2.4 < took < 3.9


async def test_a_deadline_ends_what_nobody_runs(pair: Stack, ends: Ends) -> None:
    got = await Got().read(ends.a.generate(Ask(PROMPT, 1800), timeout=4.0), 10)
    pair.kill(A)

    async def ended() -> bool:
        return (await ends.b.get(got.id)).finish_reason == DEADLINE

    await until(ended, 4 + 1 + 2 * LEASE + 2)


async def test_a_key_means_one_session_on_every_gateway(pair: Stack, ends: Ends) -> None:
    ask = Ask(PROMPT, 150, 1.0, key=secrets.token_hex(8))
    before = verifier_load(pair).tokens
    calls = [channel.generate(ask) for channel in (ends.a, ends.b, ends.a, ends.b)]
    gots = await asyncio.gather(*(Got().read(call) for call in calls))
    assert len({got.id for got in gots}) == 1
    assert all(got.error is None and got.tokens == gots[0].tokens and got.text == gots[0].text for got in gots)
    assert verifier_load(pair).tokens - before == 150, "it was generated once"
    again = await Got().read(ends.b.generate(ask))
    assert again.tokens == gots[0].tokens
    ask.seed += 1
    other = await Got().read(ends.a.generate(ask))
    assert isinstance(other.error, KeyConflict)
    assert other.error.field == "sampling.seed"


async def test_a_stop_string_is_held_back_over_a_take_over(pair: Stack, ends: Ends) -> None:
    """The text of an unfinished stop came neither twice nor too early."""
    tokens, text = await whole(ends.b, Ask(PROMPT, 200, 1.0))
    at = len(text) * 3 // 4
    ask = Ask(PROMPT, 200, 1.0, stop=[text[at : at + 6], text[10:14] + "\x00"])
    expected = await whole(ends.b, ask)
    got = await Got().read(ends.a.generate(ask), 30)
    pair.kill(A)
    await got.read(ends.b.resume(got.request()))
    assert (got.error, got.tokens, got.text) == (None, *expected)
    assert got.tokens == tokens[: len(got.tokens)]
    assert got.finished is not None
    assert got.finished.matched_stop == ask.stop[0]


async def test_tokens_that_the_store_lost_with_their_gateway_are_made_again_and_checked(
    pair: Stack, ends: Ends
) -> None:
    """Redis is set back to what it had some tokens ago, as a fail-over to a late replica would."""
    ask = Ask(PROMPT, 400, 1.0)
    expected = await whole(ends.b, ask)
    with redis.Redis.from_url(pair.redis_url) as store:
        call = ends.a.generate(ask)
        got = await Got().read(call, 20)
        pair.pause(A)
        had = await until(lambda: still(ends.b, got.id))
        kept = {key: store.dump(key) for key in store.keys(f"*{got.id}*")}
        pair.resume(A)
        await got.read(call, had + 40)
        pair.kill(A)
        for key, value in kept.items():
            store.restore(key, 3_600_000, value, replace=True)
    assert (await ends.b.get(got.id)).token_count == had < len(got.tokens)
    # Without a digest, or with another one, nothing is given; with another one it is made again all the same.
    lost = await ends.b.error_of(got.request(digest=b""))
    assert isinstance(lost, LostSuffix)
    assert int(lost.metadata["token_offset"]) == len(got.tokens)
    assert (await ends.b.get(got.id)).token_count == had
    lost = await ends.b.error_of(got.request(digest=b"w" * 16))
    assert isinstance(lost, LostSuffix)
    assert (lost.metadata["digest"], lost.metadata["stored_digest"]) == ((b"w" * 16).hex(), got.digest.hex())
    await got.read(ends.b.resume(got.request()))
    assert (got.error, got.tokens, got.text) == (None, *expected)
