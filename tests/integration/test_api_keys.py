"""API keys at a gateway process, and files that change under live streams: who is let in, and that no stream breaks."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import psutil
import pytest
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from hedgerow.cli.child import Child
from hedgerow.cli.supervisor import Stack
from hedgerow.client import AsyncClient, Options, Retry, process_status
from hedgerow.errors import HedgerowError, InvalidRequest, NotFound, Overloaded, Unauthenticated
from hedgerow.v1 import gateway_pb2 as pb
from tests.polling import soon
from tests.processes import service
from tests.stack import Models

ACME, LAB, NEW, WRONG = (f"planted-{name}-0123456789" for name in ("acme", "lab", "new", "wrong"))
PROMPT = "def area(width, height):\n    "
GREEDY: Options = {"temperature": 0.0, "ignore_eos": True}
STREAMS = 16


@dataclass(frozen=True)
class Guarded:
    """A gateway with a file of keys and one of limits."""

    child: Child
    address: str
    admin: str
    keys: Path
    limits: Path

    def client(self, key: str = "", **more: Any) -> AsyncClient:
        """With a key, and without patience."""
        return AsyncClient(self.address, api_key=key, **{"retry": Retry.never(), **more})

    async def facts(self) -> dict[str, str]:
        """What its status says."""
        return dict((await process_status(self.admin)).facts)

    async def taken(self, what: str, generation: int) -> None:
        """Return once this content of a file is in force, as an operator sees it."""
        await true_soon(lambda: self._is(what, f"generation {generation} "), f"generation {generation} of {what}")

    async def refused(self, what: str) -> None:
        """Return once it says that the newest file is not taken."""
        await true_soon(lambda: self._is(what, "not taken"), f"{what} refused")

    async def _is(self, what: str, text: str) -> bool:
        return text in (await self.facts())[what]


async def true_soon(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    """Polls, ten seconds at most."""
    async with asyncio.timeout(10):
        while not await condition():  # noqa: ASYNC110  (another process changes it)
            await asyncio.sleep(0.02)


def put(path: Path, *lines: str) -> None:
    """Whole files, at once."""
    beside = path.with_suffix(".new")
    beside.write_text("".join(f"{line}\n" for line in lines))
    os.replace(beside, path)


def hashed(key: str) -> str:
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


@contextmanager
def guarded(stack: Stack, models: Models, folder: Path, **settings: object) -> Iterator[Guarded]:
    keys, limits = folder / "api-keys", folder / "limits"
    put(keys, f"acme {hashed(ACME)} concurrent=20", f"lab {LAB} concurrent=1 max_priority=5")
    put(limits, "HEDGEROW_MAX_SESSIONS=64", "HEDGEROW_LOG_LEVEL=debug")
    peers = {name: stack.address(name) for name in ("verifier", "kvstore")}
    files = {"api_keys_file": keys, "limits_file": limits}
    with service("gateway", model_path=models.target, log_format="json", **peers, **files, **settings) as child:
        ready = child.wait_ready(60)
        yield Guarded(child, f"127.0.0.1:{ready.port}", f"127.0.0.1:{ready.admin}", keys, limits)


@pytest.fixture
def gateway(stack: Stack, models: Models, tmp_path: Path) -> Iterator[Guarded]:
    with guarded(stack, models, tmp_path) as running:
        yield running


async def answers(
    gateway: Guarded, method: str, request: Message, metadata: Sequence[tuple[str, str]]
) -> grpc.StatusCode:
    """How one call of any method ends."""
    async with grpc.aio.insecure_channel(gateway.address) as channel:
        raw = channel.stream_stream(f"/hedgerow.v1.GatewayService/{method}")
        call = raw(iter([request.SerializeToString()]), metadata=tuple(metadata), timeout=10)
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for _ in call:
                pass
        assert not [key for key in (ACME, LAB, WRONG) if key in await call.details()]
        return await call.code()


async def test_every_method_wants_a_key_and_health_none(gateway: Guarded) -> None:
    methods = pb.DESCRIPTOR.services_by_name["GatewayService"].methods
    assert len(methods) >= 8
    bearer = ("authorization", f"Bearer {WRONG}")
    for method in methods:
        for metadata in ([], [bearer], [("authorization", WRONG)], [("hedgerow-tenant", "acme")]):
            request = method.input_type._concrete_class()
            code = await answers(gateway, method.name, request, metadata)
            assert code is grpc.StatusCode.UNAUTHENTICATED, (method.name, metadata)
    known = await answers(gateway, "ListModels", pb.ListModelsRequest(), [("authorization", f"Bearer {ACME}")])
    assert known is grpc.StatusCode.OK
    async with grpc.aio.insecure_channel(gateway.address) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check  # type: ignore[no-untyped-call]
        assert (await check(health_pb2.HealthCheckRequest(), timeout=10)).status == 1


async def test_a_key_decides_the_tenant_of_what_it_makes(gateway: Guarded) -> None:
    async with gateway.client(ACME) as acme, gateway.client(LAB, tenant="lab") as lab:
        made = await acme.complete(PROMPT, max_tokens=4)
        assert (await acme.get_session(made.session_id)).token_count == 4
        for of_another in (lab.get_session, lab.cancel, lab.delete_session):
            with pytest.raises(NotFound):
                await of_another(made.session_id)
        with pytest.raises(NotFound):
            await lab.resume(made.session_id).result()
        with pytest.raises(InvalidRequest, match="priority: 6 is not allowed: at most 5, the tenant's"):
            await lab.complete(PROMPT, max_tokens=4, priority=6)
        with pytest.raises(InvalidRequest, match="tenant"):
            await acme.generate(PROMPT, max_tokens=4, tenant="lab").result()
        assert await acme.delete_session(made.session_id)
    async with gateway.client(ACME, tenant="lab") as posing:
        with pytest.raises(InvalidRequest, match="hedgerow-tenant: 'lab' is not allowed: the tenant of the API key"):
            await posing.models()


async def test_a_tenant_has_as_many_streams_as_its_line_says(gateway: Guarded) -> None:
    async with gateway.client(LAB) as lab:
        first = lab.generate(PROMPT, max_tokens=2000, **GREEDY)
        async for _ in first:
            break
        with pytest.raises(Overloaded, match="tenant lab, in requests at once, is full: 1 of 1"):
            await lab.complete(PROMPT, max_tokens=4)
        await first.aclose()
        await true_soon(lambda: _works(lab), "a place for the next")


async def _works(client: AsyncClient) -> bool:
    try:
        return len((await client.complete(PROMPT, max_tokens=4, **GREEDY)).tokens) == 4
    except Overloaded:
        return False


async def test_files_change_under_live_streams_and_none_breaks(gateway: Guarded) -> None:
    """Keys added and taken away, limits lowered below what runs, broken files, SIGHUP: 16 streams, all their tokens."""
    async with gateway.client(ACME) as acme, gateway.client(NEW) as new:
        whole = await acme.complete(PROMPT, max_tokens=500, **GREEDY)
        under_way = asyncio.Semaphore(0)

        async def one() -> list[int]:
            stream, tokens = acme.generate(PROMPT, max_tokens=500, **GREEDY), []
            async for chunk in stream:
                if not tokens:
                    under_way.release()
                tokens += chunk.tokens
            return tokens

        streams = [asyncio.create_task(one()) for _ in range(STREAMS)]
        async with asyncio.timeout(60):
            for _ in range(STREAMS):
                await under_way.acquire()
        with pytest.raises(Unauthenticated):
            await new.models()
        put(gateway.keys, f"acme {hashed(ACME)}", f"acme {hashed(NEW)}")
        await gateway.taken("api keys", 2)
        assert await new.models(), "a key counts from then on"
        put(gateway.limits, "HEDGEROW_MAX_SESSIONS=1", "HEDGEROW_MAX_PROMPT_BYTES=4")
        await gateway.taken("limits", 2)
        assert (await process_status(gateway.admin)).numbers["hedgerow_gateway_session_limit"] == 1
        with pytest.raises(InvalidRequest, match="at most 4 bytes"):
            await new.complete(PROMPT, max_tokens=4, seed=1)
        put(gateway.keys, f"acme {NEW}", "acme")
        put(gateway.limits, "HEDGEROW_MAX_SESSIONS=none")
        await gateway.refused("limits")
        await gateway.refused("api keys")
        assert await new.models(), "the keys before are in force"
        put(gateway.keys, f"acme {NEW}")
        put(gateway.limits, "HEDGEROW_MAX_SESSIONS=64")
        await gateway.taken("limits", 3)
        await gateway.taken("api keys", 3)
        os.kill(gateway.child.pid, signal.SIGHUP)
        with pytest.raises(Unauthenticated, match="none that this gateway knows"):
            await acme.models()
        results = await asyncio.gather(*streams)
    assert [tokens == list(whole.tokens) for tokens in results] == [True] * STREAMS
    said = [json.loads(line) for line in gateway.child.lines() if line.startswith("{")]
    refusals = [line for line in said if line["event"].startswith("a changed file is not taken")]
    assert sorted(line["what"] for line in refusals) == ["api keys", "limits"]
    assert "line 1: HEDGEROW_MAX_SESSIONS: 'none' is not allowed: must be a whole number" in str(refusals)
    await soon(lambda: any("taken again" in line for line in gateway.child.lines()), 30, "an answer to SIGHUP")
    numbers = (await process_status(gateway.admin)).numbers
    assert numbers['hedgerow_reload_refused{file="limits"}'] == 0
    assert numbers['hedgerow_reload_generation{file="api keys"}'] == 3
    assert numbers["hedgerow_gateway_session_limit"] == 64


async def test_no_key_is_in_logs_metrics_status_errors_or_arguments(gateway: Guarded) -> None:
    said: list[str] = []
    async with gateway.client(ACME) as acme, gateway.client(WRONG) as wrong:
        await acme.complete(PROMPT, max_tokens=4)
        for call in (
            wrong.models(),
            wrong.generate(PROMPT).result(),
            acme.generate(PROMPT, temperature=-1.0).result(),
            acme.get_session("x" * 200),
        ):
            with pytest.raises(HedgerowError) as refused:
                await call
            said.append(f"{refused.value} {refused.value.metadata}")
        said.append(f"{acme!r} {vars(acme)}")
    put(gateway.keys, f"acme {ACME} {LAB}", f"{LAB}")
    await gateway.refused("api keys")
    said += [*gateway.child.lines(), str(await process_status(gateway.admin))]
    process = psutil.Process(gateway.child.pid)
    said += [str(process.cmdline()), str(process.environ())]
    text = "\n".join(said)
    assert "is not allowed" in text
    for key in (ACME, LAB, WRONG):
        assert key not in text
        assert hashlib.sha256(key.encode()).hexdigest() not in text
