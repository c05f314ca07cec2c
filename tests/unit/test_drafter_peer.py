"""The verifier's view of its drafter, against a real DrafterService in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc.aio
import pytest
import torch

from hedgerow.engine.types import DraftBatch, DraftWork
from hedgerow.v1 import drafter_pb2, drafter_pb2_grpc
from services.verifier.agreement import Disagreement, Target, check
from services.verifier.convert import described_from
from services.verifier.peers import DrafterPeer, Patience
from tests.polling import soon

WIDTH, VOCAB = 8, 100
HEAD = "5a" * 32
TARGET = Target(
    VOCAB, (1, 3), WIDTH, max_sequences=32, head_hash=HEAD, hidden_size=4, layers=61, rope_theta=5e4,
    end_tokens=frozenset({98, 99}),
)  # fmt: skip
QUICK = Patience(answer=0.2, penalty=0.1, most_penalty=0.4, reconnect=0.02, most_reconnect=0.1, disagreement=0.1)


class Drafter(drafter_pb2_grpc.DrafterServiceServicer):
    """Answers each request with one node; `hold` keeps answers back, `shift` puts them under another step."""

    def __init__(self) -> None:
        self.shift = self.described = 0
        self.fits: dict[str, Any] = {
            "vocab_size": VOCAB, "feature_layer_ids": [1, 3], "feature_width": WIDTH, "block_size": 8,
            "max_budget": 3, "max_sequences": 32, "target_head_hash": HEAD, "hidden_size": 4, "num_target_layers": 61,
            "rope_theta": 5e4, "mask_token_id": 97,
        }  # fmt: skip
        self.said = dict(self.fits)
        self.open = asyncio.Event()
        self.open.set()
        self.seen: list[drafter_pb2.DraftRequest] = []
        self.hellos: list[drafter_pb2.DraftRequest] = []

    async def Describe(self, request: Any, context: Any) -> drafter_pb2.DrafterServiceDescribeResponse:
        self.described += 1
        return drafter_pb2.DrafterServiceDescribeResponse(**self.said)

    async def Draft(self, request_iterator: Any, context: Any) -> AsyncIterator[drafter_pb2.DraftResponse]:
        async for request in request_iterator:
            if request.step_id == 0:
                self.hellos.append(request)
                yield drafter_pb2.DraftResponse(incarnation=b"d" * 16)
                continue
            self.seen.append(request)
            await self.open.wait()
            response = drafter_pb2.DraftResponse(step_id=request.step_id + self.shift, incarnation=b"d" * 16)
            for entry in request.sequences:
                response.trees.add(sequence=entry.sequence, tokens=[7], parents=[-1], logprobs=[-0.5])
            yield response


@asynccontextmanager
async def served(drafter: Drafter, port: int = 0) -> AsyncIterator[int]:
    server = grpc.aio.server()
    drafter_pb2_grpc.add_DrafterServiceServicer_to_server(drafter, server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(0)


@asynccontextmanager
async def running(port: int, patience: Patience = QUICK) -> AsyncIterator[DrafterPeer]:
    peer = DrafterPeer(f"127.0.0.1:{port}", TARGET, b"v" * 16, patience)
    task = asyncio.create_task(peer.run())
    try:
        yield peer
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def batch(step: int, release: tuple[int, ...] = ()) -> DraftBatch:
    features = torch.arange(2 * WIDTH, dtype=torch.float32).view(2, WIDTH) + step
    return DraftBatch(step, [DraftWork(5, 10, features, anchor=42, anchor_position=12, budget=4, topk_cap=2)], release)


async def test_a_request_carries_the_step_and_its_answer_comes_back() -> None:
    drafter = Drafter()
    async with served(drafter) as port, running(port) as peer:
        await soon(lambda: peer.connected)
        answer = await peer.draft(batch(1, release=(3, 4)))
        assert answer is not None
        assert (answer.step_id, list(answer.trees[0].nodes.tokens), answer.trees[0].sequence) == (1, [7], 5)
        (seen,) = drafter.seen
        (entry,) = seen.sequences
        assert (entry.feature_position, entry.feature_rows, entry.anchor, entry.topk_cap) == (10, 2, 42, 2)
        assert entry.budget == 3, "a budget above the drafter's limit would be refused"
        assert list(seen.release) == [3, 4]
        assert torch.frombuffer(bytearray(seen.features.data), dtype=torch.float32).tolist() == [
            float(n) for n in range(1, 2 * WIDTH + 1)
        ]


async def test_a_stream_says_at_once_whose_it_is() -> None:
    """An idle verifier said nothing for hours, so that a silent stream could not be told from it."""
    drafter = Drafter()
    async with served(drafter) as port, running(port) as peer:
        await soon(lambda: len(drafter.hellos) == 1)
        assert drafter.hellos == [drafter_pb2.DraftRequest(verifier=b"v" * 16)]
        assert await peer.draft(batch(1)) is not None
        assert peer.counters.late == 0, "the answer to it is no step's"


async def test_a_request_names_the_drafter_whose_state_its_positions_follow() -> None:
    drafter = Drafter()
    async with served(drafter) as port, running(port) as peer:
        await soon(lambda: peer.connected)
        await peer.draft(batch(1))
        await peer.draft(replace(batch(2), drafter=b"e" * 16))
        assert [request.drafter for request in drafter.seen] == [b"", b"e" * 16]


async def test_no_drafter_is_no_wait_and_one_that_comes_is_used() -> None:
    drafter = Drafter()
    async with served(drafter) as port:
        pass
    async with running(port, replace(QUICK, answer=60)) as peer:
        assert await asyncio.wait_for(peer.draft(batch(1)), 10) is None
        assert peer.counters.unasked == 1
        async with served(drafter, port):
            await soon(lambda: peer.connected)
            assert await peer.draft(batch(2)) is not None


@pytest.mark.parametrize(
    "wrong",
    [
        {"vocab_size": 99},
        {"feature_layer_ids": [3, 1]},
        {"feature_width": WIDTH + 1},
        {"block_size": 1},
        {"max_sequences": 31},
        {"target_head_hash": "5b" * 32},
        {"target_head_hash": ""},
        {"feature_kind": drafter_pb2.FEATURE_KIND_PROJECTED},
        {"feature_kind": drafter_pb2.FEATURE_KIND_TOKENS},
        {"hidden_size": 5},
        {"num_target_layers": 60},
        {"rope_theta": 1e6},
        {"mask_token_id": VOCAB},
        {"mask_token_id": 98},
    ],
)
async def test_a_drafter_that_does_not_fit_is_not_used_until_it_does(wrong: dict[str, Any]) -> None:
    drafter = Drafter()
    drafter.said |= wrong
    async with served(drafter) as port, running(port) as peer:
        await soon(lambda: drafter.described == 2)
        assert not peer.connected
        drafter.said = dict(drafter.fits)
        await soon(lambda: peer.connected)


async def test_a_late_drafter_costs_one_wait_and_is_then_left_alone() -> None:
    """A drafter that hangs must not make every step wait for its whole patience."""
    drafter = Drafter()
    async with served(drafter) as port, running(port, replace(QUICK, penalty=1)) as peer:
        await soon(lambda: peer.connected)
        drafter.open.clear()
        assert await peer.draft(batch(1)) is None
        assert await peer.draft(batch(2)) is None
        assert peer.counters.unasked == 1, "the next step waits for nobody"
        drafter.open.set()
        await soon(lambda: peer.counters.late == 1)
        step, answer = 2, None
        async with asyncio.timeout(10):
            while answer is None:
                step += 1
                answer = await peer.draft(batch(step))
                await asyncio.sleep(0.01)
        assert answer.step_id == step


async def test_an_answer_to_another_step_is_dropped() -> None:
    drafter = Drafter()
    drafter.shift = 1
    async with served(drafter) as port, running(port) as peer:
        await soon(lambda: peer.connected)
        assert await peer.draft(batch(1)) is None
        assert peer.counters.late == 1


async def test_a_stream_that_breaks_under_a_step_ends_its_wait() -> None:
    drafter = Drafter()
    drafter.open.clear()
    async with served(drafter) as port, running(port, Patience(answer=60)) as peer:
        await soon(lambda: peer.connected)
        asking = asyncio.create_task(peer.draft(batch(1)))
        await soon(lambda: len(drafter.seen) == 1)
        drafter.open.set()
        drafter.shift = 7
        await soon(lambda: peer.counters.late == 1)
        assert not asking.done()
    assert await asyncio.wait_for(asking, 5) is None


@pytest.mark.parametrize("release", [(), (9,)])
async def test_releases_wait_for_a_message_to_travel_with(release: tuple[int, ...]) -> None:
    drafter = Drafter()
    async with served(drafter) as port, running(port) as peer:
        await soon(lambda: peer.connected)
        assert (await peer.draft(DraftBatch(1, [], release)) is not None) == bool(release)
        assert [list(request.release) for request in drafter.seen] == ([[9]] if release else [])


async def test_what_is_to_be_released_does_not_pile_up_where_no_drafter_is() -> None:
    """A verifier whose drafter never came kept a number for every sequence that ended, for ever."""
    peer = DrafterPeer("127.0.0.1:1", TARGET, b"v" * 16, QUICK)
    for step in range(1, 100):
        assert await peer.draft(batch(step, release=(step,))) is None
    assert peer._release == []


def test_a_disagreement_names_both_values() -> None:
    said = drafter_pb2.DrafterServiceDescribeResponse(vocab_size=VOCAB, feature_width=WIDTH, feature_layer_ids=[2, 4])
    with pytest.raises(Disagreement, match=r"feature_layer_ids: the drafter has \(2, 4\), the target \(1, 3\)"):
        check(described_from(said), TARGET)


def test_a_drafter_of_tokens_needs_no_head_and_no_layers() -> None:
    said = drafter_pb2.DrafterServiceDescribeResponse(
        vocab_size=VOCAB, feature_width=1, block_size=17, max_sequences=32,
        feature_kind=drafter_pb2.FEATURE_KIND_TOKENS,
    )  # fmt: skip
    check(described_from(said), replace(TARGET, features="tokens", feature_width=1, feature_layers=()))
