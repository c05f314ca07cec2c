"""Streams on which nobody speaks: they end, and take nobody's place meanwhile."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import grpc
import grpc.aio
import pytest

from hedgerow.engine.types import DraftAnswer, DraftBatch
from hedgerow.rpc.interceptors import StatusInterceptor
from hedgerow.v1 import drafter_pb2, drafter_pb2_grpc, verifier_pb2, verifier_pb2_grpc
from services.drafter.convert import Limits
from services.drafter.servicer import DrafterServicer
from services.drafter.servicer import Loaded as LoadedDrafter
from services.verifier.servicer import Loaded as LoadedVerifier
from services.verifier.servicer import VerifierServicer

SHORT = 0.2


class CountedEngine:
    """Answers without trees; `alive` counts engines that were made and not dropped."""

    alive = 0

    def __init__(self) -> None:
        CountedEngine.alive += 1

    def draft(self, batch: DraftBatch) -> DraftAnswer:
        return DraftAnswer(batch.step_id, [], b"d" * 16)

    def drop_all(self) -> None:
        CountedEngine.alive -= 1


@asynccontextmanager
async def served(servicer: DrafterServicer | VerifierServicer) -> AsyncIterator[grpc.aio.Channel]:
    server = grpc.aio.server(interceptors=[StatusInterceptor()])
    servicer.register(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(0)


async def code_of(call: Any) -> grpc.StatusCode:
    async with asyncio.timeout(10):
        with pytest.raises(grpc.aio.AioRpcError):
            await call.read()
        return cast(grpc.StatusCode, await call.code())


async def test_a_draft_stream_counts_from_its_first_sound_message_and_a_silent_one_ends() -> None:
    """Four streams that said nothing used up max_verifiers and locked the real verifier out for good."""
    servicer = DrafterServicer(asyncio.Event(), max_streams=1, first_within=SHORT)
    limits = Limits(vocab_size=10, feature_width=4, max_budget=8, max_sequences=4)
    servicer.loaded = LoadedDrafter(drafter_pb2.DrafterServiceDescribeResponse(), limits, CountedEngine)
    async with served(servicer) as channel:
        stub = drafter_pb2_grpc.DrafterServiceStub(channel)
        silent = [stub.Draft() for _ in range(4)]
        unsound = stub.Draft()
        await unsound.write(drafter_pb2.DraftRequest(verifier=b"short"))
        assert await code_of(unsound) is grpc.StatusCode.INVALID_ARGUMENT
        first, second = stub.Draft(), stub.Draft()
        await first.write(drafter_pb2.DraftRequest(verifier=os.urandom(16), step_id=7))
        assert (await first.read()).step_id == 7
        assert CountedEngine.alive == 1
        await second.write(drafter_pb2.DraftRequest(verifier=os.urandom(16)))
        assert await code_of(second) is grpc.StatusCode.RESOURCE_EXHAUSTED
        for call in silent:
            assert await code_of(call) is grpc.StatusCode.DEADLINE_EXCEEDED
        await first.write(drafter_pb2.DraftRequest(step_id=8))
        assert (await first.read()).step_id == 8, "one that spoke may be idle for longer"
        first.cancel()


async def test_an_attach_stream_that_does_not_say_whose_it_is_ends() -> None:
    servicer = VerifierServicer(outgoing_limit=10, orphan_seconds=0.1, first_within=SHORT)
    described = verifier_pb2.DescribeResponse(incarnation=b"v" * 16)
    servicer.loaded = LoadedVerifier(described, cast(Any, None), lambda: None, lambda: None, max_budget=8)
    async with served(servicer) as channel:
        stub = verifier_pb2_grpc.VerifierServiceStub(channel)
        silent, spoke = stub.Attach(), stub.Attach()
        await spoke.write(verifier_pb2.AttachRequest(gateway=os.urandom(16)))
        for call in (silent, spoke):
            assert (await call.read()).incarnation == b"v" * 16
        assert await code_of(silent) is grpc.StatusCode.DEADLINE_EXCEEDED
        waiting = asyncio.ensure_future(spoke.read())
        done, _ = await asyncio.wait({waiting}, timeout=2 * SHORT)
        assert not done, "one that spoke may be idle for longer"
        spoke.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
