"""The whole stack on one machine, through the SDK: rates by streams and budgets, where a step's time goes, and killed
verifiers.

    python -m bench.stack rates --device cuda     steps and tokens a second; ms a step in the verifier and the drafter
    python -m bench.stack kills --device cuda     eight streams whose verifiers are killed at random steps

`rates` counts while all streams decode. Of a step: `draft` is the verifier's wait for trees, `device` what both
processes wait for a GPU, `verifier_host` and `drafter_host` their own time, `around` what is left of the wall clock:
messages, the event loop, steps that wait for work. `fed`: the share of steps that fed the next one on the GPU. With
--drafter-in-process there is one process, and all that it does for trees is in `draft` and in `verifier_host`. `kills`
compares every token with an undisturbed plain run.
Results go to bench/results/stack-<part>-<device>.json (-in-process.json) with commit and machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from bench.arguments import number, whole_from
from bench.subjects import machine
from hedgerow.cli.supervisor import Stack, StackConfig, find_checkout
from hedgerow.client import AsyncClient
from hedgerow.v1 import admin_pb2, admin_pb2_grpc

RESULTS = Path("bench/results")
SETTINGS: dict[str, dict[str, Any]] = {"greedy": {}, "t08-p095": {"temperature": 0.8, "top_p": 0.95}}
BUDGETS = (0, 7, 16, 63)  # of killed streams, in turns


@dataclass
class Stream:
    """What came of one generation, and when."""

    tokens: list[int] = field(default_factory=list)
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    moments: list[float] = field(default_factory=list)  # perf_counter seconds of each chunk
    counts: list[int] = field(default_factory=list)
    steps: list[tuple[int, float]] = field(default_factory=list)  # id, moment


async def generate(
    client: AsyncClient, prompt: str, count: int, budget: int, seed: int, setting: str, into: Stream | None = None
) -> Stream:
    stream = into or Stream()
    options: dict[str, Any] = {"max_tokens": count, "budget": budget, "ignore_eos": True, "seed": seed}
    try:
        async for chunk in client.generate(prompt, return_steps=True, **options, **SETTINGS[setting]):
            now = time.perf_counter()
            stream.tokens += chunk.tokens
            stream.moments.append(now)
            stream.counts.append(len(chunk.tokens))
            stream.steps += [(step.step_id, now) for step in chunk.steps]
            stream.begun.set()
    finally:
        stream.begun.set()
    return stream


class Numbers:
    """Every counter of verifier and drafter."""

    def __init__(self, stack: Stack) -> None:
        services = {"verifier", "drafter"}.intersection(stack.services)
        self._channels = [grpc.aio.insecure_channel(stack.admin_address(service)) for service in services]
        self._stubs = [admin_pb2_grpc.AdminServiceStub(channel) for channel in self._channels]  # type: ignore[no-untyped-call]

    async def read(self) -> dict[str, float]:
        asked = [stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=10) for stub in self._stubs]
        return {name: value for status in await asyncio.gather(*asked) for name, value in status.numbers.items()}

    async def close(self) -> None:
        await asyncio.gather(*(channel.close(None) for channel in self._channels))


def together(streams: Sequence[Stream]) -> dict[str, float]:
    """Steps and tokens a second while all streams decode: after the last one's first chunk, until one ends."""
    begin, end = max(stream.moments[0] for stream in streams), min(stream.moments[-1] for stream in streams)
    tokens = sum(n for s in streams for t, n in zip(s.moments, s.counts, strict=True) if begin < t <= end)
    steps = {step for s in streams for step, t in s.steps if begin < t <= end}
    return {"steps_s": round(len(steps) / (end - begin), 1), "tok_s": round(tokens / (end - begin), 1)}


def split(before: dict[str, float], after: dict[str, float], wall: float, hosted: bool = False) -> dict[str, float]:
    """Milliseconds a step, and the share of steps that fed the next one; `hosted`: the drafter is in the verifier's
    process."""

    def spent(*names: str) -> float:
        return sum(after.get(f"hedgerow_{name}", 0.0) - before.get(f"hedgerow_{name}", 0.0) for name in names)

    steps = max(spent("verifier_steps_total"), 1.0)
    step, draft = spent("verifier_step_seconds_sum"), spent("verifier_draft_seconds_sum")
    device = spent("verifier_device_wait_seconds_total")
    drafted = spent("drafter_forward_seconds_sum", "drafter_build_seconds_sum")
    draft_device = spent("drafter_device_wait_seconds_total")
    parts = {
        "step": step,
        "draft": draft,
        "device": device + draft_device,
        "verifier_host": step - device - (0.0 if hosted else draft),
        "drafter_host": drafted - draft_device,
        "around": wall - step,
    }
    fed = round(spent("verifier_fed_steps_total") / steps, 3)
    return {f"{name}_ms": round(1e3 * seconds / steps, 3) for name, seconds in parts.items()} | {"fed": fed}


async def rates(client: AsyncClient, stack: Stack, prompts: Sequence[str], args: argparse.Namespace) -> dict[str, Any]:
    out, counters = dict[str, Any](), Numbers(stack)
    for setting in SETTINGS:
        for count in args.streams:
            for budget in args.budgets:
                chosen = [(prompts[n % len(prompts)], Stream()) for n in range(count)]
                runs = [
                    asyncio.create_task(generate(client, p, args.tokens, budget, n, setting, into=stream))
                    for n, (p, stream) in enumerate(chosen)
                ]
                for _, stream in chosen:  # prompts are not decoding
                    await stream.begun.wait()
                before, begun = await counters.read(), time.perf_counter()
                await asyncio.wait(runs, return_when=asyncio.FIRST_COMPLETED)
                after, wall = await counters.read(), time.perf_counter() - begun
                figures = together(await asyncio.gather(*runs)) | split(before, after, wall, args.drafter_in_process)
                out[f"{setting} {count} streams, budget {budget}"] = figures
                print(f"{setting} {count:2} streams, budget {budget:2}: {json.dumps(figures)}", flush=True)
    await counters.close()
    return out


async def kills(client: AsyncClient, stack: Stack, prompts: Sequence[str], args: argparse.Namespace) -> dict[str, Any]:
    """Rounds of eight streams a setting, all but one verifier killed in each; then what differed."""
    choose, out = random.Random(args.seed), dict[str, Any]()
    for setting in SETTINGS:
        wanted = [await generate(client, prompts[n], args.tokens, 0, n, setting) for n in range(8)]
        killed = differ = tokens = moved = 0
        for _ in range(args.rounds):
            for name in stack.names("verifier"):
                await asyncio.to_thread(stack.wait_ready, name, 120.0)
            runs = [
                asyncio.create_task(generate(client, prompts[n], args.tokens, BUDGETS[n % 4], n, setting))
                for n in range(8)
            ]
            for name in choose.sample(stack.names("verifier"), len(stack.names("verifier")) - 1):
                await asyncio.sleep(choose.uniform(0.05, args.pause))
                if not all(run.done() for run in runs):
                    killed += 1
                    await asyncio.to_thread(stack.kill, name)
            for got, whole in zip(await asyncio.gather(*runs), wanted, strict=True):
                tokens += len(got.tokens)
                differ += got.tokens != whole.tokens
                moved += max((b - a for a, b in zip(got.moments, got.moments[1:], strict=False)), default=0.0) > 0.1
        out[setting] = {"killed": killed, "tokens": tokens, "streams_that_differ": differ, "streams_held_up": moved}
        print(f"{setting}: {json.dumps(out[setting])}", flush=True)
    return out


PARTS = {"rates": rates, "kills": kills}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.stack", description=__doc__.split("\n", 1)[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", type=Path, default=Path("models/sapling"))
    parser.add_argument("--drafter", type=Path, default=Path("models/sapling-dflash"))
    parser.add_argument("--drafter-in-process", action="store_true", help="in the verifiers' processes")
    parser.add_argument("--heads", type=Path, default=Path("models/heldout/heads.jsonl"))
    parser.add_argument("--streams", type=whole_from(1), nargs="+", default=[1, 8, 32])
    parser.add_argument("--budgets", type=whole_from(0), nargs="+", default=[0, 7, 16])
    parser.add_argument("--tokens", type=whole_from(1), default=600)
    parser.add_argument("--verifiers", type=whole_from(1), default=1)
    parser.add_argument("--rounds", type=whole_from(1), default=3)
    parser.add_argument("--pause", type=number(0), default=0.5, help="most seconds between two kills")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    prompts = [json.loads(line)["prompt"] for line in args.heads.read_text().splitlines()]
    settings = {service: {"DEVICE": args.device} for service in ("verifier", "drafter")}

    async def measure(stack: Stack) -> dict[str, Any]:
        async with AsyncClient(stack.address("gateway")) as client:
            await generate(client, prompts[0], 32, 7, 0, "greedy")
            return await PARTS[args.part](client, stack, prompts, args)

    with tempfile.TemporaryDirectory(prefix="hedgerow-bench-") as data:
        config = StackConfig(
            find_checkout(), args.model.resolve(), Path(data), args.drafter.resolve(), verifiers=args.verifiers,
            hosted=args.drafter_in_process, settings=settings,
        )  # fmt: skip
        begun = time.perf_counter()
        with Stack(config) as stack:
            ready = round(time.perf_counter() - begun, 1)
            print(f"the whole stack is ready after {ready} s", flush=True)
            figures = asyncio.run(measure(stack))
    result = {"machine": machine(), "device": args.device, "startup_s": ready, args.part: figures}
    RESULTS.mkdir(exist_ok=True)
    where = "-in-process" if args.drafter_in_process else ""
    (RESULTS / f"stack-{args.part}-{args.device}{where}.json").write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
