"""What tracing costs: the same stack, and calls that are traced in turns with calls that are not.

    python -m bench.tracing [--minutes 9] [--turns N] [--sessions 8] [--calls 3] [--tokens 128]

Every service has a collector: one that only counts, in a process that gives way to all others. Whether a call is
traced is in its traceparent, so all rounds meet the same processes. A turn is four rounds in an order drawn each time:
all calls traced, every hundredth, and twice none. In each round of a turn the same calls are made with the same seeds,
so the tokens are the same; each of `sessions` callers makes `calls` of them one after the other, so most spans are sent
while others are served. A short rest behind each round is for the last ones: spans wait DELAY for each other here, not
the five seconds of a service (`OTEL_BSP_SCHEDULE_DELAY`), and more messages can only cost more. Figures are ratios
within a turn, to the mean of its two untraced rounds; the one of these over the other shows what the measurement itself
is worth.

It is done twice, `minutes` each. `all cores`: as a user runs it; a core is idle now and then, and what it does then is
free. `one core`: services and Redis on one, which is never idle, client and collector on the others: what tracing takes
is missing from serving, to the microsecond, and only other users of that core disturb it. Of each are told tokens a
second on the wall clock, and CPU seconds of all services a token. Verifier and drafter compute on one thread each,
since threads that meet at barriers burn time while they wait for a core. Of each the mean over the turns without the
lowest and the highest tenth, with a bootstrapped 95 % interval. The last lines are the cost of a request's spans alone,
in this process. Results go to bench/results/tracing.json with commit and machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent import futures
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import grpc
from opentelemetry import trace

from bench.arguments import number, whole_from
from bench.subjects import machine
from hedgerow.cli.ports import free_ports
from hedgerow.cli.supervisor import Stack, StackConfig, find_checkout
from hedgerow.client import AsyncClient

RESULTS = Path("bench/results/tracing.json")
EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
ROOT = find_checkout()
SERVICES = ("kvstore", "drafter", "verifier", "gateway")
LEAST = 2  # turns
TRIMMED = 0.1  # of the turns, at each end
DELAY = 1.0  # seconds that a service's spans wait for each other
REST = 1.2  # seconds behind a round: what is sent there belongs to it
SHARES = {"all": 1.0, "1 in 100": 0.01, "none": 0.0, "none again": 0.0}


class Sink(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # not generic at run time
    """Takes every batch and keeps its size."""

    def __init__(self, taken: Any) -> None:
        self._taken = taken

    def service(self, call: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        """The collector's one method."""
        if call.method != EXPORT:
            return None
        return grpc.unary_unary_rpc_method_handler(self._export)

    def _export(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        with self._taken.get_lock():
            self._taken.value += len(request)
        return b""


def collect(port: int, taken: Any) -> None:
    """A process: the collector."""
    os.nice(19)
    server = grpc.server(futures.ThreadPoolExecutor(2), handlers=[Sink(taken)])
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    server.wait_for_termination()


def cpu(stack: Stack) -> list[float]:
    """Seconds of each service so far: by its own clock, since what the kernel tells otherwise is in hundredths."""
    return [time.clock_gettime(~stack.pid(name) << 3 | 2) for name in SERVICES]  # CPUCLOCK_SCHED, of a process


async def call(client: AsyncClient, seed: int, tokens: int, *, traced: bool) -> int:
    """One generation, under a caller's context that decides; its tokens."""
    flags = trace.TraceFlags(int(traced))
    here = trace.SpanContext(
        random.getrandbits(128) | 1, random.getrandbits(64) | 1, is_remote=False, trace_flags=flags
    )
    with trace.use_span(trace.NonRecordingSpan(here)):
        stream = client.generate("def main(", max_tokens=tokens, ignore_eos=True, seed=seed, temperature=0.8)
    return len((await stream.result()).tokens)


class Round(NamedTuple):
    """Tokens a second, and CPU seconds a token: of all services, and of each."""

    throughput: float
    cpu: float
    by_service: Sequence[float]


class Rounds:
    """Rounds of calls on one stack; of the calls of all rounds with a share, that share is traced."""

    def __init__(self, stack: Stack, client: AsyncClient, given: argparse.Namespace) -> None:
        self._stack, self._client, self._given = stack, client, given
        self._owed: dict[float, float] = {}

    def _is_traced(self, share: float) -> bool:
        owed = self._owed.get(share, 0.0) + share
        self._owed[share] = owed - (owed >= 1)
        return owed >= 1

    async def run(self, share: float, seed: int) -> Round:
        """Equal seeds give equal tokens."""
        begun, spent = time.perf_counter(), cpu(self._stack)
        made = sum(await asyncio.gather(*(self._caller(share, seed + n) for n in range(self._given.sessions))))
        seconds = time.perf_counter() - begun
        await asyncio.sleep(REST)
        by_service = [(now - then) / made for now, then in zip(cpu(self._stack), spent, strict=True)]
        return Round(made / seconds, sum(by_service), by_service)

    async def _caller(self, share: float, seed: int) -> int:
        made, given = 0, self._given
        for n in range(given.calls):
            traced = self._is_traced(share)
            made += await call(self._client, seed + n * given.sessions, given.tokens, traced=traced)
        return made


async def measure(stack: Stack, given: argparse.Namespace) -> dict[str, Any]:
    """Ratios by share of traced calls, of as many turns as there is time for."""
    choose, spent, more = random.Random(0), list[float](), list[list[float]]()
    ratios: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in list(SHARES)[:3]}
    async with AsyncClient(stack.address("gateway")) as client:
        rounds = Rounds(stack, client, given)
        for n in range(3):
            await rounds.run(1.0, n)
        turn, end = 0, time.monotonic() + 60 * given.minutes
        while turn < given.turns and (turn < LEAST or time.monotonic() < end):
            turn += 1
            order = choose.sample(list(SHARES), len(SHARES))
            done = {name: await rounds.run(SHARES[name], given.calls * given.sessions * turn) for name in order}
            one, other = done["none"], done["none again"]
            for at, what in enumerate(("throughput", "cpu")):
                base = (getattr(one, what) + getattr(other, what)) / 2
                for name in ("all", "1 in 100"):
                    ratios[name][at].append(getattr(done[name], what) / base)
                ratios["none"][at].append(getattr(one, what) / getattr(other, what))
            spent += [one.cpu, other.cpu]
            three = zip(done["all"].by_service, one.by_service, other.by_service, strict=True)
            more.append([1e6 * (traced - (first + second) / 2) for traced, first, second in three])
            each = zip(SERVICES, zip(*more, strict=True), strict=True)
            where = ", ".join(f"{name} {trimmed(values):+.1f}" for name, values in each)
            shown = "; ".join(line(name, both) for name, both in ratios.items())
            print(f"turn {turn}: {shown}; us a token of {1e6 * statistics.median(spent):.0f}: {where}", flush=True)
    known = {name: {"throughput": spread(both[0]), "cpu_per_token": spread(both[1])} for name, both in ratios.items()}
    by_service = {name: spread(list(each)) for name, each in zip(SERVICES, zip(*more, strict=True), strict=True)}
    return known | {
        "turns": turn,
        "untraced_cpu_us_per_token": round(1e6 * statistics.median(spent), 1),
        "more_cpu_us_per_token_where_all_are_traced": by_service,
    }


def line(name: str, both: tuple[list[float], list[float]]) -> str:
    """For who watches."""
    return f"{name}: throughput x{trimmed(both[0]):.3f}, CPU x{trimmed(both[1]):.3f}"


def trimmed(values: Sequence[float]) -> float:
    """Their mean without the lowest and the highest."""
    cut = int(TRIMMED * len(values))
    return statistics.fmean(sorted(values)[cut : len(values) - cut])


def spread(ratios: list[float]) -> dict[str, float]:
    """The trimmed mean, and where it would lie with 95 % of other such turns."""
    draw = random.Random(0)
    means = sorted(trimmed(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
    return {"mean": round(trimmed(ratios), 4), "low": round(means[50], 4), "high": round(means[1949], 4)}


def alone(traced: bool, steps: int = 60) -> float:
    """Microseconds of one request's spans in the gateway, without a wire: what it adds to the event loop."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

    from hedgerow.rpc import tracing
    from services.gateway.messages import Timings
    from services.gateway.session import Options
    from services.gateway.spans import Spans
    from services.gateway.types import Finish, Trace
    from tests.unit.gateway_peers import Bench, record, update

    tracing._TRACER = TracerProvider(sampler=ParentBased(TraceIdRatioBased(1.0))).get_tracer("bench")

    def request(spans: Spans | None) -> None:
        bench = Bench(watcher=spans)
        options = Options()
        if spans is not None:
            _, told = spans.begin("x/Generate", Trace(f"00-{1:032x}-{2:016x}-0{int(traced)}", ""))
            options = Options(trace=told)
        session = bench.begin(record(max_tokens=4 * steps), options)
        for n in range(steps):
            step = update(session, [1, 2, 3, 4])
            bench.step(step if n < steps - 1 else step._replace(finish=Finish.LENGTH, timings=Timings(queue_ns=1)))
            bench.acknowledge()
        if spans is not None:
            spans.ended(options.trace, None)

    best = [float("inf"), float("inf")]
    for _ in range(100):  # in turns, on this thread's own clock
        for at, spans in enumerate((Spans(), None)):
            begun = time.thread_time()
            for _ in range(5):
                request(spans)
            best[at] = min(best[at], (time.thread_time() - begun) / 5)
    return round(1e6 * (best[0] - best[1]), 1)


def place(cores: Sequence[int]) -> None:
    """This thread, and what it starts from now on, runs there."""
    os.sched_setaffinity(0, cores)


def stacks(given: argparse.Namespace, port: int) -> Iterator[tuple[str, Stack]]:
    """A running stack each time, and on what; this process is beside it where there is room."""
    model, drafter = ROOT / "models" / "sapling", ROOT / "models" / "sapling-dflash"
    settings = {name: {"OTLP_ENDPOINT": f"127.0.0.1:{port}"} for name in SERVICES}
    for name in ("drafter", "verifier"):
        settings[name]["THREADS"] = "1"
    cores = sorted(os.sched_getaffinity(0))
    for what, services, here in (("all cores", cores, cores), ("one core", cores[:1], cores[1:])):
        if not here:
            print("one core is not measured apart: there is no other one for the client")
            continue
        with TemporaryDirectory() as data:
            place(services)
            with Stack(StackConfig(ROOT, model, Path(data), drafter=drafter, settings=settings)) as stack:
                place(here)
                yield what, stack
            place(cores)


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description="What tracing costs.")
    parser.add_argument("--minutes", type=number(0), default=9, help="of each part")
    parser.add_argument("--turns", type=whole_from(1), default=1000, help="of each part, at most")
    parser.add_argument("--sessions", type=whole_from(1), default=8)
    parser.add_argument("--calls", type=whole_from(1), default=3)
    parser.add_argument("--tokens", type=whole_from(1), default=128)
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    port = next(free_ports(1))
    context = multiprocessing.get_context("spawn")
    taken = context.Value("q", 0)
    collector = context.Process(target=collect, args=(port, taken), daemon=True)
    collector.start()
    os.environ["OTEL_BSP_SCHEDULE_DELAY"] = str(round(1000 * DELAY))  # the services inherit it
    ratios = {}
    for what, stack in stacks(given, port):
        print(what, flush=True)
        ratios[what] = asyncio.run(measure(stack, given))
    spans = {"traced_us": alone(True), "untraced_us": alone(False)}
    result = {
        "machine": machine(), "sessions": given.sessions, "calls": given.calls, "tokens": given.tokens,
        "traced_against_untraced": ratios, "spans_of_a_request_of_60_steps": spans, "bytes_taken": taken.value,
    }  # fmt: skip
    assert taken.value > 0, "the collector took nothing"
    given.results.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    collector.terminate()


if __name__ == "__main__":
    main()
