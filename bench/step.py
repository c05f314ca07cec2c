"""Where a step's time goes, in this process, without services: the target's forward pass, the draft, and all the rest.

    python -m bench.step --sequences 1 8 --budgets 0 8 16

First the rate of a prompt of 512 tokens in chunks of 256. Then one line a combination: medians over steps in which
every sequence decodes, in milliseconds. `rest` is planning, the draft message, tree checks, draws, walks, cache moves
and updates. On a GPU `forward` and `draft` are the launches and what is waited for in them; the end of the forward pass
is waited for in `rest`. `host` is all but the waiting: what a faster GPU would leave. From 300 steps on, the first and
the last tenth are shown apart: nothing but attention may grow with the length.

With --fed each line is measured twice, in turns: steps that wait for each other, and steps that feed each other on the
GPU (hedgerow/engine/fed.py). The latter's `forward` is launch and waiting, the draft's too, and `host` runs beside the
next step; `graph` is what the GPU takes from the step's graph being launched, and free for it, to its end.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

from hedgerow.model.blas import pin_blas

pin_blas(os.environ)  # before torch is loaded, as the services do

import torch  # noqa: E402

from bench.arguments import whole_from  # noqa: E402
from bench.drive import Job  # noqa: E402
from bench.subjects import Subjects, machine  # noqa: E402
from hedgerow.engine.config import EngineConfig  # noqa: E402
from hedgerow.engine.fed import FedVerifier  # noqa: E402
from hedgerow.engine.step import step_here  # noqa: E402
from hedgerow.engine.types import Sampling  # noqa: E402
from hedgerow.model.batch import SequenceRows  # noqa: E402
from hedgerow.model.fed import FedSteps, fed_steps  # noqa: E402

PROMPT = 64  # tokens, the end of a head
PREFILL, CHUNK = 512, 256
SETTINGS = {"greedy": Sampling(), "seeded": Sampling(temperature=0.8, top_p=0.95)}


class Sample(NamedTuple):
    """One step."""

    tokens: int  # emitted, all sequences together
    wall: float  # ms
    forward: float
    draft: float
    host: float  # without the waiting for a GPU


class Timed:
    """FedSteps whose steps are timed on the device."""

    def __init__(self, steps: FedSteps) -> None:
        self._steps, self._marks = steps, list[tuple[torch.cuda.Event, torch.cuda.Event]]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._steps, name)

    def launch(self, asked: Sequence[int]) -> Any:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        launched = self._steps.launch(asked)
        end.record()
        self._marks.append((begin, end))
        return launched

    def take(self) -> float:
        """The median in ms of the steps since the last look."""
        torch.cuda.synchronize()
        marks, self._marks = self._marks, []
        return round(float(statistics.median(begin.elapsed_time(end) for begin, end in marks)), 3)


def measure(
    subjects: Subjects, sampling: Sampling, sequences: int, budget: int, steps: int, feed: FedSteps | None = None
) -> list[Sample]:
    """The first `steps` steps in which all sequences decode."""
    config = EngineConfig(max_sequences=sequences, pages=sequences * 64)
    engine = FedVerifier(subjects.model, config, subjects.vocabulary, subjects.eos)
    engine.feed(feed)
    drafter, samples = subjects.drafter(), list[Sample]()
    for n in range(sequences):
        prompt = subjects.prompts[n % len(subjects.prompts)][-PROMPT:]
        engine.start(Job(f"s{n}", prompt, sampling, budget).start())
    while len(samples) < steps:
        begun, before = time.perf_counter(), waited(subjects)
        result = step_here(engine, drafter)
        wall = (time.perf_counter() - begun) * 1e3
        host = wall - (waited(subjects) - before) * 1e3
        if result is None or any(update.finish for update in result.updates):
            break
        if len(result.updates) == sequences and all(update.offset for update in result.updates):
            emitted = sum(len(update.tokens) for update in result.updates)
            timings = result.timings
            samples.append(Sample(emitted, wall, timings.verify_ns / 1e6, timings.draft_ns / 1e6, host))
        for update in result.updates:
            engine.committed(update.session_id, update.epoch, update.attempt, update.offset + len(update.tokens))
    return samples


def waited(subjects: Subjects) -> float:
    """Seconds that this process has waited for a GPU."""
    devices = (getattr(model, "device", None) for model in (subjects.model, subjects.draft_model))
    return float(sum(device.waited for device in devices if device is not None))


def prefill(subjects: Subjects, repeats: int = 7) -> dict[str, float]:
    """Tokens a second of a prompt of PREFILL tokens in chunks of CHUNK, the last one with logits: median and best."""
    tokens = [token for prompt in subjects.prompts[:8] for token in prompt][:PREFILL]
    pages, rates = range(PREFILL // 64), list[float]()
    for _ in range(repeats):
        cache, begun = subjects.model.new_cache(len(pages)), time.perf_counter()
        for first in range(0, PREFILL, CHUNK):
            wanted = [CHUNK - 1] if first + CHUNK == PREFILL else []
            rows = SequenceRows(first, pages, tokens[first : first + CHUNK], range(-1, CHUNK - 1), wanted, True)
            subjects.model.forward([rows], cache)
        rates.append(PREFILL / (time.perf_counter() - begun))
    return {"prefill_tokens_per_second": round(statistics.median(rates)), "best": round(max(rates))}


def line(samples: Sequence[Sample]) -> dict[str, float]:
    """Medians in ms, and tokens a second over all of the samples."""

    def median(values: Sequence[float]) -> float:
        return round(statistics.median(values), 3)

    return {
        "steps": len(samples),
        "wall": median([s.wall for s in samples]),
        "forward": median([s.forward for s in samples]),
        "draft": median([s.draft for s in samples]),
        "rest": median([s.wall - s.forward - s.draft for s in samples]),
        "host": median([s.host for s in samples]),
        "steps_per_second": round(1e3 * len(samples) / sum(s.wall for s in samples), 1),
        "tokens_per_second": round(1e3 * sum(s.tokens for s in samples) / sum(s.wall for s in samples), 1),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.step", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", type=Path, default=Path("models/sapling"))
    parser.add_argument("--drafter", type=Path, default=Path("models/sapling-dflash"))
    parser.add_argument("--heads", type=Path, default=Path("models/heldout/heads.jsonl"))
    parser.add_argument("--tiny", action="store_true", help="random weights instead of the bundled model")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--sequences", type=whole_from(1), nargs="+", default=[1, 8])
    parser.add_argument("--budgets", type=whole_from(0), nargs="+", default=[0, 8, 16])
    parser.add_argument("--steps", type=whole_from(1), default=40)
    parser.add_argument("--fed", action="store_true", help="steps that feed each other beside those that wait")
    parser.add_argument("--threads", type=whole_from(1), default=1)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    if args.tiny:
        subjects = Subjects.tiny()
    else:
        subjects = Subjects.read(
            args.model, args.drafter, args.heads, most_tokens=1024, threads=args.threads, device=args.device
        )
    print(json.dumps(subjects.identity | machine() | {"threads": args.threads}))
    print(json.dumps(prefill(subjects)), flush=True)
    steps = fed_steps(subjects.model, subjects.draft_model) if args.fed else None
    if args.fed and steps is None:
        parser.error("--fed: the models are not on one GPU")
    feeds = [None] if steps is None else [None, cast(FedSteps, Timed(steps))]
    for name, base in SETTINGS.items():
        for sequences, budget in itertools.product(args.sequences, args.budgets):
            sampling = replace(base, max_tokens=3000, ignore_eos=True, seed=1)
            for feed in feeds:
                if args.fed:
                    measure(subjects, sampling, sequences, budget, 8, feed)  # records what is new
                    if isinstance(feed, Timed):
                        feed.take()
                samples = measure(subjects, sampling, sequences, budget, args.steps, feed)
                key = {"setting": name, "sequences": sequences, "budget": budget} | {"fed": feed is not None}
                inside = {"graph": feed.take()} if isinstance(feed, Timed) else {}
                print(json.dumps(key | line(samples) | inside), flush=True)
                if len(samples) >= 300:
                    tenth = len(samples) // 10
                    for part, some in (("first tenth", samples[:tenth]), ("last tenth", samples[-tenth:])):
                        print(json.dumps({"part": part} | line(some)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
