"""What an append may not be: each refusal names the entry, the field and the limit."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from hedgerow.errors import InvalidRequest
from hedgerow.v1 import common_pb2
from hedgerow.v1 import kvstore_pb2 as pb
from tests.kvstore_calls import Gateway, Session, error_of, gateway_on
from tests.redis_servers import Service, kvstore, redis_server  # noqa: F401  (fixtures)

LOG = list(range(100, 160))


@pytest_asyncio.fixture
async def gateway(kvstore: Service) -> AsyncIterator[Gateway]:  # noqa: F811
    async with gateway_on(kvstore.port) as connected:
        yield connected


LARGE = pb.CommittedStep(stats=common_pb2.StepStats(tree_tokens=[2**31] * 250_000))
BAD: list[tuple[str, dict[str, Any], str]] = [
    ("session_id", {"session_id": "a{b}"}, "1 to 128 of"),
    ("session_id", {"session_id": "x" * 129}, "1 to 128 of"),
    ("birth", {"birth": b"short"}, "exactly 16 bytes"),
    ("digest_before", {"digest_before": b""}, "exactly 16 bytes"),
    ("digest_after", {"tokens": []}, "equal to digest_before without tokens"),
    ("lease.owner", {"lease": common_pb2.Lease(epoch=1, owner=b"x")}, "exactly 16 bytes"),
    ("lease.epoch", {"lease": common_pb2.Lease(epoch=0, owner=bytes(16))}, "in [1,"),
    ("lease.epoch", {"lease": common_pb2.Lease(epoch=2**60, owner=bytes(16))}, "in [1,"),
    ("tokens", {"tokens": [1] * 70_000}, "in [0, 65536] tokens"),
    ("offset", {"offset": 2**31}, "in [0,"),
    ("finish_reason", {"finish_reason": 77}, "a known reason"),
    ("usage", {"usage": common_pb2.Usage(steps=1)}, "only with a finish_reason"),
    ("matched_stop", {"matched_stop": "x" * 257}, "in [0, 256] bytes"),
    ("token_digests", {"token_digests": [bytes(16)]}, "none or 2, as tokens"),
    ("token_digests[0]", {"token_digests": [b"x", b"y"]}, "exactly 16 bytes"),
    ("spent", {"spent": common_pb2.Usage(steps=1), "finish_reason": 1}, "only without a finish_reason"),
    ("logprobs and committed_steps", {"committed_steps": [LARGE]}, "in [0, 1048576] bytes"),
]


@pytest.mark.parametrize(("field", "change", "limit"), BAD)
async def test_bad_entry_names_its_field_and_limit_and_nothing_is_applied(
    gateway: Gateway, field: str, change: dict[str, Any], limit: str
) -> None:
    good, bad = await gateway.create(Session()), (await gateway.create(Session())).entry(LOG, 0, 2)
    for name, value in change.items():
        bad.ClearField(name)  # type: ignore[arg-type]
        bad.MergeFrom(pb.AppendEntry(**{name: value}))
    error = await error_of(gateway.append(good.entry(LOG, 0, 3), bad))
    assert isinstance(error, InvalidRequest)
    assert error.field == f"entries[1].{field}"
    assert limit in error.limit
    assert list((await gateway.get(good)).tokens) == []


async def test_too_many_entries_and_a_session_twice_are_refused(gateway: Gateway) -> None:
    twice = (await gateway.create(Session())).entry(LOG, 0, 1)
    for entries, limit in (
        ([twice, twice], "one entry a session in a message"),
        ([twice] * 1025, "in [0, 1024] entries"),
    ):
        error = await error_of(gateway.append(*entries))
        assert isinstance(error, InvalidRequest)
        assert error.limit == limit
