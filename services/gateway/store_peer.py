"""The store over gRPC: one Append stream, and a call for everything else. See peers.py."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import grpc.aio
from grpc.aio import EOF  # type: ignore[attr-defined]  # the stubs lack it

from hedgerow.errors import HedgerowError, InvariantViolation, Unavailable
from hedgerow.rpc.channel import open_channel
from hedgerow.rpc.logs import get_log
from hedgerow.v1 import common_pb2 as common
from hedgerow.v1 import kvstore_pb2 as kv
from hedgerow.v1.kvstore_pb2_grpc import KvStoreServiceStub
from services.gateway import convert
from services.gateway.messages import Append, Appended, Created, State, Stored, Usage
from services.gateway.outbox import Outbox
from services.gateway.peers import FIRST_DELAY, LAST_DELAY, Report, ended, unreachable
from services.gateway.types import Finish, Record

IN_FLIGHT = 2  # messages to the store without an answer
LEASE_TTL = 15.0  # seconds that this gateway's leases outlive its last renewal
Answer = TypeVar("Answer")
log = get_log(__name__)


class _Sent(NamedTuple):
    """A message that the store has not answered."""

    entries: Sequence[Append]
    at: float  # time.monotonic() of its first sending


class StorePeer:
    """The store. What waits while IN_FLIGHT messages are on their way goes out as one: a slow store gets fewer, larger
    messages. Those that were not answered when the stream broke are sent again: each entry names its offset. So is, up
    to `patience` seconds, what the store answered that it cannot take now.
    """

    def __init__(self, address: str, owner: bytes, patience: float, report: Report) -> None:
        self.address, self.owner, self._patience, self._report = address, owner, patience, report
        self.messages_sent = 0
        self._channel = open_channel(address)
        self._stub = KvStoreServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._outbox = Outbox(patience)
        self._unanswered: dict[int, _Sent] = {}  # by batch, the oldest first
        self._deadline: asyncio.Timeout | None = None  # of the answer to the oldest, while a stream is open
        self._away_since: float | None = None  # since when a broken stream leaves appends without an answer
        self._wake = asyncio.Event()

    @property
    def unanswered(self) -> int:
        """Entries that the store has not answered."""
        return len(self._outbox)

    def append(self, entries: Sequence[Append]) -> None:
        """See table.Store."""
        self._outbox.add(entries)
        self._wake.set()

    async def run(self, appended: Callable[[Sequence[Appended]], None], lost: Callable[[HedgerowError], None]) -> None:
        """Keep a stream open, for ever. `lost` is called when the store has been away for too long."""
        delay = FIRST_DELAY
        while True:
            try:
                await self.renew()  # says whether the store is there; an idle stream does not
                self._report(None)
                delay = FIRST_DELAY
                await self._exchange(appended)
            except grpc.aio.AioRpcError as broken:
                error: HedgerowError = unreachable("kvstore", broken)
            except HedgerowError as wrong:
                error = wrong
            self._report(error.message)
            if self._is_lost():
                log.error("the store is lost", address=self.address, unanswered=self.unanswered)
                self._unanswered.clear()
                self._outbox.clear()
                lost(error)
            await asyncio.sleep(delay * random.uniform(0.5, 1.0))
            delay = min(2 * delay, LAST_DELAY)

    async def close(self) -> None:
        """Close the connection."""
        await self._channel.close(None)

    async def renew(self) -> Sequence[str]:
        """Keep this gateway's leases; gives the sessions that somebody wants cancelled. Raises Unavailable."""
        request = kv.RenewOwnerRequest(owner=self.owner, ttl_ms=int(LEASE_TTL * 1000))
        answer: kv.RenewOwnerResponse = await self._ask(self._stub.RenewOwner(request, timeout=LEASE_TTL / 3))
        return answer.cancelled_sessions

    async def create(self, record: Record, digest: bytes) -> Created:
        """Write a session's record, or find what is there. Raises Unavailable and what the store refuses."""
        request = kv.CreateSessionRequest(record=convert.record_pb(record), owner=self.owner, digest=digest)
        return convert.created(await self._ask(self._stub.CreateSession(request, timeout=self._patience)))

    async def get(self, session_id: str, from_offset: int = 0) -> Stored:
        """Read a session. Raises NotFound, Unavailable."""
        request = kv.KvStoreServiceGetSessionRequest(session_id=session_id, from_offset=from_offset)
        return convert.stored(await self._ask(self._stub.GetSession(request, timeout=self._patience)))

    async def mark_cancel(self, session_id: str) -> bool:
        """Ask whoever owns the session to end it; False: it had ended. Raises NotFound, Unavailable."""
        request = kv.MarkCancelRequest(session_id=session_id)
        answer: kv.MarkCancelResponse = await self._ask(self._stub.MarkCancel(request, timeout=self._patience))
        return answer.was_running

    async def acquire(self, record: Record) -> int:
        """Take a session whose owner is gone; the new epoch. Raises Fenced while it lives, NotFound, Unavailable."""
        request = kv.AcquireLeaseRequest(
            session_id=record.session_id, owner=self.owner, birth=record.birth, only_expired=True
        )
        answer: kv.AcquireLeaseResponse = await self._ask(self._stub.AcquireLease(request, timeout=self._patience))
        return answer.lease.epoch

    async def end(self, record: Record, epoch: int, finish: Finish, usage: Usage) -> State:
        """Record an end without tokens; what is recorded then: an earlier end wins. Raises Fenced, NotFound, ..."""
        request = kv.CloseSessionRequest(
            session_id=record.session_id, lease=common.Lease(epoch=epoch, owner=self.owner), birth=record.birth,
            finish_reason=int(finish), usage=convert.usage_pb(usage),  # type: ignore[arg-type]
        )  # fmt: skip
        answer: kv.CloseSessionResponse = await self._ask(self._stub.CloseSession(request, timeout=self._patience))
        return convert.state(answer.state)

    async def delete(self, session_id: str, birth: bytes) -> bool:
        """Remove a session; False: there was none. Who knows its `birth` leaves a tombstone also where the store has
        forgotten it. Raises Unavailable.
        """
        request = kv.KvStoreServiceDeleteSessionRequest(session_id=session_id, birth=birth)
        call = self._stub.DeleteSession(request, timeout=self._patience)
        answer: kv.KvStoreServiceDeleteSessionResponse = await self._ask(call)
        return answer.existed

    async def _ask(self, call: Awaitable[Answer]) -> Answer:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise unreachable("kvstore", error) from error

    async def _exchange(self, appended: Callable[[Sequence[Appended]], None]) -> None:
        call = self._stub.Append()
        writer = asyncio.create_task(self._write(call))
        try:
            async with asyncio.timeout(None) as self._deadline:
                await self._read(call, appended)
        except TimeoutError:
            raise Unavailable("kvstore", f"no answer to an append within {self._patience:g} s") from None
        finally:
            self._deadline = None
            call.cancel()
            await ended(writer)

    async def _read(self, call: Any, appended: Callable[[Sequence[Appended]], None]) -> None:
        self._set_deadline()
        while (message := await call.read()) is not EOF:
            oldest = next(iter(self._unanswered), None)
            if message.batch_id != oldest:
                raise InvariantViolation(f"kvstore answered batch {message.batch_id}, the oldest is {oldest}")
            passed = self._outbox.answered(self._unanswered[message.batch_id].entries, convert.appended(message))
            del self._unanswered[message.batch_id]
            self._away_since = None
            self._set_deadline()
            if self._outbox.due() is not None:
                self._wake.set()
            appended(passed)
        raise Unavailable("kvstore", "it ended the stream")

    def _set_deadline(self) -> None:
        """The oldest append's: a store that hangs keeps its connection, and nothing else would tell."""
        if self._deadline is None:
            return
        oldest = next(iter(self._unanswered.values()), None)
        left = None if oldest is None else oldest.at + self._patience - time.monotonic()
        self._deadline.reschedule(None if left is None else asyncio.get_running_loop().time() + left)

    def _is_lost(self) -> bool:
        """Whether appends have been without an answer for too long. Called when the stream broke."""
        if not self.unanswered:
            self._away_since = None
            return False
        now = time.monotonic()
        self._away_since = self._away_since or next((sent.at for sent in self._unanswered.values()), now)
        return now - self._away_since >= self._patience

    async def _write(self, call: grpc.aio.StreamStreamCall[kv.AppendRequest, kv.AppendResponse]) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the reader tells
            for batch_id, sent in list(self._unanswered.items()):
                await call.write(convert.append(batch_id, sent.entries, self.owner))
            while True:
                while len(self._unanswered) < IN_FLIGHT and (entries := self._outbox.take()):
                    self.messages_sent += 1
                    self._unanswered[self.messages_sent] = _Sent(entries, time.monotonic())
                    self._set_deadline()
                    await call.write(convert.append(self.messages_sent, entries, self.owner))
                self._wake.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._outbox.due() if len(self._unanswered) < IN_FLIGHT else None):
                        await self._wake.wait()
