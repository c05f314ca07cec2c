"""Real processes show their numbers at /metrics, and the numbers are those of what was done."""

from __future__ import annotations

import asyncio
import itertools
import re
import time
import urllib.request
from collections.abc import Iterator

import pytest

from hedgerow.cli.child import Child
from hedgerow.cli.embedded_redis import EmbeddedRedis
from hedgerow.cli.ports import free_ports
from hedgerow.cli.supervisor import Stack, StackConfig
from hedgerow.client import AsyncClient
from hedgerow.engine.types import Finish, StepResult, StepStats, StepTimings, Update
from hedgerow.errors import SessionUnknown
from hedgerow.v1 import common_pb2
from services.verifier.metrics import StepMetrics
from tests.attach import TestGateway
from tests.kvstore_calls import Session, gateway_on
from tests.processes import address, service
from tests.stack import ROOT, Models

SAMPLING = common_pb2.SamplingParams(temperature=1, seed=5, max_tokens=40, ignore_eos=True)
# labels whose values the program decides
LABELS = {"finish", "reason", "source", "outcome", "status", "method", "what", "node", "le"}
PAGE = (ROOT / "docs" / "metrics.md").read_text()
STANDARD = {"process_cpu_seconds_total", "process_resident_memory_bytes"}

Numbers = dict[str, float]


async def look(port: int) -> Numbers:
    """All series, named as they are shown."""

    def read() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            text: str = answer.read().decode()
            return text

    lines = [line for line in (await asyncio.to_thread(read)).splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


async def settled(port: int, ended: int) -> Numbers:
    """All series of a verifier once `ended` sequences have ended and nothing runs.

    An update goes out before its step is counted, and what is shown is not read in one moment.
    """
    v, seen = "hedgerow_verifier", dict[str, float]()
    async with asyncio.timeout(60):
        while True:
            before, seen = seen, await look(port)
            steps = {seen[f"{v}_steps_total"]}
            steps |= {seen[f"{v}_{part}_seconds_count"] for part in ("step", "forward", "accept")}
            still = all(before.get(name) == value for name, value in seen.items() if name.startswith(v))
            if still and len(steps) == 1 and seen[f'{v}_ends_total{{finish="length"}}'] >= ended:
                return seen


def moved(before: Numbers, after: Numbers) -> Numbers:
    return {name: value - before.get(name, 0) for name, value in after.items()}


def check_names(numbers: Numbers, name: str) -> None:
    """Of the house, and with no label that a client could fill."""
    assert numbers.keys() >= STANDARD
    for series in numbers.keys() - STANDARD:
        assert series.startswith((f"hedgerow_{name}_", "process_")), series
        family = re.sub(r"_(bucket|count|sum)$", "", series.partition("{")[0])
        assert not series.startswith("hedgerow") or f"`{family}`" in PAGE, f"{family} is not in docs/metrics.md"
        assert set(re.findall(r'(\w+)="', series)) <= LABELS, series
    assert len(numbers) < 600


@pytest.fixture(scope="module")
def ports() -> list[int]:
    return list(free_ports(3))


@pytest.fixture(scope="module")
def drafter(tiny: Models, ports: list[int]) -> Iterator[Child]:
    with service(
        "drafter", model_path=tiny.drafter, target_path=tiny.target, metrics_address=f"127.0.0.1:{ports[0]}"
    ) as child:
        yield child


@pytest.fixture(scope="module")
def verifier(tiny: Models, drafter: Child, ports: list[int]) -> Iterator[Child]:
    with service(
        "verifier",
        model_path=tiny.target,
        model_name="counted",
        drafter=address(drafter),
        draft_timeout_ms=20_000,
        prefill_factor=0,  # a prompt is one chunk, however slow the machine: all sequences of a step then emit
        metrics_address=f"127.0.0.1:{ports[1]}",
    ) as child:
        yield child


async def test_verifier_and_drafter_count_steps_tokens_trees_and_attachments(verifier: Child, ports: list[int]) -> None:
    async with TestGateway(address(verifier)) as gateway:
        async with asyncio.timeout(60):
            while not (await look(ports[1]))["hedgerow_verifier_drafter_up"]:
                pass
        await gateway.start("warm", [1, 2, 3], SAMPLING)
        await gateway.finished(["warm"])
        async with asyncio.timeout(60):  # steps of the probe would be counted too
            while not any("acceptance_ratio" in series for series in await look(ports[1])):
                pass
        before, drafted = await settled(ports[1], 1), await look(ports[0])
        load = await gateway.load()
        for n in range(4):
            await gateway.start(f"s{n}", [1, 2, n], SAMPLING, budget=6)
        await gateway.finished([f"s{n}" for n in range(4)])
        gateway.tokens["again"] = [7, 8, 9]
        await gateway.start("again", [1, 2, 3], SAMPLING, attempt=2, committed=[7, 8, 9])
        await gateway.finished(["again"])
        after = await settled(ports[1], 6)
        now = await gateway.load()
    did = moved(before, after)
    check_names(did, "verifier")
    v = "hedgerow_verifier"
    assert did[f"{v}_tokens_total"] == now.tokens - load.tokens == 4 * 40 + 37
    assert did[f"{v}_steps_total"] >= now.steps - load.steps > 0
    assert did[f"{v}_step_seconds_count"] == did[f"{v}_forward_seconds_count"] == did[f"{v}_steps_total"]
    assert 0 < did[f"{v}_forward_seconds_sum"] < did[f"{v}_step_seconds_sum"]
    assert did[f'{v}_ends_total{{finish="length"}}'] == 5
    assert (did[f"{v}_rebuilds_total"], did[f"{v}_adoptions_total"]) == (1, 0)
    assert did[f"{v}_batch_sequences_sum"] >= did[f"{v}_batch_sequences_count"] > 0
    assert did[f"{v}_accepted_nodes_count"] == did[f"{v}_tree_nodes_count"] > 20
    assert did[f"{v}_tree_budget_count"] == did[f"{v}_batch_sequences_sum"]
    assert did[f"{v}_queue_seconds_count"] == 5
    assert did[f"{v}_accept_seconds_count"] == did[f"{v}_steps_total"]
    assert did[f"{v}_prompt_tokens_total"] == 15
    assert did[f'{v}_drafts_total{{outcome="answered"}}'] > 20
    trees = moved(drafted, await look(ports[0]))
    check_names(trees, "drafter")
    assert trees["hedgerow_drafter_forward_seconds_count"] >= did[f'{v}_drafts_total{{outcome="answered"}}']
    assert trees["hedgerow_drafter_nodes_total"] >= did[f"{v}_accepted_nodes_count"]
    assert trees["hedgerow_drafter_request_trees_sum"] >= did[f"{v}_accepted_nodes_count"]


async def test_a_prompt_that_begins_like_another_is_counted(verifier: Child, ports: list[int]) -> None:
    """200 tokens are three whole pages and some; another tenant's are its own."""
    prompt, v = [7 * n % 200 for n in range(200)], "hedgerow_verifier_prefix"
    async with TestGateway(address(verifier)) as gateway:
        seen = [await look(ports[1])]
        for name, tenant in (("one", "a"), ("two", "a"), ("three", "b")):
            ended = seen[-1]['hedgerow_verifier_ends_total{finish="length"}']
            await gateway.start(name, prompt, SAMPLING, tenant=tenant)
            await gateway.finished([name])
            seen.append(await settled(ports[1], ended + 1))
    did = [moved(before, after) for before, after in itertools.pairwise(seen)]
    assert [each[f"{v}_query_tokens_total"] for each in did] == [200] * 3
    assert [each[f"{v}_hit_tokens_total"] for each in did] == [0, 192, 0]
    assert [each[f"{v}_pages"] for each in did] == [3, 0, 3]
    assert all(each[f"{v}_reclaimed_pages_total"] == 0 for each in did)
    assert seen[-1][f"{v}_feature_bytes"] > 0
    assert seen[-1]["hedgerow_verifier_cache_free_pages"] == seen[-1]["hedgerow_verifier_cache_pages"]
    assert gateway.last["two"].usage.cached_prompt_tokens == gateway.last["two"].cached_prompt_tokens == 192
    assert gateway.tokens["two"] == gateway.tokens["one"]


async def test_an_adoption_is_counted(verifier: Child, ports: list[int]) -> None:
    endless = common_pb2.SamplingParams(temperature=1, seed=5, max_tokens=2000, ignore_eos=True)
    before = await look(ports[1])
    async with TestGateway(address(verifier), acknowledge=False) as gateway:
        await gateway.start("adopted", [1, 2, 3], endless)
        await gateway.seen("adopted", 512)
        await gateway.start("adopted", [1, 2, 3], endless, attempt=2, committed=gateway.tokens["adopted"][:512])
        await gateway.seen("adopted", 600)
        did = moved(before, await look(ports[1]))
        await gateway.cancel("adopted", attempt=2)
        await gateway.finished(["adopted"])
    assert (did["hedgerow_verifier_adoptions_total"], did["hedgerow_verifier_rebuilds_total"]) == (1, 0)


async def test_the_kvstore_counts_appends_by_answer(ports: list[int], tmp_path_factory: pytest.TempPathFactory) -> None:
    with (
        EmbeddedRedis(tmp_path_factory.mktemp("redis")) as redis,
        service("kvstore", redis_url=redis.url, metrics_address=f"127.0.0.1:{ports[2]}") as child,
    ):
        log = list(range(20))
        async with gateway_on(int(address(child).rpartition(":")[2])) as gateway:
            one, two = await gateway.create(Session()), await gateway.create(Session())
            before = await look(ports[2])
            await gateway.append(one.entry(log, 0, 5), two.entry(log, 0, 7))
            await gateway.append(one.entry(log, 9, 12))
            await gateway.append(two.entry(log, 7, 8, lease=common_pb2.Lease(epoch=1, owner=b"o" * 16)))
            did = moved(before, await look(ports[2]))
            redis_at = redis.url.rpartition("@")[2].removeprefix("redis://").partition("/")[0]
    check_names(did, "kvstore")
    k = "hedgerow_kvstore"
    assert (did[f"{k}_append_seconds_count"], did[f"{k}_append_entries_sum"]) == (3, 4)
    statuses = {status: did[f'{k}_appends_total{{status="{status}"}}'] for status in ("ok", "gap", "fenced", "gone")}
    assert statuses == {"ok": 2, "gap": 1, "fenced": 1, "gone": 0}
    assert did[f"{k}_tokens_total"] == 12
    assert did[f"{k}_redis_exchanges_total"] >= did[f"{k}_redis_seconds_count"] >= 3
    assert did[f'{k}_redis_memory_bytes{{node="{redis_at}"}}'] >= 0
    assert (did[f"{k}_redis_silences_total"], did[f"{k}_redis_shortfalls_total"]) == (0, 0)


async def test_a_gateway_counts_calls_by_outcome_and_its_failovers(
    tiny: Models, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A verifier is killed in mid-stream and the client does not notice; the counters do."""
    (port,) = free_ports(1)
    data, settings = tmp_path_factory.mktemp("data"), {"gateway": {"METRICS_ADDRESS": f"127.0.0.1:{port}"}}
    with Stack(StackConfig(ROOT, tiny.target, data, drafter=tiny.drafter, settings=settings)) as stack:
        async with AsyncClient(stack.address("gateway")) as client:
            before, tokens = await look(port), list[int]()
            async for chunk in client.generate([1, 2, 3], max_tokens=3000, ignore_eos=True, seed=1, budget=0):
                if not tokens:
                    stack.kill("verifier")
                tokens += chunk.tokens
            with pytest.raises(SessionUnknown):
                await client.resume("0" * 32).result()
            did = moved(before, await look(port))
    check_names(did, "gateway")
    g = "hedgerow_gateway"
    assert did[f'{g}_calls_total{{method="generate",outcome="length"}}'] == 1
    assert did[f'{g}_calls_total{{method="resume",outcome="session_unknown"}}'] == 1
    assert did[f'{g}_tokens_total{{method="generate"}}'] == len(tokens) == 3000
    assert did[f'{g}_first_token_seconds_count{{method="generate"}}'] == 1
    assert did[f'{g}_token_seconds_count{{method="generate"}}'] == 1
    assert did[f'{g}_token_seconds_sum{{method="generate"}}'] < did[f'{g}_call_seconds_sum{{method="generate"}}']
    assert did[f"{g}_commit_seconds_count"] > 10
    assert (did[f"{g}_failed_over_total"], did[f"{g}_attached_total"] >= 2) == (1, True)
    assert did[f"{g}_fenced_total"] == did[f"{g}_repairs_total"] == 0


def test_a_steps_counting_takes_a_few_microseconds() -> None:
    """At 16 sequences; a step of this machine's smallest model is a millisecond."""
    stats = StepStats(step_id=1, budget=8, tree_nodes=8, accepted=3, emitted=4, batch_sequences=16, batch_rows=144)
    updates = [Update(b"", f"s{n}", 1, 1, 0, (1, 2), Finish.NONE, stats=stats) for n in range(16)]
    result, metrics = StepResult(1, updates, StepTimings(1, 2, 3, 4, 5)), StepMetrics()
    best = 1.0
    for _ in range(20):
        begun = time.perf_counter()
        for _ in range(100):
            metrics.count(result)
        best = min(best, (time.perf_counter() - begun) / 100)
    assert best < 50e-6, f"{best * 1e6:.1f} us"  # 8 on two cores of an EPYC


async def test_nothing_listens_where_no_address_is_configured(tiny: Models) -> None:
    with service("verifier", model_path=tiny.target, model_name="silent") as child:
        assert not any("event=metrics" in line for line in child.lines())
