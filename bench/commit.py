"""Cost of a commit: gateway -> kvstore -> Redis and back, with real processes on this machine.

    python -m bench.commit [--steps 200] [--rounds 5] [--rate 50] [--redis-binary PATH]

One append message a step, 4 tokens a sequence; `rate` steps a second, as a verifier makes them, or back to back.
Latency is what the gateway waits for a step's answer, from the write of a ready message to the answer's arrival in its
event loop. The cases (AOF everysec and always; WAIT 1 with a replica, everysec) take turns, `rounds` times: a figure is
the median of its rounds, and the best round stands beside it, for a machine that others use too (`others`: the cores
that they took meanwhile). CPU is a process's share of one core. `reads_per_step` counts Redis's reads of its sockets:
messages, and a few of ours and of health's; with a replica its acknowledgements too. Results go to
bench/results/commit.json with commit and machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import redis
import uvloop

from bench.arguments import number, whole_from
from bench.subjects import machine
from hedgerow.cli.embedded_redis import EmbeddedRedis
from hedgerow.scheduling import SHORT, ask_for_slice
from hedgerow.v1 import kvstore_pb2 as pb
from tests.kvstore_calls import Gateway, Session, gateway_on
from tests.redis_servers import Service

RESULTS = Path("bench/results/commit.json")
TOKENS = 4  # a sequence and step
WARM = 20  # steps before the clock starts


@dataclass
class Store:
    """A Redis, the kvstore on it, and its replica where it waits for one."""

    server: EmbeddedRedis
    service: Service
    replica: EmbeddedRedis | None = None
    client: redis.Redis = field(init=False)

    def __post_init__(self) -> None:
        self.client = redis.Redis.from_url(self.server.url, decode_responses=True)

    def counted(self) -> tuple[float, float, int, int]:
        """CPU seconds of the kvstore and of Redis, reads of sockets and calls of scripts, so far."""
        reads = self.client.info("stats")["total_reads_processed"]
        calls = self.client.info("commandstats").get("cmdstat_evalsha", {"calls": 0})["calls"]
        return cpu(self.service.process.pid), cpu(self.server.pid), reads, calls


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    name: str
    store: Store
    fsync: str
    sequences: int
    rate: float  # steps a second; 0: back to back

    @property
    def title(self) -> str:
        """Its name in the table."""
        return f"{self.name}, {self.sequences} sequences, " + (
            f"{self.rate:g} a second" if self.rate else "back to back"
        )


def cpu(pid: int) -> float:
    """Seconds of CPU so far."""
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def busy() -> float:
    """Seconds of CPU that all cores have spent on anything."""
    times = psutil.cpu_times()
    return sum(times) - times.idle - times.iowait - times.guest


def message(
    sessions: Sequence[Session], chains: dict[str, list[bytes]], log: Sequence[int], step: int
) -> pb.AppendRequest:
    """A step's entries."""
    request, at = pb.AppendRequest(batch_id=step), step * TOKENS
    for session in sessions:
        chain = chains[session.session_id]
        entry = request.entries.add(
            session_id=session.session_id, birth=session.birth, offset=at, tokens=log[at : at + TOKENS],
            digest_before=chain[at], digest_after=chain[at + TOKENS],
        )  # fmt: skip
        entry.lease.epoch, entry.lease.owner = session.epoch, session.owner
    return request


async def measure(gateway: Gateway, case: Case, steps: int) -> dict[str, float]:
    """One round of one case. Messages are made before the clock starts."""
    sessions = [await gateway.create(Session()) for _ in range(case.sequences)]
    log = list(range((steps + WARM) * TOKENS))
    chains = {session.session_id: session.digests(log) for session in sessions}
    messages = [message(sessions, chains, log, step) for step in range(steps + WARM)]
    call, waits, late = gateway.stub.Append(), list[float](), 0.0
    before, own, all_cores, began, due = (0.0, 0.0, 0, 0), 0.0, 0.0, 0.0, time.perf_counter()
    for step, request in enumerate(messages):
        if step == WARM:
            before, own, all_cores, began = case.store.counted(), cpu(os.getpid()), busy(), time.perf_counter()
            due = began
        if case.rate:
            due += 1 / case.rate
            await asyncio.sleep(due - time.perf_counter())
            late = max(late, time.perf_counter() - due)
        start = time.perf_counter()
        await call.write(request)
        answer = await call.read()
        waits.append((time.perf_counter() - start) * 1e3)
        assert {result.status for result in answer.results} == {pb.APPEND_STATUS_OK}, answer
    seconds = time.perf_counter() - began
    others, ours = busy() - all_cores, cpu(os.getpid()) - own
    kvstore, server, reads, calls = (after - first for after, first in zip(case.store.counted(), before, strict=True))
    call.cancel()
    waits = sorted(waits[WARM:])
    return {
        "p50_ms": waits[len(waits) // 2],
        "p99_ms": waits[int(len(waits) * 0.99)],
        "steps_per_second": steps / seconds,
        "late_ms": late * 1e3,
        "kvstore_cpu": kvstore / seconds,
        "redis_cpu": server / seconds,
        "reads_per_step": reads / steps,
        "scripts_per_step": calls / steps,
        "others": (others - ours - kvstore - server) / seconds,
    }


@contextmanager
def stores(folder: Path, binary: Path | None) -> Iterator[tuple[Store, Store]]:
    """A kvstore on one Redis, and one whose Redis has a replica that it waits for."""
    with ExitStack() as stack:
        alone, primary, replica = (
            stack.enter_context(EmbeddedRedis(folder / name, binary=binary)) for name in ("alone", "primary", "replica")
        )
        with redis.Redis.from_url(replica.url, decode_responses=True) as client:
            client.replicaof("127.0.0.1", str(primary.port))
            while client.info("replication").get("master_link_status") != "up":
                time.sleep(0.05)
        services = (
            Service("services.kvstore", redis_url=alone.url),
            Service("services.kvstore", redis_url=primary.url, redis_wait_replicas=1),
        )
        for service in services:
            stack.callback(service.stop)
            assert service.port
        yield Store(alone, services[0]), Store(primary, services[1], replica)


async def one_round(case: Case, args: argparse.Namespace) -> dict[str, float]:
    """One round of one case, on connections of its own."""
    case.store.client.config_set("appendfsync", case.fsync)
    async with gateway_on(case.store.service.port) as gateway:
        return await measure(gateway, case, args.steps)


def summary(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    """The median of every figure, and the best round's latency."""
    row = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
    best = min(rounds, key=lambda each: each["p50_ms"])
    row |= {"best_p50_ms": best["p50_ms"], "best_p99_ms": best["p99_ms"], "best_others": best["others"]}
    return {name: round(value, 3) for name, value in row.items()}


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=whole_from(1), default=200, help="of one round of one case")
    parser.add_argument("--rounds", type=whole_from(1), default=5)
    parser.add_argument("--rate", type=number(0.001), default=50.0, help="steps a second")
    parser.add_argument("--redis-binary", type=Path, help="another redis-server than the embedded one")
    args = parser.parse_args()
    ask_for_slice(SHORT)  # as a gateway does
    with (
        TemporaryDirectory(prefix="hedgerow-bench-") as folder,
        stores(Path(folder), args.redis_binary) as (alone, pair),
    ):
        version = alone.client.info("server")
        kinds = (("everysec", alone, "everysec"), ("always", alone, "always"), ("WAIT 1", pair, "everysec"))
        cases = [Case(*kind, n, rate) for kind in kinds for n in (1, 16, 64) for rate in (args.rate, 0.0)]
        rounds: dict[str, list[dict[str, float]]] = {case.title: [] for case in cases}
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            for turn in range(args.rounds):
                for case in cases:
                    rounds[case.title].append(runner.run(one_round(case, args)))
                    print(f"{turn + 1}/{args.rounds} {case.title}: {summary(rounds[case.title][-1:])}", flush=True)
    rows = {name: summary(each) for name, each in rounds.items()}
    results: dict[str, Any] = {"machine": machine() | {"cores": os.cpu_count()}}
    results["redis"] = version.get("valkey_version") or version["redis_version"]
    results |= {"rounds": args.rounds, "steps_per_round": args.steps, "commit": rows}
    for name, row in rows.items():
        print(f"{name:40} {json.dumps(row)}")
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
