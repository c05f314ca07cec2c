"""Clients that come, cancel and vanish in every way there is: afterwards every process is as it was before.

    python -m bench.churn                    10,000 clients, about 24 at once
    python -m bench.churn --clients 2000

After each wave the stack must come to rest: no sequence, page, session, reader, lease, waiting append or extra task is
held, and no process has more sockets or threads than after the first wave. The memory of each process is read then, and
its slope over the clients of the later waves is reported. Sessions live for 10 s in the store here, so that its memory
returns as well. The results go to bench/results/churn.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

from bench.arguments import whole_from
from bench.subjects import machine
from hedgerow.cli.supervisor import Stack, StackConfig, find_checkout, service_of
from tests.chaos.cluster import at_rest
from tests.chaos.leavers import wave

Say = Callable[[str], None]
WAVE = 500  # clients between two measurements
SPARE = 4  # tasks and sockets that come and go: a renewal, a health probe
CONNECTIONS, POOLED = 8, ("kvstore", "redis")  # which a kvstore opens to Redis when it is busy, and keeps
TTL_MS = 10_000
SETTINGS: Mapping[str, Mapping[str, str]] = {
    "kvstore": {"SESSION_TTL_MS": str(TTL_MS), "TOMBSTONE_MS": str(TTL_MS), "REDIS_CONNECTIONS": str(CONNECTIONS)},
    "gateway": {"SESSION_TTL": str(TTL_MS // 1000), "ORPHAN_SECONDS": "1"},
}
INDEX = re.compile(r"hedgerow:\{(owner-[0-9a-f]+\}:sessions|released-\d+\})")
LIVES = re.compile(r"hedgerow:\{(owner-[0-9a-f]+\}:alive|owners-\d+\})")


@dataclass(frozen=True)
class Footprint:
    """What a process takes."""

    rss: int  # bytes
    files: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> Footprint:
        """As Linux tells it."""
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        status = Path(f"/proc/{pid}/status").read_text()
        threads = int(status.partition("Threads:")[2].split()[0])
        return cls(pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir(f"/proc/{pid}/fd")), threads)


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Of the straight line through points that has the least squares."""
    if len(points) < 2:
        return 0.0
    x0, y0 = (sum(values) / len(points) for values in zip(*points, strict=True))
    spread = sum((x - x0) ** 2 for x, _ in points)
    return float(sum((x - x0) * (y - y0) for x, y in points) / spread)


def churn(stack: Stack, clients: int, seed: int, size: int = WAVE, say: Say = print) -> dict[str, Any]:
    """Waves of clients on a stack that runs. Gives the results, `problems` empty where everything returned."""
    with asyncio.Runner() as runner:
        return _waves(runner, stack, clients, seed, size, say)


def _waves(runner: asyncio.Runner, stack: Stack, clients: int, seed: int, size: int, say: Say) -> dict[str, Any]:
    addresses = stack.addresses("gateway").split(",")
    names, seen = (*stack.services, "redis"), Counter[str]()
    settled(stack)
    before = {name: Footprint.of(stack.pid(name)) for name in names}
    seen += runner.run(wave(addresses, min(size, clients), seed))  # what is loaded and made at first use
    tasks = settled(stack)
    history = {name: [(0.0, float(Footprint.of(stack.pid(name)).rss))] for name in names}
    done = 0
    while done < clients:
        count = min(size, clients - done)
        began = time.monotonic()
        seen += runner.run(wave(addresses, count, seed + done + 1))
        done += count
        more = settled(stack)
        for name in names:
            history[name].append((done, Footprint.of(stack.pid(name)).rss))
        say(f"{done} clients, {count / (time.monotonic() - began):.0f} a second; "
            + ", ".join(f"{name} {int(history[name][-1][1]) >> 20} MiB" for name in names))  # fmt: skip
    problems = [f"{g} has {more[g]} tasks, not {tasks[g]}" for g in tasks if more[g] > tasks[g] + SPARE]
    problems += not_returned(stack, before) + keys_left(stack, done)
    processes = {
        name: {
            "rss_mib": [round(points[0][1] / 2**20, 1), round(points[-1][1] / 2**20, 1)],
            "bytes_per_client": round(slope(points), 1),
            "bytes_per_client_second_half": round(slope(points[len(points) // 2 :]), 1),
        }
        for name, points in history.items()
    }
    return {"clients": done, "seen": dict(sorted(seen.items())), "processes": processes, "problems": problems}


def not_returned(stack: Stack, before: Mapping[str, Footprint]) -> list[str]:
    """Processes with more files or threads than before; gRPC keeps sockets that were reset early for half a minute."""
    end = time.monotonic() + 90
    while True:
        problems = []
        for name, was in before.items():
            now, connections = Footprint.of(stack.pid(name)), CONNECTIONS if service_of(name) in POOLED else 0
            if now.files > was.files + SPARE + connections:
                problems.append(f"{name} has {now.files} files, not {was.files}")
            if now.threads > was.threads + SPARE:
                problems.append(f"{name} has {now.threads} threads, not {was.threads}")
        if not problems or time.monotonic() > end:
            return problems
        time.sleep(0.5)


def settled(stack: Stack, seconds: float = 60) -> dict[str, int]:
    """Returns when nothing is held by any process; gives the gateways' tasks. AssertionError with what is held."""
    end = time.monotonic() + seconds
    while True:
        why, tasks = at_rest(stack)
        if why is None:
            return tasks
        assert time.monotonic() < end, f"not at rest within {seconds:g} s: {why}"
        time.sleep(0.1)


def keys_left(stack: Stack, clients: int) -> list[str]:
    """What is in the store once the last session's life is over. Of a gateway only that it lives may be there, and an
    index that names a session in a thousand that is gone: those go with the gateway.
    """
    end = time.monotonic() + 4 * TTL_MS / 1000
    with redis.Redis.from_url(stack.redis_url) as client:
        while True:
            keys = [key.decode() for key in client.scan_iter(count=1000)]
            left = {key: members(client, key) for key in sorted(keys) if not LIVES.fullmatch(key)}
            gone = {key: count for key, count in left.items() if not (INDEX.fullmatch(key) and count <= clients / 1000)}
            if not gone or time.monotonic() > end:
                return [f"the store has {len(gone)} keys after all sessions' lives: {list(gone)[:5]}"] if gone else []
            time.sleep(0.5)


def members(client: redis.Redis, key: str) -> int:
    """Of a sorted set; 1 for anything else."""
    return int(client.zcard(key)) if client.type(key) == b"zset" else 1


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.churn", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--clients", type=whole_from(1), default=10_000)
    parser.add_argument("--gateways", type=whole_from(1), default=2)
    parser.add_argument("--verifiers", type=whole_from(1), default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--results", type=Path, default=Path("bench/results/churn.json"))
    args = parser.parse_args(argv)
    root = find_checkout()
    with tempfile.TemporaryDirectory(prefix="hedgerow-churn-") as folder:
        config = StackConfig(
            root, root / "models" / "sapling", Path(folder), root / "models" / "sapling-dflash",
            gateways=args.gateways, verifiers=args.verifiers, settings=SETTINGS,
        )  # fmt: skip
        began = time.monotonic()
        with Stack(config) as stack:
            result = churn(stack, args.clients, args.seed, say=lambda text: print(text, flush=True))
    result |= {"seconds": round(time.monotonic() - began), "machine": machine()}
    args.results.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return 1 if result["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
