"""What a gateway would send to the kvstore, and a session as the gateway remembers it."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc.aio
import pytest

from hedgerow.errors import HedgerowError
from hedgerow.rpc import status
from hedgerow.rpc.channel import open_channel
from hedgerow.v1 import common_pb2, kvstore_pb2_grpc
from hedgerow.v1 import kvstore_pb2 as pb

MARK = 16
T = TypeVar("T")


def first_digest(session_id: str, prompt: Sequence[int]) -> bytes:
    """d(0) = SHA-256(session id, prompt ids as uint32 little-endian), 16 bytes."""
    return hashlib.sha256(session_id.encode() + struct.pack(f"<{len(prompt)}I", *prompt)).digest()[:MARK]


def next_digest(digest: bytes, token: int) -> bytes:
    """d(i+1) = SHA-256(d(i), token i), 16 bytes."""
    return hashlib.sha256(digest + struct.pack("<I", token)).digest()[:MARK]


@dataclass
class Session:
    """A session, its lease, and the whole log that its owner would like to commit."""

    prompt: Sequence[int] = (1, 2, 3)
    session_id: str = field(default_factory=lambda: secrets.token_hex(16))
    birth: bytes = field(default_factory=lambda: secrets.token_bytes(MARK))
    owner: bytes = field(default_factory=lambda: secrets.token_bytes(MARK))
    epoch: int = 1

    def digests(self, tokens: Sequence[int]) -> list[bytes]:
        """d(0) to d(len(tokens))."""
        chain = [first_digest(self.session_id, self.prompt)]
        for token in tokens:
            chain.append(next_digest(chain[-1], token))
        return chain

    def creation(self, ttl_ms: int = 0) -> pb.CreateSessionRequest:
        """The request that creates it."""
        record = pb.SessionRecord(
            session_id=self.session_id, birth=self.birth, model="sapling", tenant="t", prompt=self.prompt, detach=True
        )
        return pb.CreateSessionRequest(record=record, owner=self.owner, digest=self.digests([])[0], ttl_ms=ttl_ms)

    def entry(self, log: Sequence[int], offset: int, end: int | None = None, **fields: Any) -> pb.AppendEntry:
        """The append of log[offset:end]; `fields` replace what it would say."""
        end = len(log) if end is None else end
        chain = self.digests(log[:end])
        entry = pb.AppendEntry(
            session_id=self.session_id,
            lease=common_pb2.Lease(epoch=self.epoch, owner=self.owner),
            birth=self.birth,
            offset=offset,
            tokens=log[offset:end],
            digest_before=chain[offset],
            digest_after=chain[end],
        )
        entry.MergeFrom(pb.AppendEntry(**fields))
        return entry


class Gateway:
    """Calls of one gateway on one kvstore."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.stub = kvstore_pb2_grpc.KvStoreServiceStub(channel)  # type: ignore[no-untyped-call]
        self._append: Any = None
        self._batch = 0

    async def create(self, session: Session, **options: int) -> Session:
        """Create it, and check that it was."""
        response = await self.stub.CreateSession(session.creation(**options))
        assert response.created
        assert response.lease == common_pb2.Lease(epoch=1, owner=session.owner)
        return session

    async def append(self, *entries: pb.AppendEntry) -> list[pb.AppendResult]:
        """One message on this gateway's stream, and its results."""
        if self._append is None:
            self._append = self.stub.Append()
        self._batch += 1
        try:
            await self._append.write(pb.AppendRequest(batch_id=self._batch, entries=entries))
            response = await self._append.read()
        except grpc.aio.AioRpcError:
            self._append = None
            raise
        assert response.batch_id == self._batch
        assert [result.session_id for result in response.results] == [entry.session_id for entry in entries]
        return list(response.results)

    async def status(self, entry: pb.AppendEntry) -> tuple[str, pb.SessionState]:
        """One entry: the status' name without its prefix, and the state."""
        (result,) = await self.append(entry)
        return pb.AppendStatus.Name(result.status).removeprefix("APPEND_STATUS_"), result.state

    async def get(self, session: Session, from_offset: int = 0) -> pb.KvStoreServiceGetSessionResponse:
        """What is stored."""
        request = pb.KvStoreServiceGetSessionRequest(session_id=session.session_id, from_offset=from_offset)
        answer: pb.KvStoreServiceGetSessionResponse = await self.stub.GetSession(request)
        return answer

    def close(self) -> None:
        """Give the stream up."""
        if self._append is not None:
            self._append.cancel()


async def error_of(call: Awaitable[Any]) -> HedgerowError:
    """The error that a call ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return status.from_rpc_error(raised.value)


async def outcome_of(call: Awaitable[Any]) -> Any:
    """What a call answers, or its error."""
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        return status.from_rpc_error(error)


async def soon_it_is(kind: type[T], call: Callable[[], Awaitable[Any]], seconds: float = 10) -> T:
    """Repeat a call until its outcome is of this kind."""
    async with asyncio.timeout(seconds):
        while True:
            outcome = await outcome_of(call())
            if isinstance(outcome, kind):
                return outcome


@asynccontextmanager
async def gateway_on(port: int) -> AsyncIterator[Gateway]:
    """A gateway's connection to the kvstore on this port."""
    async with open_channel(f"127.0.0.1:{port}", max_backoff=0.2) as channel:
        gateway = Gateway(channel)
        try:
            yield gateway
        finally:
            gateway.close()
