"""A gateway of one's own: one Attach stream to a verifier, with nothing behind it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType

import grpc.aio

from hedgerow.v1 import common_pb2, verifier_pb2, verifier_pb2_grpc


class TestGateway:
    """Starts and cancels sequences, notes every message, and acknowledges what it gets if `acknowledge`."""

    __test__ = False

    def __init__(self, address: str, *, acknowledge: bool = True) -> None:
        self.acknowledge = acknowledge
        self.messages: list[verifier_pb2.AttachResponse] = []
        self.tokens: dict[str, list[int]] = {}
        self.last: dict[str, verifier_pb2.SequenceUpdate] = {}
        self.ended = asyncio.Event()
        self._channel = grpc.aio.insecure_channel(address)
        self.stub = verifier_pb2_grpc.VerifierServiceStub(self._channel)
        self._changed, self._writing = asyncio.Condition(), asyncio.Lock()

    async def __aenter__(self) -> TestGateway:
        self.call = self.stub.Attach(wait_for_ready=True)
        await self.write(verifier_pb2.AttachRequest(gateway=os.urandom(16)))
        hello = await self.call.read()
        assert len(hello.incarnation) == 16
        self._reading = asyncio.create_task(self._read())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.call.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        await self._channel.close()

    async def start(
        self,
        session: str,
        prompt: Sequence[int],
        sampling: common_pb2.SamplingParams,
        *,
        epoch: int = 1,
        attempt: int = 1,
        budget: int | None = None,
        deadline_ms: int = 0,
        committed: Sequence[int] = (),
        tenant: str = "",
    ) -> None:
        """Begins a sequence; the answers come by themselves."""
        speculation = common_pb2.SpeculationParams(budget=budget)
        start = verifier_pb2.StartSequence(
            session_id=session, epoch=epoch, attempt=attempt, prompt=prompt, sampling=sampling, speculation=speculation,
            deadline_ms=deadline_ms, committed=committed, tenant=tenant,
        )  # fmt: skip
        await self.write(verifier_pb2.AttachRequest(start=[start]))

    async def cancel(self, *sessions: str, epoch: int = 1, attempt: int = 1) -> None:
        """Ends sequences."""
        cancels = [verifier_pb2.CancelSequence(session_id=each, epoch=epoch, attempt=attempt) for each in sessions]
        await self.write(verifier_pb2.AttachRequest(cancel=cancels))

    async def commit(self, session: str, offset: int, attempt: int = 1) -> None:
        """Acknowledges tokens."""
        commit = verifier_pb2.CommittedOffset(session_id=session, epoch=1, attempt=attempt, offset=offset)
        await self.write(verifier_pb2.AttachRequest(committed=[commit]))

    async def finished(self, sessions: Iterable[str], seconds: float = 60) -> None:
        """Returns when each of `sessions` has had its last update."""
        await self._until(lambda: all(s in self.last and self.last[s].finish_reason for s in sessions), seconds)

    async def seen(self, session: str, tokens: int, seconds: float = 60) -> None:
        """Returns when `session` has emitted at least so many tokens."""
        await self._until(lambda: len(self.tokens.get(session, ())) >= tokens, seconds)

    async def load(self) -> verifier_pb2.GetLoadResponse:
        """The verifier's counters."""
        load: verifier_pb2.GetLoadResponse = await self.stub.GetLoad(verifier_pb2.GetLoadRequest(), timeout=10)
        return load

    async def write(self, request: verifier_pb2.AttachRequest) -> None:
        """Sends a message as it is."""
        async with self._writing:  # gRPC takes one write at a time
            await self.call.write(request)

    async def _until(self, condition: Callable[[], bool], seconds: float) -> None:
        async with asyncio.timeout(seconds), self._changed:
            await self._changed.wait_for(lambda: condition() or self.ended.is_set())
        if not condition():
            await self._reading  # raises what it ended with
            raise AssertionError(f"the stream ended first: {await self.call.code()} {await self.call.details()}")

    async def _read(self) -> None:
        try:
            while (message := await self.call.read()) is not grpc.aio.EOF:
                self.messages.append(message)
                commits = [self._take(update) for update in message.updates]
                if self.acknowledge:
                    await self.write(verifier_pb2.AttachRequest(committed=commits))
                async with self._changed:
                    self._changed.notify_all()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the test looks at the call's code
        finally:
            self.ended.set()
            async with self._changed:
                self._changed.notify_all()

    def _take(self, update: verifier_pb2.SequenceUpdate) -> verifier_pb2.CommittedOffset:
        tokens = self.tokens.setdefault(update.session_id, [])
        if not update.HasField("error"):
            assert update.offset == len(tokens), "an update must begin where the one before ended"
        tokens.extend(update.tokens)
        self.last[update.session_id] = update
        return verifier_pb2.CommittedOffset(
            session_id=update.session_id, epoch=update.epoch, attempt=update.attempt, offset=len(tokens)
        )
