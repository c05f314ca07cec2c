"""What the kvstore's lines about appends say: the sessions, and the traces that the message names."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from io import StringIO
from typing import Any

import pytest

from hedgerow.errors import Unavailable
from hedgerow.rpc import logs
from hedgerow.v1 import common_pb2
from hedgerow.v1 import kvstore_pb2 as pb
from services.kvstore.config import KvStoreConfig
from services.kvstore.servicer import KvStoreServicer
from services.kvstore.spans import NAMED
from services.kvstore.store import Store
from tests.kvstore_calls import Session

TRACES = [f"{n:032x}" for n in range(1, 41)]


class Away:
    """Stands for the runner: Redis is away."""

    async def call_all(self, calls: Sequence[object], **how: object) -> list[object]:
        return [Unavailable("redis", "it is away") for _ in calls]


@pytest.fixture
def lines() -> Iterator[StringIO]:
    """As the service writes them, in JSON."""
    written, logger = StringIO(), logging.getLogger("services.kvstore.store")
    handler = logging.StreamHandler(written)
    handler.setFormatter(logs._JsonFormatter("kvstore"))
    logger.addHandler(handler)
    yield written
    logger.removeHandler(handler)


async def test_a_failed_append_names_its_sessions_and_the_traces_of_its_own_message(lines: StringIO) -> None:
    anything: Any = Away()
    servicer = KvStoreServicer(
        KvStoreConfig(redis_url="redis://127.0.0.1:1"), Store(anything, anything, anything, tombstone=1), anything,
        anything, anything, asyncio.Event(),
    )  # fmt: skip
    session = Session()

    async def messages() -> AsyncIterator[pb.AppendRequest]:
        for number, count in enumerate((1, 40, 0)):
            traces = [common_pb2.TraceContext(traceparent=f"00-{each}-{1:016x}-01") for each in TRACES[:count]]
            yield pb.AppendRequest(batch_id=number, entries=[session.entry([5], 0)], traces=traces)

    context: Any = None
    answers = [answer.batch_id async for answer in servicer.Append(messages(), context)]
    assert answers == [0, 1, 2]
    said = [json.loads(line) for line in lines.getvalue().splitlines()]
    assert [(line["event"], line["sessions"]) for line in said] == [("append failed", [session.session_id])] * 3
    known = [{key: line[key] for key in ("trace", "traces") if key in line} for line in said]
    assert known == [{"trace": TRACES[0]}, {"traces": TRACES[:NAMED]}, {}]
