"""The drafter as a process, seen by verifiers that are only a stream."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest

from hedgerow.cli.child import Child
from hedgerow.v1 import common_pb2, drafter_pb2, drafter_pb2_grpc
from tests.processes import address, service
from tests.stack import Models

WIDTH, VOCAB, PROMPT = 128, 512, 20  # of the tiny model; rows of features
Entry = drafter_pb2.DraftSequence


@pytest.fixture(scope="module")
def drafter(tiny: Models) -> Iterator[Child]:
    with service(
        "drafter", model_path=tiny.drafter, target_path=tiny.target, max_sequences=4, max_verifiers=2, max_budget=16
    ) as child:
        yield child


class TestVerifier:
    """One Draft stream."""

    __test__ = False

    def __init__(self, where: str) -> None:
        self.channel = grpc.aio.insecure_channel(where)
        self.stub = drafter_pb2_grpc.DrafterServiceStub(self.channel)
        self.incarnation, self.step = os.urandom(16), 0

    async def __aenter__(self) -> TestVerifier:
        self.call = self.stub.Draft()
        return self

    async def __aexit__(self, *error: object) -> None:
        self.call.cancel()
        await self.channel.close()

    async def ask(self, *entries: Entry, **fields: Any) -> drafter_pb2.DraftResponse:
        """One step; raises what the stream ended with."""
        self.step += 1
        given = {"verifier": self.incarnation, "step_id": self.step, **fields}
        if "features" not in given:
            given["features"] = tensor(features(7, sum(entry.feature_rows for entry in entries)))
        await self.call.write(drafter_pb2.DraftRequest(sequences=entries, **given))
        answer = await self.call.read()
        if answer is grpc.aio.EOF:
            raise AssertionError(await self.call.code())
        assert answer.step_id == self.step
        return answer  # type: ignore[no-any-return]


@pytest.fixture
async def verifier(drafter: Child) -> AsyncIterator[TestVerifier]:
    async with TestVerifier(address(drafter)) as made:
        yield made


def features(seed: int, rows: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(seed).standard_normal((rows, WIDTH), dtype=np.float32)


def tensor(values: np.ndarray[Any, Any], dtype: Any = common_pb2.TENSOR_TYPE_FLOAT32) -> common_pb2.Tensor:
    return common_pb2.Tensor(dtype=dtype, shape=values.shape, data=values.tobytes())


def entry(sequence: int = 1, rows: int = PROMPT, position: int = 0, budget: int = 8, anchor: int = 5) -> Entry:
    return Entry(
        sequence=sequence, feature_position=position, feature_rows=rows, anchor=anchor,
        anchor_position=position + rows, budget=budget,
    )  # fmt: skip


async def test_it_says_what_it_is(verifier: TestVerifier) -> None:
    said = await verifier.stub.Describe(drafter_pb2.DrafterServiceDescribeRequest())
    assert (said.vocab_size, said.feature_width, list(said.feature_layer_ids)) == (VOCAB, WIDTH, [0, 1])
    assert (said.block_size, said.max_budget, said.max_sequences) == (8, 16, 4)
    assert len(said.checkpoint_hash) == len(said.target_head_hash) == 64


async def test_a_tree_comes_for_each_sequence_with_a_budget(verifier: TestVerifier) -> None:
    answer = await verifier.ask(entry(1, budget=8), entry(2, budget=0), entry(3, budget=1))
    assert [(tree.sequence, len(tree.tokens), tree.features_from) for tree in answer.trees] == [(1, 8, 20), (3, 1, 20)]
    (first, _) = answer.trees
    assert all(-1 <= parent < node for node, parent in enumerate(first.parents))
    assert len(first.logprobs) == 8


async def test_two_verifiers_with_the_same_numbers_do_not_meet(drafter: Child, verifier: TestVerifier) -> None:
    mine = await verifier.ask(entry(1))
    async with TestVerifier(address(drafter)) as other:
        theirs = await other.ask(entry(1), features=tensor(features(8, PROMPT)))
        assert theirs.trees[0].logprobs != mine.trees[0].logprobs
        assert theirs.incarnation != mine.incarnation, "the state of a stream is its own"
    again = await verifier.ask(entry(1, rows=0, position=PROMPT))
    assert again.trees[0] == mine.trees[0]


async def test_a_request_meant_for_an_earlier_drafter_is_answered_as_unknown(verifier: TestVerifier) -> None:
    """Its features began where the earlier one's ended, and became a context of their own."""
    stale = await verifier.ask(entry(1, rows=4, position=16), entry(2, budget=0), drafter=os.urandom(16))
    assert [(tree.sequence, len(tree.tokens), tree.features_from) for tree in stale.trees] == [(1, 0, 0)]
    fresh = await verifier.ask(entry(1), drafter=stale.incarnation)
    assert [(tree.sequence, len(tree.tokens), tree.features_from) for tree in fresh.trees] == [(1, 8, 20)]


async def test_streams_that_say_nothing_lock_nobody_out(drafter: Child) -> None:
    """Each of them had a place among max_verifiers, 2 here, before its first message."""
    async with AsyncExitStack() as open_streams:
        for _ in range(4):
            silent = await open_streams.enter_async_context(TestVerifier(address(drafter)))
            await silent.stub.Describe(drafter_pb2.DrafterServiceDescribeRequest())  # behind the stream that it opened
        verifier = await open_streams.enter_async_context(TestVerifier(address(drafter)))
        assert len((await verifier.ask(entry())).trees) == 1


WRONG: dict[str, tuple[list[Entry], dict[str, Any], str]] = {
    "too few bytes": ([entry()], {"features": common_pb2.Tensor(dtype=1, shape=[PROMPT, WIDTH], data=b"1234")}, "data"),
    "another width": ([entry()], {"features": tensor(np.zeros((PROMPT, WIDTH + 1), np.float32))}, "shape"),
    "too few rows": ([entry()], {"features": tensor(np.zeros((PROMPT - 1, WIDTH), np.float32))}, "shape"),
    "a huge shape": (
        [entry(rows=(1 << 32) - 1, position=0)],
        {"features": common_pb2.Tensor(dtype=1, shape=[(1 << 32) - 1, WIDTH], data=b"")},
        "data",
    ),
    "another type": ([entry()], {"features": tensor(np.zeros((PROMPT, WIDTH), np.int32), 4)}, "dtype"),
    "a type without a name": (
        [entry()],
        {"features": tensor(np.zeros((PROMPT, WIDTH), np.float32), 99)},
        "dtype: '99'",
    ),
    "half an incarnation": ([entry()], {"drafter": b"12345678"}, "drafter"),
    "no number": ([entry()], {"features": tensor(np.full((PROMPT, WIDTH), np.nan, np.float32))}, "data"),
    "shared memory": (
        [entry()],
        {"features": common_pb2.Tensor(dtype=1, shape=[PROMPT, WIDTH], shared_memory={"name": "/etc/passwd"})},
        "shared_memory",
    ),
    "an unknown token": ([entry(anchor=VOCAB)], {}, "anchor"),
    "too large a budget": ([entry(budget=17)], {}, "budget"),
    "a sequence twice": ([entry(), entry()], {}, "sequence"),
    "more sequences than it keeps": ([entry(n) for n in range(5)], {}, "sequences"),
    "features at the anchor": (
        [Entry(sequence=1, feature_rows=PROMPT, anchor=1, anchor_position=PROMPT - 1, budget=4)],
        {},
        "feature_rows",
    ),
    "no verifier": ([entry()], {"verifier": b""}, "verifier"),
}


@pytest.mark.parametrize("case", WRONG)
async def test_a_malformed_request_ends_its_stream_and_no_other(
    drafter: Child, verifier: TestVerifier, case: str
) -> None:
    entries, fields, field = WRONG[case]
    good = await verifier.ask(entry(1))
    async with TestVerifier(address(drafter)) as bad:
        with pytest.raises((grpc.aio.AioRpcError, AssertionError)) as refused:
            await bad.ask(*entries, **fields)
        assert await bad.call.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED), refused.value
        assert field in await bad.call.details()
    again = await verifier.ask(entry(1, rows=0, position=PROMPT))
    assert again.trees[0] == good.trees[0]


async def test_one_stream_is_one_verifiers(verifier: TestVerifier) -> None:
    await verifier.ask(entry(1))
    with pytest.raises(grpc.aio.AioRpcError):
        await verifier.ask(entry(1, rows=0, position=PROMPT), verifier=os.urandom(16))


async def test_streams_are_bounded_and_a_place_is_free_when_one_ends(drafter: Child) -> None:
    async with TestVerifier(address(drafter)) as one, TestVerifier(address(drafter)) as two:
        await asyncio.gather(one.ask(entry()), two.ask(entry()))
        async with TestVerifier(address(drafter)) as three:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await three.ask(entry())
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    async with asyncio.timeout(10), TestVerifier(address(drafter)) as four:
        while True:
            try:
                await four.ask(entry())
            except grpc.aio.AioRpcError:  # the ended streams are not gone yet
                four.call = four.stub.Draft()
                continue
            break


async def test_sigterm_ends_streams_that_wait_and_the_process(tiny: Models) -> None:
    with service("drafter", model_path=tiny.drafter, target_path=tiny.target, grace=30) as child:
        async with TestVerifier(address(child)) as verifier:
            await verifier.ask(entry())
            stopping = asyncio.create_task(asyncio.to_thread(child.stop, 20))
            assert await verifier.call.read() is grpc.aio.EOF
            assert await verifier.call.code() is grpc.StatusCode.OK
            assert await stopping == 0
