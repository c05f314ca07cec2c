"""An upgrade that changes the fingerprint, as docs/operations.md has it: the old group stays until its sessions end.

Two verifiers serve other weights under one name. Sixteen streams begin on the old one; the new one is made known, first
of the list, by restarting the gateways; the old one is told to end. No stream may break, or have a token that its own
group would not have given it undisturbed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from hedgerow.cli.child import Backoff
from hedgerow.cli.supervisor import StackConfig
from hedgerow.client import AsyncClient
from tests.polling import eventually, soon
from tests.stack import ROOT, Models
from tests.system.rolled import Rolled
from tests.tiny import write_tiny

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]
STREAMS, TOKENS, SHORT = 16, 3900, 40
OLD, NEW = "verifier", "verifier-2"
LONGEST = 300  # seconds that the old group may take to end: as long as its longest session


class Upgraded(Rolled):
    """Gateways know the old verifier alone."""

    def _plan(self) -> dict[str, dict[str, str]]:
        plan = super()._plan()
        for name in self.names("gateway"):
            plan[name]["VERIFIER"] = self.address(OLD)
        return plan


class Read:
    """One client's answer."""

    def __init__(self, number: int, most: int) -> None:
        self.number, self.most = number, most
        self.tokens: list[int] = []
        self.fingerprint = ""

    async def run(self, client: AsyncClient) -> Read:
        options: dict[str, Any] = {"temperature": 0.8, "seed": 50 + self.number, "ignore_eos": True}
        stream = client.generate([7, 8, 9 + self.number], max_tokens=self.most, **options)
        async for chunk in stream:
            self.tokens += chunk.tokens
        assert stream.started is not None
        assert stream.started.exact
        self.fingerprint = stream.started.fingerprint
        return self


@pytest.fixture
def upgraded(tiny: Models, tmp_path: Path) -> Iterator[Upgraded]:
    new = write_tiny(tmp_path / "new", seed=99)
    settings = {NEW: {"MODEL_PATH": str(new.target)}, OLD: {"GRACE": str(LONGEST)}}
    config = StackConfig(
        ROOT, tiny.target, tmp_path / "data", gateways=2, verifiers=2, backoff=Backoff(0.1, 0.1), grace=2,
        settings=settings,
    )  # fmt: skip
    with Upgraded(config) as running:
        yield running


async def answers(client: AsyncClient, tokens: int = SHORT, numbers: Sequence[int] = range(STREAMS)) -> list[Read]:
    """Of all clients at once."""
    return list(await asyncio.gather(*(Read(number, tokens).run(client) for number in numbers)))


async def test_the_old_group_stays_until_its_sessions_end(upgraded: Upgraded) -> None:
    async with AsyncClient(upgraded.addresses("gateway")) as client:
        undisturbed = await answers(client, TOKENS)
        (old,) = {read.fingerprint for read in undisturbed}
        reads = [Read(number, TOKENS) for number in range(STREAMS)]
        running = [asyncio.create_task(read.run(client)) for read in reads]
        await soon(lambda: all(read.tokens for read in reads), 120)

        for name in upgraded.names("gateway"):
            upgraded.upgrade(name, VERIFIER=f"{upgraded.address(NEW)},{upgraded.address(OLD)}")
        await asyncio.to_thread(upgraded.roll, "gateway", clients_return=False)  # they have streams
        between = await answers(client)
        (new,) = {read.fingerprint for read in between}
        assert new != old, "new sessions get the first of the list"

        starts, began = upgraded.starts(OLD), time.monotonic()
        upgraded.upgrade(OLD, MODEL_PATH=upgraded.config.settings[NEW]["MODEL_PATH"])
        upgraded.terminate(OLD)
        still = sum(not task.done() for task in running)
        after = await answers(client)
        await asyncio.gather(*running)
        ended = time.monotonic() - began
        await asyncio.to_thread(eventually, lambda: upgraded.starts(OLD) > starts, 20, "the old group has ended")
        print(f"{still} streams ran on for {ended:.1f} s after the old group was told to end")
        assert still, "the test was too slow: let the answers be longer"
        assert upgraded.ended[OLD] == ["0"]

        for read, whole in zip(reads, undisturbed, strict=True):
            assert (read.fingerprint, read.tokens) == (old, whole.tokens)
        await asyncio.to_thread(upgraded.wait_ready, OLD)
        again = await answers(client)
        for reads in (after, again):
            assert [(read.fingerprint, read.tokens) for read in reads] == [(new, read.tokens) for read in between]
        assert all(read.tokens != whole.tokens[:SHORT] for read, whole in zip(again, undisturbed, strict=True))
