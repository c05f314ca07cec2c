"""KvStoreService over gRPC: convert, one call of the store, convert."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc.aio

from hedgerow.errors import Unavailable
from hedgerow.rpc.logs import bind
from hedgerow.rpc.streams import until
from hedgerow.rpc.trace_export import LINKS
from hedgerow.v1 import kvstore_pb2 as pb
from hedgerow.v1 import kvstore_pb2_grpc
from services.kvstore import convert, spans
from services.kvstore.cancels import CancelWatch
from services.kvstore.config import KvStoreConfig
from services.kvstore.metrics import AppendMetrics
from services.kvstore.prefixes import Prefixes
from services.kvstore.store import Store
from services.kvstore.tail import Followers

SERVICE = "hedgerow.v1.KvStoreService"
ALL_CHUNKS = 2**31 - 1
Context = grpc.aio.ServicerContext[Any, Any]


class KvStoreServicer(kvstore_pb2_grpc.KvStoreServiceServicer):
    """`draining` ends the streams that peers hold open for ever."""

    def __init__(
        self,
        config: KvStoreConfig,
        store: Store,
        followers: Followers,
        cancels: CancelWatch,
        prefixes: Prefixes,
        draining: asyncio.Event,
    ) -> None:
        self.config, self.store, self.followers = config, store, followers
        self.cancels, self.prefixes, self.draining = cancels, prefixes, draining
        self.metrics = AppendMetrics()

    def register(self, server: grpc.aio.Server) -> None:
        """Serve this on `server`."""
        kvstore_pb2_grpc.add_KvStoreServiceServicer_to_server(self, server)  # type: ignore[no-untyped-call]

    async def CreateSession(self, request: pb.CreateSessionRequest, context: Context) -> pb.CreateSessionResponse:
        """Writes the record and grants epoch 1."""
        return convert.create_response(await self.store.create(convert.new_session(request, self.config)))

    async def AcquireLease(self, request: pb.AcquireLeaseRequest, context: Context) -> pb.AcquireLeaseResponse:
        """Grants max(stored epoch, floor) + 1; writes what the store has lost."""
        answer = await self.store.acquire(
            convert.session_id(request.session_id),
            convert.owner("owner", request.owner),
            convert.epoch_floor(request.epoch_floor),
            convert.optional_mark("birth", request.birth),
            only_expired=request.only_expired,
            lost=convert.lost_session(request, self.config),
        )
        return pb.AcquireLeaseResponse(lease=convert.lease_of(answer.state), state=convert.state(answer.state))

    async def RenewOwner(self, request: pb.RenewOwnerRequest, context: Context) -> pb.RenewOwnerResponse:
        """Keeps every lease of one owner."""
        owner, ttl = convert.owner("owner", request.owner), convert.owner_ttl(request.ttl_ms)
        return pb.RenewOwnerResponse(cancelled_sessions=await self.store.renew(owner, ttl))

    async def ReleaseLease(self, request: pb.ReleaseLeaseRequest, context: Context) -> pb.ReleaseLeaseResponse:
        """Gives one lease up."""
        lease, birth = convert.lease(request.lease), convert.mark("birth", request.birth)
        state = await self.store.release(convert.session_id(request.session_id), lease, birth)
        return pb.ReleaseLeaseResponse(state=convert.state(state))

    async def ListExpired(self, request: pb.ListExpiredRequest, context: Context) -> pb.ListExpiredResponse:
        """Running sessions that nobody drives."""
        limit = convert.expired_limit(request.limit)
        return convert.expired_response(*await self.store.index.expired(limit, request.cursor))

    async def ListSessions(
        self, request: pb.KvStoreServiceListSessionsRequest, context: Context
    ) -> pb.KvStoreServiceListSessionsResponse:
        """A tenant's sessions that are retained."""
        limit = convert.listing_limit(request.limit)
        found, cursor = await self.store.index.listing.sessions(request.tenant, limit, request.cursor)
        response = pb.KvStoreServiceListSessionsResponse(cursor=cursor)
        for each in found:
            summary = pb.SessionSummary.FromString(each.summary)
            response.sessions.add(summary=summary, state=convert.state(each.state), owner_lives=each.owner_lives)
        return response

    async def WatchCancels(
        self, request: pb.WatchCancelsRequest, context: Context
    ) -> AsyncIterator[pb.WatchCancelsResponse]:
        """Cancel marks as they are written."""
        async with aclosing(self.cancels.follow(convert.owner("owner", request.owner))) as marks:
            async for session_ids in marks:
                yield pb.WatchCancelsResponse(session_ids=session_ids)

    async def Append(
        self, requests: AsyncIterator[pb.AppendRequest], context: Context
    ) -> AsyncIterator[pb.AppendResponse]:
        """One message after the other, so that a session's appends keep their order."""
        async with aclosing(until(self.draining, requests)) as messages:
            async for request in messages:
                entries = convert.entries(request, self.config)
                bind(**spans.named([each.traceparent for each in request.traces]))
                begun = time.perf_counter()
                answers = await self.store.append(entries)
                took = time.perf_counter() - begun
                self.metrics.count(entries, answers, took)
                if request.traces:
                    spans.appended([each.traceparent for each in request.traces[:LINKS]], entries, answers, took)
                yield convert.append_response(request.batch_id, entries, answers)
        if self.draining.is_set():
            raise Unavailable("kvstore", "it is draining; append again elsewhere", retry_after=0.0)

    async def GetSession(
        self, request: pb.KvStoreServiceGetSessionRequest, context: Context
    ) -> pb.KvStoreServiceGetSessionResponse:
        """A session at one moment."""
        chunks = 0 if request.state_only else ALL_CHUNKS
        session_id, start = convert.session_id(request.session_id), convert.offset("from_offset", request.from_offset)
        durable = chunks > 0 and start < convert.MOST_OFFSET  # else no token is told
        session = await self.store.read(session_id, start, chunks=chunks, record=True, durable=durable)
        return convert.session_response(session, state_only=request.state_only)

    async def Tail(self, request: pb.TailRequest, context: Context) -> AsyncIterator[pb.TailResponse]:
        """Committed tokens as they come."""
        session_id, start = convert.session_id(request.session_id), convert.offset("from_offset", request.from_offset)
        async with aclosing(self.followers.follow(session_id, start)) as growths:
            async for growth in growths:
                yield convert.tail_response(growth)

    async def CloseSession(self, request: pb.CloseSessionRequest, context: Context) -> pb.CloseSessionResponse:
        """Ends a session without tokens."""
        state = await self.store.close(
            convert.session_id(request.session_id),
            convert.lease(request.lease),
            convert.mark("birth", request.birth),
            convert.finish_reason(request.finish_reason, required=True),
            request.usage.SerializeToString(),
        )
        return pb.CloseSessionResponse(state=convert.state(state))

    async def MarkCancel(self, request: pb.MarkCancelRequest, context: Context) -> pb.MarkCancelResponse:
        """Writes the mark that the owner sees."""
        was_running, owner = await self.store.mark_cancel(convert.session_id(request.session_id))
        return pb.MarkCancelResponse(was_running=was_running, owner=owner)

    async def DeleteSession(
        self, request: pb.KvStoreServiceDeleteSessionRequest, context: Context
    ) -> pb.KvStoreServiceDeleteSessionResponse:
        """Removes prompt and tokens."""
        birth = convert.optional_mark("birth", request.birth)
        existed = await self.store.delete(convert.session_id(request.session_id), birth)
        return pb.KvStoreServiceDeleteSessionResponse(existed=existed)

    async def PutPrefixes(self, request: pb.PutPrefixesRequest, context: Context) -> pb.PutPrefixesResponse:
        """Records what a verifier holds."""
        blocks = convert.blocks(request.block_hashes, self.config)
        await self.prefixes.put(convert.verifier(request.verifier), blocks, convert.prefix_ttl(request.ttl_ms))
        return pb.PutPrefixesResponse()

    async def FindPrefix(self, request: pb.FindPrefixRequest, context: Context) -> pb.FindPrefixResponse:
        """Who holds most of a prompt."""
        holders = await self.prefixes.find(convert.blocks(request.block_hashes, self.config))
        return pb.FindPrefixResponse(holders=[pb.PrefixHolder(verifier=h.verifier, blocks=h.blocks) for h in holders])
