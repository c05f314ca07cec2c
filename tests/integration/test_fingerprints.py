"""Verifiers of different fingerprints: the operator's policy decides what becomes of a session that lost its own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hedgerow.cli.child import Backoff
from hedgerow.cli.supervisor import Stack, StackConfig
from hedgerow.client import AsyncClient
from hedgerow.v1 import common_pb2
from tests.integration.test_failover import Read, attached
from tests.polling import soon
from tests.stack import ROOT, Models, Plain


@contextmanager
def mixed(models: Models, folder: Path, policy: str) -> Iterator[Stack]:
    """One compiled and one torch engine, which choose the same tokens as far as anybody knows, but promise nothing."""
    settings = {
        "verifier": {"RUN_AHEAD": "64"},
        "verifier-2": {"ENGINE": "torch"},
        "gateway": {"FINGERPRINT_POLICY": policy, "FINGERPRINT_PATIENCE": "1"},
    }
    backoff = Backoff(first=6.0, most=6.0)
    with Stack(StackConfig(ROOT, models.target, folder, verifiers=2, backoff=backoff, settings=settings)) as running:
        yield running


async def lose_its_own(stack: Stack, read: Read) -> bool:
    """The verifier of a running stream is killed. Whether the session is recorded as exact."""
    for name in stack.names("verifier"):
        await soon(lambda name=name: attached(stack, name), 30)  # type: ignore[misc]
    running = asyncio.create_task(read.run(stack.address("gateway"), 900))
    await soon(lambda: len(read.tokens) > 20, 20)
    stack.kill("verifier")
    await running
    assert read.finished is not None
    assert read.started is not None
    assert read.finished.reason == common_pb2.FINISH_REASON_LENGTH
    assert len(read.tokens) == 900
    async with AsyncClient(stack.address("gateway")) as client:
        return (await client.get_session(read.started.session_id)).exact


@pytest.mark.long
@pytest.mark.parametrize("policy", ["best_effort", "wait"])
async def test_a_session_whose_fingerprint_is_gone_waits_or_goes_on_marked(
    models: Models, plain: Plain, tmp_path: Path, policy: str
) -> None:
    with mixed(models, tmp_path, policy) as stack:
        read = Read(0.9, 11)
        exact = await lose_its_own(stack, read)
    assert read.finished is not None
    assert read.started is not None
    assert read.started.mode == common_pb2.EXECUTION_MODE_EXACT
    longest = max(read.pauses)
    if policy == "wait":
        assert longest > 3
        assert (read.finished.mode, exact) == (common_pb2.EXECUTION_MODE_EXACT, True)
        assert read.tokens == read.expected(plain)
    else:
        assert 0.9 < longest < 6
        assert (read.finished.mode, exact) == (common_pb2.EXECUTION_MODE_BEST_EFFORT, False)
        assert read.tokens[:20] == read.expected(plain)[:20]
