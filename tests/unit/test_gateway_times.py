"""The times of a gateway's failovers are settings: a changed one is obeyed, a bad one is refused."""

from __future__ import annotations

import asyncio
import time

import grpc.aio
import pytest

from hedgerow.errors import Unavailable
from hedgerow.rpc.config import ConfigError, from_env
from hedgerow.v1 import kvstore_pb2 as kv
from hedgerow.v1.kvstore_pb2_grpc import KvStoreServiceServicer, add_KvStoreServiceServicer_to_server
from services.gateway.config import GatewayConfig
from services.gateway.following import Times
from services.gateway.service import open_store
from services.gateway.store_calls import ANSWER
from services.gateway.store_peer import StorePeer
from services.gateway.upkeep import QUIET, STALLED
from tests.unit.gateway_peers import OWNER, Bench, update
from tests.unit.test_gateway_peers import Watch, append, served

NEEDED = {"HEDGEROW_VERIFIER": "v", "HEDGEROW_KVSTORE": "k", "HEDGEROW_MODEL_PATH": "m"}


class HangingStore(KvStoreServiceServicer):
    """Renews, and answers nothing else."""

    async def RenewOwner(
        self,
        request: kv.RenewOwnerRequest,
        context: grpc.aio.ServicerContext[kv.RenewOwnerRequest, kv.RenewOwnerResponse],
    ) -> kv.RenewOwnerResponse:
        return kv.RenewOwnerResponse()

    async def GetSession(self, request: object, context: object) -> None:
        await asyncio.Event().wait()

    async def Append(self, requests: object, context: object) -> None:
        await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("name", "bad", "limit"),
    [
        ("HEDGEROW_STORE_ANSWER_SECONDS", "0.05", r"\[0.1, 600\]"),
        ("HEDGEROW_STORE_ANSWER_SECONDS", "601", r"\[0.1, 600\]"),
        ("HEDGEROW_STORE_ANSWER_SECONDS", "soon", "a finite number"),
        ("HEDGEROW_QUIET_SECONDS", "0.4", r"\[0.5, 3600\]"),
        ("HEDGEROW_QUIET_SECONDS", "3601", r"\[0.5, 3600\]"),
    ],
)
def test_a_time_out_of_its_bounds_is_refused(name: str, bad: str, limit: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}.*{bad}.*{limit}"):
        from_env(GatewayConfig, NEEDED | {name: bad})


def test_the_defaults_are_those_of_the_code() -> None:
    config = from_env(GatewayConfig, NEEDED)
    assert (config.store_answer_seconds, config.quiet_seconds) == (ANSWER, QUIET)


def test_what_a_live_owner_may_leave_follows_the_lease() -> None:
    assert Times.of(4.0, 120.0) == Times(quiet=2.0, repair=8.0, forsaken=32.0, patience=120.0)
    assert Times.of(0.5, 9.0) == Times(quiet=0.25, repair=1.0, forsaken=4.0, patience=9.0)


def test_a_silent_session_is_checked_and_asked_for_as_configured() -> None:
    bench = Bench(quiet=1.0)
    session = bench.begin()
    bench.step(update(session, [1]))
    bench.acknowledge()
    bench.later(0.9)
    assert bench.store.messages == 1
    bench.later(0.2)
    assert bench.store.messages == 2
    bench.acknowledge()
    bench.later(STALLED - 1.2)
    assert len(bench.engine.starts) == 1
    bench.later(0.2)
    assert len(bench.engine.starts) == 2


async def test_a_store_that_hangs_has_as_long_as_is_configured() -> None:
    async with served(add_KvStoreServiceServicer_to_server, HangingStore()) as address:
        given = NEEDED | {"HEDGEROW_KVSTORE": address, "HEDGEROW_STORE_ANSWER_SECONDS": "0.3"}
        watch = Watch()
        peer: StorePeer = open_store(from_env(GatewayConfig, given), OWNER, watch.reports.append, None)
        began = time.monotonic()
        with pytest.raises(Unavailable, match="kvstore"):
            await peer.get("s1")
        assert 0.25 <= time.monotonic() - began < ANSWER
        running = asyncio.create_task(peer.run(watch.answers.append, watch.lost.append))
        peer.append(append("s1"))
        await watch.until(lambda: any("within 0.3 s" in str(report) for report in watch.reports))
        running.cancel()
        await asyncio.wait([running])
        await peer.close()
