"""One TP=8 rank of K2.6 under mixed load: eight streams that decode while a long prompt is computed beside them.

    python -m bench.rank_mixed [--budgets 0 7] [--factors 0 1.7 2 3] [--length 32768] [--windows 0]

The engine and its pace as a verifier has them, over a rank with drawn weights (bench/rank_model.py), without
communication; routing is uniform. Streams stand at `--context` tokens, each with pages of its own that nobody computed;
their trees have `--budgets` nodes and are never right, so a step brings one token each. `--alone` steps are timed, then
the prompt joins, and steps are timed until its first token. With `--windows N` only as many stretches of the prompt are
computed, `--stretch` steps each after as many that are not counted, and the time to the first token is reckoned from
their rates. Features go to the host in every step, as for a drafter. Results: bench/results/rank-mixed.json.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.arguments import number, whole_from
from bench.drive import Job
from bench.mixed import LONG, beside, settled, timed
from bench.rank_floor import routing
from bench.rank_model import COMMON, Drawn, RankModel, rank_config, rank_sizes
from bench.serving import percentile
from bench.subjects import machine
from hedgerow.engine.config import EngineConfig
from hedgerow.engine.tree import TreeConfig
from hedgerow.engine.types import DraftAnswer, DraftBatch, DraftTree, Sampling, StepResult, TreeNodes
from hedgerow.engine.verifier import VerifierEngine
from hedgerow.model.cuda import LEAST_ROOM
from hedgerow.model.cuda_cache import CudaCache
from hedgerow.model.cuda_graph import prepare_all
from hedgerow.model.cuda_plan import SEQUENCES, Shape, at_least, bucket
from hedgerow.model.cuda_shapes import BESIDE, ROWS, WANTED
from kernels.gpu.row_layout import DEEPEST

TAPS = (1, 12, 24, 35, 47, 58)
MOST = 3072  # tokens that a stream may decode
WAY = Path("bench/results/rank-mixed.json")


class Rank(RankModel):
    """One cache, which every engine gets."""

    own: CudaCache | None = None

    def new_cache(self, pages: int) -> CudaCache:
        if self.own is None:
            self.own = super().new_cache(pages)
        assert self.own.pages >= pages
        return self.own


class Guesses:
    """A drafter whose trees, all chains, are never right."""

    def __init__(self, vocabulary: int) -> None:
        self._draw, self._vocabulary = random.Random(0), vocabulary

    def propose(self, batch: DraftBatch) -> DraftAnswer:
        trees = []
        for work in batch.works:
            count = work.budget
            tokens = [self._draw.randrange(self._vocabulary) for _ in range(count)]
            nodes = TreeNodes(tokens, range(-1, count - 1), [-1.0] * count)
            trees.append(DraftTree(work.sequence, nodes, work.anchor_position))
        return DraftAnswer(batch.step_id, trees, b"guesses")


class Found(NamedTuple):
    """Milliseconds between steps, and until the first token."""

    alone: Sequence[float]
    beside: Sequence[float]
    first_token: float
    rows: float  # of the prompt in a step, on average


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args, device = args, torch.device("cuda", 0)
        self.config = rank_config(rank_sizes(args.layers))
        taps = [tap for tap in TAPS if tap < args.layers]
        most = args.streams * TreeConfig(max(args.budgets)).q_len + args.prefill_rows
        rows = max(LEAST_ROOM, at_least(most, ROWS))
        self.model = Rank(self.config, Drawn(device), taps, rows)
        own = -(-(args.context + MOST + 64) // 64)
        self.pages = args.streams * own + -(-(args.length + 64) // 64)
        self.cache = self.model.fill(self.pages)
        draw = torch.Generator(device).manual_seed(1)
        self.model.routing[:] = routing(self.config, rows, 1, 0.0, draw, COMMON)
        self.vocabulary = [b""] * self.config.vocab_size
        self.choose = random.Random(2)

    def prepare(self) -> None:
        """Records the steps that will be met, as a verifier does before its first request."""
        self.model._prepare(self.model._room.rows)  # the cache has grown: what is recorded before is dropped
        pages, shapes = self.model._most_pages, list[Shape]()
        room, streams = self.model._room.rows, self.args.streams
        for budget in self.args.budgets:
            own = streams * TreeConfig(budget).q_len
            trees = bucket(own)
            shapes.append(Shape(trees, trees, at_least(streams, SEQUENCES), pages, True, False, True))
            for rows in (size for size in ROWS if own < size <= room):
                chunk = min(rows - own, self.args.prefill_rows)  # counts as so many places, one more at some positions
                for places in range(streams + 1, streams + 2 + -(-chunk // DEEPEST)):
                    beside = at_least(places, BESIDE)
                    shape = Shape(rows, min(rows, at_least(own, WANTED)), beside, pages, True, True)
                    last = shape._replace(wanted=min(rows, at_least(own + 1, WANTED)))
                    shapes += [shape._replace(whole=True), last]
        every = list(dict.fromkeys(shapes))
        prepare_all("a step", every, lambda shape: self.model._passes[shape].launch, self.model.device)
        settled()

    def tokens(self, count: int) -> list[int]:
        return [self.choose.randrange(self.config.vocab_size) for _ in range(count)]

    def engine(self, budget: int, factor: float) -> VerifierEngine:
        """With streams that decode."""
        a = self.args
        config = EngineConfig(
            max_sequences=a.streams + 1, pages=self.pages, prefill_factor=factor, prefill_rows=a.prefill_rows,
            prefix_cache="off", max_budget=max(budget, 1), default_budget=0, feature_ring=64, prefix_feature_bytes=0,
        )  # fmt: skip
        engine = VerifierEngine(self.model, config, self.vocabulary, frozenset())
        endless = Sampling(max_tokens=MOST, ignore_eos=True, temperature=0.0)
        for n in range(a.streams):
            engine.start(Job(f"s{n}", self.tokens(a.context), endless, budget).start())
        assert engine.plan() is not None  # admits them; a plan may be dropped
        for n in range(a.streams):
            stream = engine.sequence(f"s{n}")
            assert stream is not None
            stream.cached = a.context - 1  # the cache holds something there, and what does not matter
            if stream.features is not None:
                stream.features.skip(stream.cached)
        return engine

    def measure(self, budget: int, factor: float) -> Found:
        engine, drafter, a = self.engine(budget, factor), Guesses(self.config.vocab_size), self.args

        def step() -> StepResult | None:
            plan = engine.plan()
            return None if plan is None else engine.verify(plan, drafter.propose(plan.draft))

        for _ in range(a.warm):
            timed(engine, step)
        alone = [timed(engine, step)[0] for _ in range(a.alone)]
        engine.start(Job(LONG, self.tokens(a.length), Sampling(max_tokens=1, ignore_eos=True), 0).start())
        if not a.windows or factor in a.whole:
            found = beside(engine, step)
            return Found(alone, found, sum(found), a.length / len(found))
        found, first, rows = list[float](), 0.0, 0
        for window in range(a.windows):
            timed(engine, step)
            prompt = engine.sequence(LONG)
            assert prompt is not None
            prompt.cached = begun = a.length * window // a.windows
            several = [timed(engine, step)[0] for _ in range(2 * a.stretch)][a.stretch :]
            done = (prompt.cached - begun) / 2  # of two stretches, in which a pace is found and kept
            found, rows = found + several, rows + done
            first += a.length / a.windows / done * sum(several)
        return Found(alone, found, first, rows / len(found))


def line(budget: int, factor: float, found: Found) -> dict[str, Any]:
    def ratio(share: float) -> float:
        return round(percentile(found.beside, share) / percentile(found.alone, share), 2)

    return {
        "budget": budget,
        "factor": factor,
        "alone_ms": round(statistics.median(found.alone), 2),
        "p99_alone_ms": round(percentile(found.alone, 0.99), 2),
        "beside_ms": round(statistics.median(found.beside), 2),
        "p99_beside_ms": round(percentile(found.beside, 0.99), 2),
        "p50_ratio": ratio(0.5),
        "p99_ratio": ratio(0.99),
        "rows": round(found.rows, 1),
        "first_token_s": round(found.first_token / 1e3, 2),
        "steps_beside": len(found.beside),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.rank_mixed", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--streams", type=whole_from(1), default=8)
    parser.add_argument("--budgets", type=whole_from(0), nargs="+", default=[0, 7])
    parser.add_argument("--factors", type=number(0), nargs="+", default=[0.0, 1.7, 2.0, 3.0])
    parser.add_argument("--context", type=whole_from(1), default=8192, help="tokens that streams have")
    parser.add_argument("--length", type=whole_from(1), default=32768, help="tokens of the long prompt")
    parser.add_argument("--prefill-rows", type=whole_from(1), default=256, help="HEDGEROW_PREFILL_ROWS")
    parser.add_argument("--windows", type=whole_from(0), default=0, help="stretches of the prompt; 0: all of it")
    parser.add_argument(
        "--whole", type=number(0), nargs="*", default=[], help="factors with which all of it is computed"
    )
    parser.add_argument("--stretch", type=whole_from(1), default=12)
    parser.add_argument("--warm", type=whole_from(0), default=40)
    parser.add_argument("--alone", type=whole_from(1), default=100)
    parser.add_argument("--layers", type=whole_from(1), default=61)
    parser.add_argument("--seconds", type=number(1), default=float("inf"), help="nothing is begun after so many")
    parser.add_argument("--out", type=Path, default=WAY)
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    begun = time.monotonic()
    bench = Bench(args)
    torch.cuda.synchronize()
    print(f"{torch.cuda.memory_allocated() / 1e9:.1f} GB made after {time.monotonic() - begun:.0f} s", flush=True)
    bench.prepare()
    print(f"prepared after {time.monotonic() - begun:.0f} s", flush=True)
    found = list[dict[str, Any]]()
    for budget in args.budgets:
        for factor in args.factors:
            if time.monotonic() - begun > args.seconds:
                print(f"budget {budget}, factor {factor:g}: no time left")
                continue
            found.append(line(budget, factor, bench.measure(budget, factor)))
            print(json.dumps(found[-1]), flush=True)
    if not found:
        return 1
    asked = {
        name: getattr(args, name) for name in ("streams", "context", "length", "prefill_rows", "windows", "layers")
    }
    made = {"machine": machine(), "device": torch.cuda.get_device_name(), "law": bench.model.kernel_law, **asked}
    args.out.write_text(json.dumps({**made, "cells": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
