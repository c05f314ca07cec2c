"""Clients that come, cancel and vanish, in every way there is."""

from __future__ import annotations

import asyncio
import gc
import random
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from hedgerow.v1 import common_pb2
from hedgerow.v1 import gateway_pb2 as pb
from hedgerow.v1.gateway_pb2_grpc import GatewayServiceStub

AT_ONCE = 24
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


@dataclass
class Client:
    """One client: its gateway, a connection of its own, and what it chooses."""

    address: str
    draw: random.Random
    channel: grpc.aio.Channel = field(init=False)

    def __post_init__(self) -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]  # not one that another client left
        self.channel = grpc.aio.insecure_channel(self.address, options=options)

    @property
    def stub(self) -> Any:
        """Of its connection."""
        return GatewayServiceStub(self.channel)  # type: ignore[no-untyped-call]

    def generate(self, *, detach: bool = False, tokens: int = 2000) -> Any:
        """A generation that is long unless it says otherwise."""
        request = pb.GenerateRequest(
            text=f"# {self.draw.random()}\n",
            sampling=common_pb2.SamplingParams(max_tokens=tokens, ignore_eos=True),
            speculation=common_pb2.SpeculationParams(budget=self.draw.choice([0, 8])),
            detach=detach,
        )
        return self.stub.Generate(request)

    async def read(self, call: Any, events: int) -> str:
        """Some events; the session's id, "" where none has come."""
        session_id = ""
        for _ in range(events):
            answer = await call.read()
            if answer is grpc.aio.EOF:  # type: ignore[attr-defined]
                break
            session_id = answer.event.started.session_id or session_id
        return session_id

    @property
    def some(self) -> int:
        """How many events it waits for before it leaves; often none."""
        return self.draw.choice([0, 0, 1, 2, 4, 10])


async def only_connect(client: Client) -> None:
    """Asks for the models and goes."""
    await client.stub.ListModels(pb.ListModelsRequest())


async def drop_a_socket(client: Client) -> None:
    """Half a greeting, nonsense, or nothing, and gone."""
    host, _, port = client.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(client.draw.choice([b"", PREFACE[:10], PREFACE, client.draw.randbytes(100)]))
    if client.draw.random() < 0.5:
        writer.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    writer.transport.abort()
    del reader


async def finish(client: Client) -> None:
    """A short generation, to its end."""
    await client.read(client.generate(tokens=8), 100)


async def cancel_the_call(client: Client) -> None:
    """Cancels on the wire."""
    call = client.generate()
    await client.read(call, client.some)
    call.cancel()


async def close_the_connection(client: Client) -> None:
    """Closes everything in the middle of a call."""
    await client.read(client.generate(detach=client.draw.random() < 0.5), client.some)
    await client.channel.close(None)


async def ask_to_cancel(client: Client) -> None:
    """The user's cancel."""
    call = client.generate(detach=True)
    session_id = await client.read(call, 1 + client.some)
    await client.stub.Cancel(pb.CancelRequest(session_id=session_id))
    await client.read(call, 10_000)


async def run_out_of_time(client: Client) -> None:
    """A deadline that passes in the queue, in the prefill or later."""
    request = pb.GenerateRequest(
        text="# late\n", sampling=common_pb2.SamplingParams(max_tokens=2000, ignore_eos=True), deadline_ms=1
    )
    request.deadline_ms = client.draw.randint(1, 200)
    await client.read(client.stub.Generate(request), 10_000)


async def leave_and_resume(client: Client) -> None:
    """Breaks off, comes back with what it has, and cancels or leaves for good."""
    call = client.generate(detach=True)
    session_id = await client.read(call, 1 + client.some)
    call.cancel()
    again = client.stub.Resume(pb.ResumeRequest(session_id=session_id, detach=client.draw.random() < 0.5))
    await client.read(again, client.some)
    if client.draw.random() < 0.5:
        await client.stub.Cancel(pb.CancelRequest(session_id=session_id))
    again.cancel()


WAYS: Sequence[Callable[[Client], Awaitable[None]]] = (
    only_connect, drop_a_socket, finish, cancel_the_call, close_the_connection, ask_to_cancel, run_out_of_time,
    leave_and_resume,
)  # fmt: skip


async def wave(addresses: Sequence[str], count: int, seed: int) -> Counter[str]:
    """`count` clients, `AT_ONCE` at a time. Gives the ways they went, and the errors that they met, by their code."""
    gate, seen, draw = asyncio.Semaphore(AT_ONCE), Counter[str](), random.Random(seed)

    async def one(number: int) -> None:
        async with gate:
            client = Client(draw.choice(addresses), random.Random(f"{seed} {number}"))
            way = client.draw.choice(WAYS)
            seen[way.__name__] += 1
            try:
                async with asyncio.timeout(60):
                    await way(client)
            except grpc.aio.AioRpcError as error:
                seen[error.code().name] += 1
            except asyncio.CancelledError:  # what grpc.aio raises for a call that its own side cancelled
                pass
            except (OSError, grpc.aio.UsageError) as error:
                seen[type(error).__name__] += 1
            finally:
                await client.channel.close(None)

    await asyncio.gather(*(one(number) for number in range(count)))
    gc.collect()  # a call of grpc.aio that is cancelled before it began keeps its connection until then
    return seen
