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


async def test_another_creation_of_this_gateway_is_an_existing_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was given up while the store was away, and took effect later: its birth is another one. The answer came
    from the second replica, which was taken for the repeat of this creation.
    """

    async def ask(self: StoreCalls, *_: object, **__: object) -> object:
        self._at = 1
        there = kv.SessionState(epoch=1, owner=OWNER, length=0)
        return kv.CreateSessionResponse(created=False, existing=there)

    monkeypatch.setattr(StoreCalls, "_ask", ask)
    store = StoreCalls("k0,k1", OWNER, lease=4.0, retention=90.0)
    created = await store.create(record(), b"")
    assert created.existing is not None
    assert (created.existing.owner, created.existing.epoch) == (OWNER, 1)
    await store.close()
