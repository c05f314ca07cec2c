"""Tokens per decode step on held-out prompts: chain against trees, through the engine in this process.

    python -m bench.acceptance --prompts 100 --tokens 96

Tokens per step counts what decode steps emit, bonus included; the prompt's own step, which emits the first token, is
left out on both sides. A chain is a tree with one candidate a depth (topk_cap 1) and the block's depth as its budget.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from bench.drive import Job, drive_now
from bench.subjects import Subjects, machine
from hedgerow.engine.config import EngineConfig
from hedgerow.engine.types import Sampling
from hedgerow.engine.verifier import VerifierEngine

SHAPES = {
    "chain 7": (7, 1),
    "tree 4": (4, 0),
    "tree 8": (8, 0),
    "tree 12": (12, 0),
    "tree 16": (16, 0),
    "tree 32": (32, 0),
}
SETTINGS = {"T=0": Sampling(temperature=0.0), "T=0.8 top-p 0.95": Sampling(temperature=0.8, top_p=0.95)}


def measure(
    subjects: Subjects, sampling: Sampling, shape: tuple[int, int], prompts: Sequence[int], tokens: int
) -> list[float]:
    """Tokens per decode step of each prompt."""
    budget, cap = shape
    engine = VerifierEngine(subjects.model, EngineConfig(max_sequences=8), subjects.vocabulary, subjects.eos)
    jobs = [
        Job(
            str(p),
            subjects.prompts[p],
            replace(sampling, seed=p, max_tokens=tokens, ignore_eos=True),
            budget,
            topk_cap=cap,
        )
        for p in prompts
    ]
    usage = drive_now(engine, subjects.drafter(), jobs).usage
    return [(usage[job.name].completion_tokens - 1) / (usage[job.name].steps - 1) for job in jobs]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.acceptance", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", type=Path, default=Path("models/sapling"))
    parser.add_argument("--drafter", type=Path, default=Path("models/sapling-dflash"))
    parser.add_argument("--heads", type=Path, default=Path("models/heldout/heads.jsonl"))
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--settings", nargs="*", default=["T=0"], choices=list(SETTINGS))
    parser.add_argument("--out", type=Path, default=Path("bench/results/acceptance.json"))
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    subjects = Subjects.read(args.model, args.drafter, args.heads, most_tokens=2048, engine="auto")
    chosen = range(min(args.prompts, len(subjects.prompts)))
    print(
        f"{len(chosen)} held-out heads, {args.tokens} tokens each: tokens per step, mean (10 %, 50 %, 90 % of prompts)"
    )
    figures: dict[str, dict[str, float]] = {}
    for setting in args.settings:
        for name, shape in SHAPES.items():
            per_prompt = measure(subjects, SETTINGS[setting], shape, chosen, args.tokens)
            # steps add up, so the mean over tokens is the harmonic one
            mean = statistics.harmonic_mean(per_prompt)
            cuts = statistics.quantiles(per_prompt, n=10)
            figures.setdefault(setting, {})[name] = round(mean, 3)
            print(f"{setting:18} {name:8} {mean:.2f}  ({cuts[0]:.2f}, {cuts[4]:.2f}, {cuts[8]:.2f})", flush=True)
        gain = figures[setting]["tree 16"] / figures[setting]["chain 7"] - 1
        print(f"{setting:18} tree 16 over chain 7: {gain:+.1%}")
    result = {
        "machine": machine(),
        "identity": subjects.identity,
        "prompts": len(chosen),
        "tokens": args.tokens,
        "tokens_per_step": figures,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
