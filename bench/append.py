"""Cost of a commit: gRPC -> kvstore -> Redis and back, with real processes on this machine.

    python -m bench.append [--messages 400] [--rate 50] [--redis-binary PATH]

For AOF everysec and always, and 1, 16, 32 and 64 sessions: one message a step with 4 tokens a session, at `rate`
messages a second. Latency is what the gateway waits; CPU is what kvstore and Redis used while the messages ran.
Results go to bench/results/append.json with commit and machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import redis

from bench.subjects import machine
from hedgerow.cli.embedded_redis import EmbeddedRedis
from tests.kvstore_calls import Gateway, Session, gateway_on
from tests.redis_servers import Service

RESULTS = Path("bench/results/append.json")
TOKENS = 4


def cpu(process: psutil.Process) -> float:
    """Seconds of CPU so far."""
    times = process.cpu_times()
    return times.user + times.system


async def measure(gateway: Gateway, sessions: list[Session], messages: int, rate: float) -> list[float]:
    """Milliseconds from write to answer of each message, sorted. Digests are made before the clock starts."""
    log = list(range(messages * TOKENS))
    chains = {session.session_id: session.digests(log) for session in sessions}
    waits, due = [], time.perf_counter()
    for i in range(messages):
        entries = []
        for session in sessions:
            chain, at = chains[session.session_id], i * TOKENS
            entry = session.entry(log, 0, 0)
            entry.offset = at
            entry.tokens.extend(log[at : at + TOKENS])
            entry.digest_before, entry.digest_after = chain[at], chain[at + TOKENS]
            entries.append(entry)
        due = max(due + 1 / rate, time.perf_counter())
        await asyncio.sleep(due - time.perf_counter())
        began = time.perf_counter()
        results = await gateway.append(*entries)
        waits.append((time.perf_counter() - began) * 1000)
        assert all(result.status == 1 for result in results)
    return sorted(waits)


async def case(server: EmbeddedRedis, service: Service, count: int, args: argparse.Namespace) -> dict[str, Any]:
    """One row of the table."""
    processes = {"kvstore": psutil.Process(service.process.pid), "redis": psutil.Process(server.pid)}
    async with gateway_on(service.port) as gateway:
        sessions = [await gateway.create(Session()) for _ in range(count)]
        before, began = {name: cpu(process) for name, process in processes.items()}, time.perf_counter()
        waits = await measure(gateway, sessions, args.messages, args.rate)
        seconds = time.perf_counter() - began
    used = {name: cpu(process) - before[name] for name, process in processes.items()}
    row: dict[str, Any] = {"p50_ms": waits[len(waits) // 2], "p99_ms": waits[int(len(waits) * 0.99)]}
    row |= {f"{name}_cpu_share": share / seconds for name, share in used.items()}
    row |= {f"{name}_us_per_entry": share / args.messages / count * 1e6 for name, share in used.items()}
    return {name: round(value, 3) for name, value in row.items()}


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=400)
    parser.add_argument("--rate", type=float, default=50.0, help="messages a second at most")
    parser.add_argument("--redis-binary", type=Path, help="another redis-server than the embedded one")
    args = parser.parse_args()
    results: dict[str, Any] = {"machine": machine(), "messages": args.messages, "rate": args.rate}
    with (
        TemporaryDirectory(prefix="hedgerow-bench-") as folder,
        EmbeddedRedis(Path(folder), binary=args.redis_binary) as server,
        redis.Redis.from_url(server.url, decode_responses=True) as client,
    ):
        results["redis"] = client.info("server")["redis_version"]
        service = Service("services.kvstore", redis_url=server.url)
        try:
            for sync in ("everysec", "always"):
                client.config_set("appendfsync", sync)
                for count in (1, 16, 32, 64):
                    row = results[f"{sync}, {count} sessions"] = asyncio.run(case(server, service, count, args))
                    print(f"{sync:8} {count:3} sessions: {row}", flush=True)
        finally:
            service.stop()
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
