"""A verifier process whose gateways come, go and come back: nothing is computed twice, everybody hears where he is."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator

import grpc
import pytest

from hedgerow.cli.child import Child
from hedgerow.v1 import common_pb2, verifier_pb2
from services.verifier.convert import sampling_from
from tests.attach import TestGateway
from tests.polling import soon
from tests.processes import address, service
from tests.stack import Models, Plain

PROMPT = list(b"for i in ")
SEEDED = common_pb2.SamplingParams(temperature=1, seed=3, max_tokens=60, ignore_eos=True)
ENDLESS = common_pb2.SamplingParams(temperature=1, seed=1, max_tokens=3000, ignore_eos=True)
RUN_AHEAD = 20


@pytest.fixture(scope="module")
def verifier(tiny: Models) -> Iterator[Child]:
    with service(
        "verifier", model_path=tiny.target, model_name="again", max_sequences=4, run_ahead=RUN_AHEAD, cache_pages=512
    ) as child:
        yield child


@pytest.mark.parametrize("epoch", [1, 2])
async def test_what_a_broken_stream_lost_is_told_again_and_computed_once(
    verifier: Child, tiny_plain: Plain, epoch: int
) -> None:
    """Under a higher attempt of the same owner, or a higher epoch of another gateway."""
    session, expected = f"lost-{epoch}", tiny_plain.tokens(PROMPT, sampling_from(SEEDED))
    async with TestGateway(address(verifier), acknowledge=False) as leaving:
        before = (await leaving.load()).tokens
        await leaving.start(session, PROMPT, SEEDED)
        await leaving.seen(session, RUN_AHEAD)
    async with TestGateway(address(verifier)) as gateway:
        gateway.tokens[session] = expected[:7]  # the others were never committed
        await gateway.start(session, PROMPT, SEEDED, epoch=epoch, attempt=2, committed=expected[:7])
        await gateway.finished([session])
        assert gateway.tokens[session] == expected
        assert (await gateway.load()).tokens - before == len(expected)


async def test_an_end_that_was_lost_is_told_again(verifier: Child, tiny_plain: Plain) -> None:
    short = common_pb2.SamplingParams(temperature=1, seed=3, max_tokens=12, ignore_eos=True)
    async with TestGateway(address(verifier), acknowledge=False) as leaving:
        await leaving.start("ended", PROMPT, short)
        await leaving.finished(["ended"])
        before = (await leaving.load()).tokens
    async with TestGateway(address(verifier)) as gateway:
        await gateway.start("ended", PROMPT, short, epoch=2)
        await gateway.finished(["ended"])
        assert gateway.tokens["ended"] == tiny_plain.tokens(PROMPT, sampling_from(short))
        assert gateway.last["ended"].finish_reason == common_pb2.FINISH_REASON_LENGTH
        assert gateway.last["ended"].usage.completion_tokens == 12
        assert (await gateway.load()).tokens == before


async def test_the_owner_before_hears_which_pair_has_its_session(verifier: Child) -> None:
    async with TestGateway(address(verifier)) as old, TestGateway(address(verifier)) as new:
        await old.start("taken", PROMPT, ENDLESS)
        await old.seen("taken", 5)
        new.tokens["taken"] = list(old.tokens["taken"])[:5]
        await new.start("taken", PROMPT, ENDLESS, epoch=3, committed=old.tokens["taken"][:5])
        await old.finished(["taken"])
        fenced = old.last["taken"]
        assert (fenced.epoch, fenced.attempt, fenced.error.reason) == (1, 1, "FENCED")
        assert (fenced.error.held_epoch, fenced.error.held_attempt) == (3, 1)
        await old.cancel("taken")
        await soon(lambda: old.last["taken"] is not fenced)
        assert (old.last["taken"].error.reason, old.last["taken"].error.held_epoch) == ("FENCED", 3)
        await new.seen("taken", 40)
        await new.cancel("taken", epoch=3)
        await new.finished(["taken"])


async def test_a_verifier_whose_grace_is_over_ends_its_streams_with_a_status(tiny: Models) -> None:
    """Its gateways go on elsewhere; until then the sessions that it has may be attached again, and others not."""
    with service("verifier", model_path=tiny.target, model_name="leaving", grace=6, run_ahead=RUN_AHEAD) as child:
        async with TestGateway(address(child), acknowledge=False) as gateway:
            await gateway.start("running", PROMPT, ENDLESS)
            await gateway.seen("running", RUN_AHEAD)
            stopping = asyncio.create_task(asyncio.to_thread(child.stop, 40))
            refused = await refused_start(gateway)
            assert (refused.reason, refused.retry_after_ms > 0) == ("UNAVAILABLE", True)
            await gateway.start("running", PROMPT, ENDLESS, attempt=2, committed=gateway.tokens["running"])
            await gateway.seen("running", 2 * RUN_AHEAD)
            await asyncio.wait_for(gateway.ended.wait(), 30)
            assert await gateway.call.code() is grpc.StatusCode.UNAVAILABLE
            assert "draining" in await gateway.call.details()
        assert await stopping == 0


async def refused_start(gateway: TestGateway) -> verifier_pb2.SequenceError:
    """Starts short sessions until one is refused."""
    for n in itertools.count():
        await gateway.start(f"new-{n}", PROMPT, common_pb2.SamplingParams(max_tokens=1))
        await gateway.finished([f"new-{n}"])
        if gateway.last[f"new-{n}"].HasField("error"):
            return gateway.last[f"new-{n}"].error
    raise AssertionError


async def test_a_start_whose_digest_is_of_another_text_is_refused_on_a_re_attach_too(verifier: Child) -> None:
    async with TestGateway(address(verifier)) as gateway:
        await gateway.start("digest", PROMPT, ENDLESS)
        await gateway.seen("digest", 3)
        again = verifier_pb2.StartSequence(
            session_id="digest", epoch=1, attempt=2, prompt=PROMPT, sampling=ENDLESS, committed=[1], digest=b"x" * 16
        )
        await gateway.write(verifier_pb2.AttachRequest(start=[again]))
        await soon(lambda: any(u.HasField("error") for m in gateway.messages for u in m.updates))
        (error,) = [u.error for m in gateway.messages for u in m.updates if u.HasField("error")]
        assert (error.reason, error.metadata["field"]) == ("INVALID_REQUEST", "digest")
        at = len(gateway.tokens["digest"])
        await gateway.seen("digest", at + 3)  # what is held goes on
        await gateway.cancel("digest")
        await gateway.finished(["digest"])
