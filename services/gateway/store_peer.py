"""The store over gRPC: its one Append stream; store_calls.py has the other calls. See peers.py."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import grpc.aio
from grpc.aio import EOF  # type: ignore[attr-defined]  # the stubs lack it

from hedgerow.certificates import Watched
from hedgerow.errors import HedgerowError, InvariantViolation, Unavailable
from hedgerow.rpc.logs import get_log
from hedgerow.v1 import kvstore_pb2 as kv
from services.gateway import convert_store
from services.gateway.messages import Append, Appended
from services.gateway.outbox import Outbox
from services.gateway.peers import FIRST_DELAY, LAST_DELAY, Report, ended
from services.gateway.store_calls import ANSWER, StoreCalls, unreachable

IN_FLIGHT = 2  # messages to the store without an answer
LEASE = 4.0  # seconds that this gateway's leases outlive its last renewal
log = get_log(__name__)


class _Sent(NamedTuple):
    """A message that the store has not answered."""

    entries: Sequence[Append]
    at: float  # time.monotonic() of its first sending


class StorePeer(StoreCalls):
    """The store. What waits while IN_FLIGHT messages are on their way goes out as one: a slow store gets fewer, larger
    messages. Those that were not answered when the stream broke are sent again: each entry names its offset. So is, up
    to `patience` seconds, what the store answered that it cannot take now. An append without an answer for `answer`
    seconds, at most `patience`, is sent again over another stream, to the next replica if there is one.
    """

    def __init__(
        self,
        addresses: str,
        owner: bytes,
        patience: float,
        report: Report,
        lease: float = LEASE,
        tls: Watched | None = None,
        answer: float = ANSWER,
    ) -> None:
        super().__init__(addresses, owner, lease, tls=tls, answer=answer)
        self._patience, self._report, self._overdue = patience, report, min(patience, answer)
        self.messages_sent = self._resent = 0
        self.traced: Callable[[int, Sequence[Append]], Sequence[str]] = lambda number, entries: ()
        """The requests, as traceparents, to which the store's span of a message links."""
        self._outbox = Outbox(patience)
        self._unanswered: dict[int, _Sent] = {}  # by batch, the oldest first
        self._opened = 0.0  # time.monotonic() of the stream
        self._deadline: asyncio.Timeout | None = None  # of the answer to the oldest, while a stream is open
        self._away_since: float | None = None  # since when a broken stream leaves appends without an answer
        self._wake = asyncio.Event()

    @property
    def unanswered(self) -> int:
        """Entries that the store has not answered."""
        return len(self._outbox)

    @property
    def resent(self) -> int:
        """Entries that were sent again, since the start."""
        return self._outbox.resent + self._resent

    def append(self, entries: Sequence[Append]) -> None:
        """See ports.Store."""
        self._outbox.add(entries)
        self._wake.set()

    def forget(self, session_id: str) -> None:
        """See ports.Store."""
        self._outbox.forget(session_id)

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

    async def _exchange(self, appended: Callable[[Sequence[Appended]], None]) -> None:
        at, self._opened = self._at, time.monotonic()
        call = self._stub.Append()
        writer = asyncio.create_task(self._write(call))
        try:
            async with asyncio.timeout(None) as self._deadline:
                await self._read(call, appended)
        except TimeoutError:
            self._move_on(at)
            raise Unavailable("kvstore", f"no answer to an append within {self._overdue:g} s") from None
        except (grpc.aio.AioRpcError, HedgerowError):
            self._move_on(at)
            raise
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
            passed = self._outbox.answered(self._unanswered[message.batch_id].entries, convert_store.appended(message))
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
        left = None if oldest is None else max(oldest.at, self._opened) + self._overdue - time.monotonic()
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
                self._resent += len(sent.entries)
                await call.write(convert_store.append(batch_id, sent.entries, self.owner))
            while True:
                while len(self._unanswered) < IN_FLIGHT and (entries := self._outbox.take()):
                    self.messages_sent += 1
                    self._unanswered[self.messages_sent] = _Sent(entries, time.monotonic())
                    self._set_deadline()
                    traced = self.traced(self.messages_sent, entries)
                    await call.write(convert_store.append(self.messages_sent, entries, self.owner, traced))
                self._wake.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._outbox.due() if len(self._unanswered) < IN_FLIGHT else None):
                        await self._wake.wait()
