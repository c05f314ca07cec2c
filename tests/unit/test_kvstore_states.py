"""Reading many states at once: one node of a cluster that is away does not hide the sessions of the others."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from redis.exceptions import ResponseError

from hedgerow.errors import Unavailable
from services.kvstore.records import Status
from services.kvstore.store import Store

OWNER = b"o" * 16
AWAY = Unavailable("redis", "no answer")


def packed(status: Status, epoch: int, cancelled: bool = False) -> bytes:
    """An answer as session.lua packs it."""
    return struct.pack("<BQIBB16s16sIIII", status, epoch, 4, 0, cancelled, OWNER, bytes(16), 2**32 - 1, 0, 0, 0)


class Answers:
    """A runner that gives one reply after the other."""

    def __init__(self, *replies: Any) -> None:
        self.replies = replies

    async def call_all(self, calls: Any, *, durable: bool = False) -> list[Any]:
        assert len(calls) == len(self.replies)
        return list(self.replies)


class Owners:
    """Remembers which marks were dropped."""

    def __init__(self) -> None:
        self.forgotten: list[str] = []

    async def forget(self, owner: bytes, session_ids: list[str]) -> None:
        self.forgotten += session_ids


def store(*replies: Any) -> Store:
    return Store(Answers(*replies), Any, Owners(), tombstone=1000)  # type: ignore[arg-type]


async def test_sessions_of_a_node_that_is_away_and_of_a_newer_version_are_left_out() -> None:
    replies = ([packed(Status.OK, 3)], AWAY, [packed(Status.UNKNOWN, 0)], ResponseError("FORMAT 2 is not 1"))
    states = await store(*replies).states(["a", "b", "c", "d"])
    assert list(states) == ["a", "c"]
    assert states["a"] is not None
    assert (states["a"].epoch, states["c"]) == (3, None)


async def test_away_altogether_is_unavailable() -> None:
    with pytest.raises(Unavailable):
        await store(AWAY, AWAY).states(["a", "b"])
    with pytest.raises(Unavailable):
        await store(ResponseError("CLUSTERDOWN the cluster is down")).states(["a"])


async def test_mark_of_a_session_that_cannot_be_read_is_kept() -> None:
    marks = store([packed(Status.OK, 3, cancelled=True)], AWAY, [packed(Status.UNKNOWN, 0)])
    assert await marks.marked(OWNER, ["a", "b", "c"]) == ["a"]
    assert marks.owners.forgotten == ["c"]  # type: ignore[attr-defined]
