"""Each service restarted and upgraded, one process after the other, under sixteen streams: none breaks, none is wrong.

Real processes, and the SDK as it comes: clients ask for the same generations again and again, and each answer must be
the undisturbed one, token for token. What a cluster does about it is in test_cluster.py.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

import pytest

from hedgerow.cli.child import Backoff
from hedgerow.cli.supervisor import StackConfig
from hedgerow.client import AsyncClient
from tests.polling import soon
from tests.stack import ROOT, Models
from tests.system.rolled import Rolled
from tests.system.streams import Clients

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]
STREAMS, TOKENS = 16, 160
UPGRADES = {  # a setting that another version might have, of which no token depends
    "gateway": {"MAX_SESSIONS": "777"},
    "verifier": {"MAX_WAITING": "77", "PREFILL_ROWS": "64"},
    "drafter": {"MAX_VERIFIERS": "7"},
    "kvstore": {"MAX_ENTRIES": "777"},
}


@contextlib.asynccontextmanager
async def streams(addresses: str, count: int = STREAMS) -> AsyncIterator[Clients]:
    """Clients as they are by default, in the midst of their answers; at the end each has come, whole and right."""
    async with AsyncClient(addresses) as client:
        clients = Clients(addresses, TOKENS)
        first = await asyncio.gather(*(clients.answer(client, number) for number in range(count)))
        clients.first.update(enumerate(first))
        running = [asyncio.create_task(clients.repeat(client, number)) for number in range(count)]
        try:
            await soon(lambda: clients.running == count, 60)
            yield clients
            done = clients.done
            await soon(lambda: clients.done >= done + count, 60)  # and it goes on
        finally:
            clients.stopping.set()
            await asyncio.gather(*running)
        print(f"{clients.done} answers, longest pause {clients.longest:.2f} s")
        assert (clients.errors, clients.wrong, len(clients.fingerprints)) == ([], 0, 1)
        assert clients.done >= 2 * count


@pytest.fixture(scope="module")
def pairs(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rolled]:
    """Two of each, as a rolling upgrade wants them; one drafter, without which decoding is plain."""
    config = StackConfig(
        ROOT, models.target, tmp_path_factory.mktemp("pairs"), drafter=models.drafter, budget=4,
        gateways=2, verifiers=2, kvstores=2, backoff=Backoff(0.1, 0.1), grace=6,
    )  # fmt: skip
    with Rolled(config) as running:
        yield running


@pytest.mark.parametrize("service", UPGRADES)
async def test_a_service_is_restarted_and_upgraded_under_sixteen_streams(pairs: Rolled, service: str) -> None:
    async with streams(pairs.addresses("gateway")):
        await asyncio.to_thread(pairs.roll, service)
        await asyncio.to_thread(pairs.roll, service, **UPGRADES[service])


@pytest.fixture(scope="module")
def single(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rolled]:
    """One of each: what runs, and what is asked for meanwhile, waits."""
    data = tmp_path_factory.mktemp("single")
    with Rolled(StackConfig(ROOT, models.target, data, backoff=Backoff(0.1, 0.1), grace=6)) as running:
        yield running


@pytest.mark.parametrize("service", ["verifier", "kvstore", "gateway"])
async def test_the_only_one_of_a_service_is_restarted_under_sixteen_streams(single: Rolled, service: str) -> None:
    async with streams(single.addresses("gateway")):
        await asyncio.to_thread(single.roll, service)
