"""One session on the wire: calls to one gateway after the other, one sequence of events."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from typing import Any

import grpc.aio
from google.protobuf.message import DecodeError
from grpc.aio import EOF  # type: ignore[attr-defined]  # the stubs lack it

from hedgerow.client import _convert, _trace
from hedgerow.client._gateways import Gateways
from hedgerow.client._order import Order
from hedgerow.client._retry import Patience
from hedgerow.client._status import is_gone, never_sent
from hedgerow.client._types import Event, Finished, Position, Started
from hedgerow.errors import (
    Cancelled,
    DeadlineExceeded,
    HedgerowError,
    Internal,
    Overloaded,
    SessionFailed,
    Unavailable,
)  # fmt: skip
from hedgerow.v1 import gateway_pb2 as pb

FAREWELL = 5.0
"""Seconds that leaving a session may take in the background: to learn its id, and then to cancel it."""
LEAVE = 1.0
"""Seconds for which whoever leaves waits for that."""
TRAILER = 1.0
"""Seconds that the status behind the last event may take; the answer is complete without it."""


class Wire:
    """What a stream reads from. Belongs to the event loop that reads first.

    `asked` is how the session begins: a GenerateRequest, which this keeps and may send again, or a ResumeRequest.
    `timeout`, in seconds from the first read, covers everything.
    """

    def __init__(
        self,
        gateways: Gateways,
        asked: pb.GenerateRequest | pb.ResumeRequest,
        *,
        timeout: float | None = None,
        leave_running: bool = False,
        tenant: str = "",
    ) -> None:
        self.leave_running = leave_running
        self._trace = _trace.context()  # of whoever asks: who reads may be in another one
        self.loop: asyncio.AbstractEventLoop | None = None
        self._gateways, self._timeout, self._tenant, self._detach = gateways, timeout, tenant, asked.detach
        if isinstance(asked, pb.GenerateRequest):
            self._asked: pb.GenerateRequest | None = asked
            self._own_key = not asked.idempotency_key
            asked.idempotency_key = asked.idempotency_key or secrets.token_hex(16)
            self._deadline_ms = asked.deadline_ms
            self.order = Order(Position(""))
        else:
            self._asked, self._own_key = None, False
            self.order = Order(Position(asked.session_id, asked.token_offset, asked.digest, asked.text_offset))
        self._call: grpc.aio.UnaryStreamCall[Any, Any] | None = None
        self._first: asyncio.Task[Any] | None = None  # the read that will tell which session it is
        self._address, self._began = "", 0.0
        self._patience, self._tries, self._may_have_begun = Patience(gateways.retry), 0, False
        self._refusals, self._call_began = Patience(gateways.retry), False
        self._lost: HedgerowError | None = None
        self._asked_again = self._anew = False
        self.position = self.order.position
        self._ready: list[tuple[Event, Position]] = []
        self._waiting: tuple[Event, Position] | None = None
        self._left, self._over = asyncio.Event(), False
        self._why: Cancelled | None = None
        self._farewell: asyncio.Task[None] | None = None

    # ---- reading

    async def next(self) -> Event | None:
        """The next event; None after the last, and once the stream was left. Goes on at another gateway by itself."""
        task = asyncio.current_task()
        cancels = task.cancelling() if task else 0
        while not self._left.is_set() and (self._ready or not self.order.finished):
            try:
                return await self._next()
            except asyncio.CancelledError:
                if not self._left.is_set() or (task and task.cancelling() > cancels):
                    await self.leave()
                    raise  # else it was the call that was cancelled, by whoever left
            except BaseException:
                self._end()
                raise
        if self._why is not None and not self.order.finished:
            raise self._why
        return None

    async def _next(self) -> Event | None:
        if self._over and not self._ready:
            raise Cancelled("the stream has failed; `client.resume(*stream.position)` goes on with its session")
        while not self._ready and not self._left.is_set():
            try:
                await self._receive()
            except HedgerowError as error:
                await self._recover(error)
        if not self._ready:
            return None
        event, self.position = self._ready.pop(0)
        return event

    async def _receive(self) -> None:
        event = await self._read()
        if event is None:
            return
        self._call_began = True
        if isinstance(event, Started) and self._lost is not None:
            self._go_on_in(event)
        if not self.order.take(event):
            return
        self._patience.progress()
        known = (event, self.order.position)
        if isinstance(event, Started) and self._tries and self._asked is not None:
            self._waiting = known  # a key that is sent again may name a session that has failed
            return
        self._ready += [known] if self._waiting is None else [self._waiting, known]
        self._waiting, self._tries = None, 0
        if isinstance(event, Finished):
            self._end()

    async def _read(self) -> Event | None:
        call = self._call or self._open()
        try:
            if self.order.position.session_id:
                answer: Any = await call.read()
            else:
                # To cancel a read cancels its call, and whoever leaves must still learn what session to cancel.
                self._first = self._first or asyncio.ensure_future(call.read())
                answer = await asyncio.shield(self._first)
        except grpc.aio.AioRpcError as failed:
            raise self._gateways.decode(failed, self._address, self._timeout) from None
        except DecodeError as error:
            raise Internal(f"gateway at {self._address}: an answer that cannot be read: {error}") from None
        if answer is EOF:
            raise Unavailable(f"gateway at {self._address}", "the stream ended without its last event", 0.0)
        event = _convert.event(answer.event)
        if isinstance(event, Finished):
            with contextlib.suppress(grpc.aio.AioRpcError, TimeoutError):
                async with asyncio.timeout(TRAILER):
                    await call.read()
        return event

    def _open(self) -> grpc.aio.UnaryStreamCall[Any, Any]:
        self._gateways.check_open()
        now = asyncio.get_running_loop().time()
        if self.loop is None:
            self.loop, self._began = asyncio.get_running_loop(), now
            self._address = self._gateways.next()
        left = self._seconds_left(now)
        if left is not None and left <= 0:
            raise DeadlineExceeded(f"no end within {self._timeout:g} s", metadata={"timeout": self._timeout})
        self._gateways.streams[self] = None
        stub, metadata = self._gateways.stub(self._address), self._gateways.metadata(self._tenant, self._trace)
        if self._asked is None or (self.order.position.session_id and self._lost is None):
            at = self.order.position
            resume = pb.ResumeRequest(
                session_id=at.session_id, token_offset=at.token_offset, digest=at.digest, text_offset=at.text_offset,
                detach=self._detach,
            )  # fmt: skip
            self._call = stub.Resume(resume, timeout=left, metadata=metadata)
        else:
            if self._deadline_ms:
                self._asked.deadline_ms = max(1, self._deadline_ms - int((now - self._began) * 1000))
            self._call = stub.Generate(self._asked, timeout=left, metadata=metadata)
        assert self._call is not None
        self._call_began = False
        return self._call

    def _seconds_left(self, now: float) -> float | None:
        return None if self._timeout is None else self._began + self._timeout - now

    # ---- going on

    async def _recover(self, error: HedgerowError) -> None:
        """Wait until it is time for another try; raises `error` where there is none."""
        self._drop_call()
        if self._starts_anew(error) or self._asks_again(error):
            return
        now = asyncio.get_running_loop().time()
        if isinstance(error, Overloaded) and self._call_began and self._asked is not None and self.order.fresh:
            await self._come_again(error, now)
            return
        self._gateways.failed(self._address, error)
        self._tries += 1
        # A call whose connection broke while it waited may have begun a session: its key finds it.
        self._may_have_begun = self._may_have_begun or not ("reason" in error.metadata or never_sent(error))
        begun, others = self._may_have_begun or bool(self.order.position.session_id), len(self._gateways.addresses) - 1
        delay = self._patience.delay(error, now, begun=begun, others=others)
        await self._wait(delay, error, now)

    async def _wait(self, delay: float | None, error: HedgerowError, now: float) -> None:
        """Until it is time for another try, at the next gateway; raises `error` where there is none."""
        left = self._seconds_left(now)
        if delay is None or (left is not None and delay >= left):
            raise error
        self._address = self._gateways.next(self._address)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay):
                await self._left.wait()

    async def _come_again(self, error: Overloaded, now: float) -> None:
        """The session began, found no place and is over. A key of ours is not used again: older gateways refuse it."""
        self.order, self._waiting, self._may_have_begun = Order(Position("")), None, False
        self.position = self.order.position
        await self._wait(self._refusals.delay(error, now, begun=False), error, now)
        assert self._asked is not None
        if self._own_key:
            self._asked.idempotency_key = secrets.token_hex(16)

    def _starts_anew(self, error: HedgerowError) -> bool:
        """Its session had failed before it gave a token, and why was lost on the way: asked again it is told. Once."""
        if not (isinstance(error, SessionFailed) and self._asked and self._tries and self.order.fresh) or self._anew:
            return False
        if self._own_key:
            self._asked.idempotency_key = secrets.token_hex(16)
        self.order, self._waiting, self._anew = Order(Position("")), None, True
        self.position = self.order.position
        return True

    def _asks_again(self, error: HedgerowError) -> bool:
        """The store has lost a session with its prompt: the same request makes the same one, token for token. Once."""
        begun = self.order.started is not None and self._tries > 0
        if not (is_gone(error) and begun and self._asked and self._detach) or self._asked_again:
            return False
        self._lost, self._asked_again = error, True
        return True

    def _go_on_in(self, event: Started) -> None:
        """The session is there again: go on where the stream was, which the gateway checks by the digest there.

        Raises what led to this where it is another session: that gateway derives other ids from keys.
        """
        lost, self._lost = self._lost, None
        if event.session_id != self.order.position.session_id:
            self._gateways.later(self._cancel(event.session_id))
            assert lost is not None
            raise lost
        if not self.order.fresh:
            self._drop_call()

    # ---- leaving

    def leave_soon(self, why: Cancelled | None = None) -> asyncio.Task[None] | None:
        """Ends the stream, and its session unless that has ended or is to go on; the task that does it, if any.

        `why` is raised where somebody reads it still.
        """
        if not self._left.is_set():
            self._why = why
        self._left.set()
        if self._farewell is None and not self._over and self.loop is not None:
            self._farewell = self._gateways.later(self._say_farewell())
        return self._farewell

    async def leave(self) -> None:
        """As `leave_soon`, and waits for it for a while."""
        if (task := self.leave_soon()) is not None:
            await asyncio.wait([task], timeout=LEAVE)

    async def _say_farewell(self) -> None:
        try:
            session_id = self.order.position.session_id or await self._session_begun()
            if self._call is not None:
                self._call.cancel()
            if session_id and not self.leave_running:
                await self._cancel(session_id)
        finally:
            self._end()

    async def _session_begun(self) -> str:
        """The id of a session that has been asked for; empty where it is not told in time."""
        if self._first is not None:
            with contextlib.suppress(grpc.aio.AioRpcError, TimeoutError):
                async with asyncio.timeout(FAREWELL):
                    answer = await self._first
                    return "" if answer is EOF else str(answer.event.started.session_id)
        return ""

    async def _cancel(self, session_id: str) -> None:
        """Where it cannot be told, the gateway pauses what nobody reads."""
        request = pb.CancelRequest(session_id=session_id)
        with contextlib.suppress(HedgerowError):
            await self._gateways.ask("Cancel", request, FAREWELL, tenant=self._tenant, first=self._address)

    def _drop_call(self) -> None:
        if self._call is not None:
            self._call.cancel()
        self._call = self._first = None

    def _end(self) -> None:
        """Nothing is left to be done."""
        self._over = True
        self._drop_call()
        self._gateways.streams.pop(self, None)
