"""The store's calls that are no appends, over gRPC. Its Append stream is in store_peer.py."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import grpc.aio

from hedgerow import digest
from hedgerow.certificates import Watched
from hedgerow.errors import DeadlineExceeded, HedgerowError, Unavailable
from hedgerow.rpc.channel import open_channel
from hedgerow.rpc.logs import get_log
from hedgerow.rpc.status import from_rpc_error
from hedgerow.v1 import common_pb2 as common
from hedgerow.v1 import kvstore_pb2 as kv
from hedgerow.v1.kvstore_pb2_grpc import KvStoreServiceStub
from services.gateway import convert, convert_store
from services.gateway.config import addresses as split
from services.gateway.messages import Created, ExpiredPage, Granted, Growth, Listed, State, Stored, Usage
from services.gateway.types import NO_TRACE, Finish, Record, Trace

ANSWER = 5.0  # seconds for one replica's answer, to a call or an append
Answer = TypeVar("Answer")
log = get_log(__name__)


class _Replica(NamedTuple):
    address: str
    channel: grpc.aio.Channel
    stub: KvStoreServiceStub


class StoreCalls:
    """One of the kvstore's replicas, all before one Redis; when it does not answer, the next.

    `addresses` are comma-separated, `lease` are the seconds that this owner's leases outlive its last renewal,
    `retention` those for which a session is kept after its last append (0: the store's default), `answer` those that
    one replica has for a call. Every method raises what the store refuses, and Unavailable where no replica or no Redis
    answers.
    """

    def __init__(
        self,
        addresses: str,
        owner: bytes,
        lease: float,
        retention: float = 0.0,
        tls: Watched | None = None,
        answer: float = ANSWER,
    ) -> None:
        self.owner, self.lease, self.retention, self._answer = owner, lease, retention, answer
        self._replicas = [_replica(address, tls) for address in split(addresses)]
        self._at = self.moves = 0  # `moves`: times that a replica did not answer and the next was taken

    @property
    def address(self) -> str:
        """The replica in use."""
        return self._replicas[self._at].address

    async def close(self) -> None:
        """Close the connections."""
        for replica in self._replicas:
            await replica.channel.close(None)

    async def renew(self) -> Sequence[str]:
        """Keep this gateway's leases; gives the sessions that somebody wants cancelled."""
        request = kv.RenewOwnerRequest(owner=self.owner, ttl_ms=int(self.lease * 1000))
        answer: kv.RenewOwnerResponse = await self._ask("RenewOwner", request, self.lease / 2)
        return answer.cancelled_sessions

    async def create(self, record: Record, digest: bytes, replaces: bytes = b"") -> Created:
        """Write a session's record, or find what is there. Asked again, the store knows the same creation by its birth:
        another one of this id is an existing session, though it were this gateway's own that was given up. The one of
        the birth mark `replaces` gives way if it has ended with an error before its first token.
        """
        request = kv.CreateSessionRequest(
            record=convert_store.record_pb(record), owner=self.owner, digest=digest, ttl_ms=self._retention_ms,
            replaces=replaces,
        )  # fmt: skip
        return convert_store.created(await self._ask("CreateSession", request, trace=record.trace))

    async def get(self, session_id: str, from_offset: int = 0) -> Stored:
        """Read a session. Raises NotFound."""
        request = kv.KvStoreServiceGetSessionRequest(session_id=session_id, from_offset=from_offset)
        answer = await self._ask("GetSession", request)
        stored, notes = convert_store.stored(answer), convert_store.notes(answer.steps)
        while answer.more_steps_from:
            request.from_offset = answer.more_steps_from
            answer = await self._ask("GetSession", request)
            notes += convert_store.notes(answer.steps)
        end = from_offset + len(stored.tokens)  # the log may have grown between two answers
        return stored._replace(notes=[note for note in notes if note.end <= end])

    async def mark_cancel(self, session_id: str) -> bool:
        """Ask whoever owns the session to end it; False: it had ended. Raises NotFound."""
        answer: kv.MarkCancelResponse = await self._ask("MarkCancel", kv.MarkCancelRequest(session_id=session_id))
        return answer.was_running

    @property
    def _retention_ms(self) -> int:
        return int(self.retention * 1000)

    async def acquire(
        self, record: Record, *, floor: int = 0, repair: bool = False, only_expired: bool = True
    ) -> Granted:
        """Take a session: the grant's epoch is above `floor` and above every epoch that the store knows.

        `only_expired`: raises Fenced while its owner lives. `repair`: this gateway's record is written again where the
        store has neither record nor tombstone. Raises NotFound.
        """
        request = kv.AcquireLeaseRequest(
            session_id=record.session_id, owner=self.owner, birth=record.birth, epoch_floor=floor,
            only_expired=only_expired,
        )  # fmt: skip
        if repair:
            request.record.CopyFrom(convert_store.record_pb(record))
            request.digest, request.ttl_ms = digest.first(record.session_id, record.prompt), self._retention_ms
        return convert_store.granted(await self._ask("AcquireLease", request, trace=record.trace))

    async def release(self, record: Record, epoch: int) -> State:
        """Give a lease up, so that another gateway may take the session at once. Raises Fenced, NotFound."""
        lease = common.Lease(epoch=epoch, owner=self.owner)
        request = kv.ReleaseLeaseRequest(session_id=record.session_id, lease=lease, birth=record.birth)
        answer: kv.ReleaseLeaseResponse = await self._ask("ReleaseLease", request)
        return convert_store.state(answer.state)

    async def expired(self, cursor: str = "", limit: int = 0) -> ExpiredPage:
        """Running sessions that nobody drives, a page of at most `limit` (0: the store's own) after `cursor`."""
        return convert_store.expired(await self._ask("ListExpired", kv.ListExpiredRequest(cursor=cursor, limit=limit)))

    async def listed(self, tenant: str, limit: int, cursor: str) -> tuple[list[Listed], str]:
        """A tenant's sessions that are retained, the newest first, and the next cursor; "": that was all."""
        request = kv.KvStoreServiceListSessionsRequest(tenant=tenant, limit=limit, cursor=cursor)
        return convert_store.listed(await self._ask("ListSessions", request))

    async def watch_cancels(self) -> AsyncGenerator[Sequence[str], None]:
        """This owner's sessions that carry a cancel mark, as marks are written; those from before come at once."""
        request = kv.WatchCancelsRequest(owner=self.owner)
        with self._following():
            call = self._stub.WatchCancels(request)
            try:
                async for message in call:
                    yield message.session_ids
            finally:
                call.cancel()

    async def tail(self, session_id: str, from_offset: int) -> AsyncGenerator[Growth, None]:
        """A session's tokens from an offset on, as they are committed, until its end. Raises NotFound."""
        request = kv.TailRequest(session_id=session_id, from_offset=from_offset)
        with self._following():
            call = self._stub.Tail(request)
            try:
                async for message in call:
                    yield convert_store.growth(message)
            finally:
                call.cancel()  # a stream that is merely left is never ended

    async def end(self, record: Record, epoch: int, finish: Finish, usage: Usage) -> State:
        """Record an end without tokens; what is recorded then: an earlier end wins. Raises Fenced, NotFound, ..."""
        request = kv.CloseSessionRequest(
            session_id=record.session_id, lease=common.Lease(epoch=epoch, owner=self.owner), birth=record.birth,
            finish_reason=int(finish), usage=convert.usage_pb(usage),  # type: ignore[arg-type]
        )  # fmt: skip
        answer: kv.CloseSessionResponse = await self._ask("CloseSession", request)
        return convert_store.state(answer.state)

    async def delete(self, session_id: str, birth: bytes) -> bool:
        """Remove a session; False: there was none. Who knows its `birth` leaves a tombstone also where the store has
        forgotten it.
        """
        request = kv.KvStoreServiceDeleteSessionRequest(session_id=session_id, birth=birth)
        answer: kv.KvStoreServiceDeleteSessionResponse = await self._ask("DeleteSession", request)
        return answer.existed

    @property
    def _stub(self) -> Any:
        return self._replicas[self._at].stub

    def _move_on(self, at: int) -> None:
        """Replica `at` did not answer. Whoever else saw that may have moved on already."""
        if at == self._at and len(self._replicas) > 1:
            self.moves += 1
            self._at = (at + 1) % len(self._replicas)
            log.warning("a kvstore does not answer", address=self._replicas[at].address, next=self.address)

    async def _ask(self, method: str, request: Any, seconds: float | None = None, trace: Trace = NO_TRACE) -> Any:
        timeout = self._answer if seconds is None else seconds
        metadata = (("traceparent", trace.traceparent),) if trace.traceparent else None
        for tried in range(1, len(self._replicas) + 1):
            at = self._at
            try:
                return await getattr(self._stub, method)(request, timeout=timeout, metadata=metadata)
            except grpc.aio.AioRpcError as error:
                if is_silent(error):
                    self._move_on(at)
                    if tried < len(self._replicas):
                        continue
                raise unreachable("kvstore", error) from error
        raise AssertionError("there is at least one replica")

    @contextmanager
    def _following(self) -> Any:
        at = self._at
        try:
            yield
        except grpc.aio.AioRpcError as error:
            if is_silent(error):
                self._move_on(at)
            raise unreachable("kvstore", error) from error


def _replica(address: str, tls: Watched | None) -> _Replica:
    channel = open_channel(address, tls)
    return _Replica(address, channel, KvStoreServiceStub(channel))  # type: ignore[no-untyped-call]


def is_silent(error: grpc.aio.AioRpcError) -> bool:
    """Whether nobody answered: what a peer says itself has metadata. Its deadline is ours, never the caller's."""
    told = from_rpc_error(error)
    return isinstance(told, DeadlineExceeded) or (isinstance(told, Unavailable) and not told.metadata)


def unreachable(peer: str, error: grpc.aio.AioRpcError) -> HedgerowError:
    """What the peer said; where it said nothing, that it is not there."""
    told = from_rpc_error(error)
    return Unavailable(peer, told.message) if is_silent(error) else told
