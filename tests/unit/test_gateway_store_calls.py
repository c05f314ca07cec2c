"""What a gateway's calls of the store say."""

from __future__ import annotations

import pytest

from hedgerow.v1 import common_pb2
from hedgerow.v1 import kvstore_pb2 as kv
from services.gateway.store_calls import StoreCalls
from tests.unit.gateway_peers import OWNER, record


async def test_a_session_that_is_written_again_keeps_its_retention(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was written with the store's default life."""
    asked: list[kv.CreateSessionRequest | kv.AcquireLeaseRequest] = []

    async def ask(self: StoreCalls, method: str, request: kv.AcquireLeaseRequest, **_: object) -> object:
        asked.append(request)
        return kv.AcquireLeaseResponse(lease=common_pb2.Lease(epoch=2, owner=OWNER))

    monkeypatch.setattr(StoreCalls, "_ask", ask)
    store = StoreCalls("k", OWNER, lease=4.0, retention=90.0)
    await store.acquire(record(), floor=1, repair=True)
    await store.acquire(record(), floor=1)
    assert [request.ttl_ms for request in asked] == [90_000, 0]
    await store.close()
