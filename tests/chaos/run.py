"""One repetition of a case: clients begin, a fault strikes them in mid-stream, and the judge reads what they got."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from hedgerow.v1 import gateway_pb2, gateway_pb2_grpc
from tests.chaos.cluster import PLAIN, Cluster, Shape
from tests.chaos.judge import Transcript, Undisturbed, Verdict, judge
from tests.chaos.readers import READERS, Ask, RawReader, SdkReader
from tests.polling import soon

Fault = Callable[["Run"], Awaitable[None]]
Reader = RawReader | SdkReader
BATCHES, TEMPERATURES = (1, 16), (0.0, 0.9)
BUDGET = 8
PROMPTS = (
    "def fibonacci(n):\n    ", "class Queue:\n    ", "import asyncio\n\n\nasync def main():\n    ",
    "def test_", "from dataclasses import dataclass\n\n\n@dataclass\nclass ", "try:\n    ", "# größe, naïve, 数\nx = ",
    "def merge(left: list[int], right: list[int]) -> list[int]:\n    ", "with open(path) as file:\n    ",
    "class Tree:\n    def insert(self, key):\n        ", "import json\nimport os\n\n\ndef load(path):\n    ",
    "for i in range(10):\n    ", "def parse(text: str) -> dict[str, int]:\n    \"\"\"",
    "async def fetch(session, url):\n    ",
    "class Error(Exception):\n    \"\"\"", "import argparse\n\n\ndef main() -> int:\n    parser = ",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A fault, and what it strikes. `tokens` of a stream when it is alone; of many at once each has a part."""

    name: str
    fault: Fault
    shape: Shape = PLAIN
    tokens: int = 1200
    slow: bool = True  # not in `make test`
    slow_seconds: float = 0.0  # for which each reader stops reading, once, in mid-stream
    raw: bool = False  # the fault knows the raw client only

    def length(self, batch: int) -> int:
        """Tokens of each stream."""
        return self.tokens if batch == 1 else self.tokens // 4


@dataclass
class Run:
    """What a fault works on. `draw` makes its choices, from the repetition's number."""

    cluster: Cluster
    readers: list[Reader]
    asks: list[Ask]
    draw: random.Random
    struck_at: float = 0.0
    more: list[tuple[Reader, Ask]] = field(default_factory=list)  # readers that the fault itself brings
    failings: list[str] = field(default_factory=list)  # of the fault: what it meant to do and did not

    def strikes(self) -> None:
        """The fault begins now."""
        self.struck_at = time.monotonic()

    def gateway(self) -> str:
        """The gateway that the first reader reads from."""
        return self.cluster.gateway_at(self.readers[0].address)

    async def midstream(self) -> None:
        """Returns when every stream has begun and one of them is somewhere in its first half."""
        wanted = self.draw.uniform(0.05, 0.5) * self.asks[0].tokens

        def far_enough() -> bool:
            counts = [sum(len(chunk.tokens) for chunk in reader.transcript.heard) for reader in self.readers]
            return min(counts) > 0 and max(counts) >= wanted

        await soon(far_enough, 60, "streams on their way")

    async def call(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Runs what blocks beside the clients."""
        return await asyncio.to_thread(work, *arguments)


@dataclass
class Outcome:
    """The verdict over one repetition, and how long its clients had to wait."""

    case: str
    repetition: int
    batch: int
    temperature: float
    reader: str
    verdict: Verdict
    first: float  # seconds until every client had its first chunk: what a prefill costs here and now
    recovery: float  # seconds of the longest wait of any client after the fault
    resumes: int
    seconds: float


class References:
    """Undisturbed runs of the same cluster, made once."""

    def __init__(self) -> None:
        self._known: dict[Ask, Undisturbed] = {}

    async def of(self, cluster: Cluster, asks: list[Ask]) -> list[Undisturbed]:
        """What each must give."""
        missing = [ask for ask in dict.fromkeys(asks) if ask not in self._known]
        readers = [RawReader(cluster.gateways(i), ask, f"undisturbed {i}") for i, ask in enumerate(missing)]
        for ask, got in zip(missing, await asyncio.gather(*(reader.read() for reader in readers)), strict=True):
            assert got.error is None, got.error
            assert not got.resumes, f"a run that nobody disturbed was resumed: {got.resumes}"
            made = Undisturbed(got.tokens, got.text, got.finishes[0])
            verdict = judge(got, made)
            assert verdict.clean, verdict
            self._known[ask] = made
        return [self._known[ask] for ask in asks]


async def repeat(cluster: Cluster, case: Case, repetition: int, known: References, kinds: tuple[str, ...]) -> Outcome:
    """One repetition, on a cluster at rest. Its number decides batch, sampling, client and the fault's choices."""
    batch, temperature = BATCHES[repetition % 2], TEMPERATURES[repetition // 2 % 2]
    kind = "raw" if case.raw else kinds[repetition // 4 % len(kinds)]
    draw = random.Random(f"{case.name} {repetition}")
    asks = [Ask(prompt, case.length(batch), temperature, 17, BUDGET) for prompt in PROMPTS[:batch]]
    must = await known.of(cluster, asks)
    hold = _Hold(case.slow_seconds) if case.slow_seconds else None
    began = time.monotonic()
    first = draw.randrange(case.shape.gateways)
    readers: list[Reader] = [
        READERS[kind](cluster.gateways(first + i), ask, f"{case.name} {repetition}.{i}", hold.once() if hold else None)
        for i, ask in enumerate(asks)
    ]
    run = Run(cluster, readers, asks, draw)
    tasks = [asyncio.create_task(reader.read()) for reader in readers]
    try:
        await run.midstream()
        await case.fault(run)
    finally:
        got = await asyncio.gather(*tasks)
    verdict = Verdict()
    assert all(transcript.heard for transcript in got), [transcript.error for transcript in got]
    if readers[0].transcript.heard[-1].moment < run.struck_at:
        run.failings.append("the fault struck after the stream's end")
    verdict.problems += run.failings
    for transcript, right in zip(got, must, strict=True):
        verdict.add(judge(transcript, right))
    for reader, ask in run.more:
        verdict.add(judge(await reader.read(), (await known.of(cluster, [ask]))[0]))
    verdict.problems += await _compare_records(cluster, got)
    first_chunk = max(transcript.heard[0].moment for transcript in got) - began
    recovery = max(transcript.silence(run.struck_at) for transcript in got)
    resumes = sum(len(transcript.resumes) for transcript in got)
    return Outcome(
        case.name, repetition, batch, temperature, kind, verdict, first_chunk, recovery, resumes,
        time.monotonic() - began,
    )  # fmt: skip


async def _compare_records(cluster: Cluster, got: list[Transcript]) -> list[str]:
    """What the store has of each session must be what its client has."""
    problems = []
    for transcript in got:
        if not transcript.finishes:
            continue
        for address in cluster.gateways():
            async with grpc.aio.insecure_channel(address) as channel:
                stub: Any = gateway_pb2_grpc.GatewayServiceStub(channel)  # type: ignore[no-untyped-call]
                request = gateway_pb2.GetSessionRequest(session_id=transcript.session_id)
                try:
                    stored = await stub.GetSession(request, timeout=30, wait_for_ready=True)
                except grpc.aio.AioRpcError as error:
                    problems.append(f"{transcript.name}: no record: {error.details()}")
                    continue
            if transcript.end is None or (stored.token_count, stored.digest) != (transcript.end[0], transcript.end[2]):
                problems.append(f"{transcript.name}: the store has {stored.token_count} tokens or others")
    return problems


class _Hold:
    """Makes readers that stop once for some seconds, after a few chunks."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def once(self) -> Callable[[], Awaitable[None]]:
        """For one reader."""
        chunks = 0

        async def hold() -> None:
            nonlocal chunks
            chunks += 1
            if chunks == 8:
                await asyncio.sleep(self._seconds)

        return hold
