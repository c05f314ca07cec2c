"""Tokens per decode step on held-out prompts, chain against trees, and whether what was written is Python.

    python -m bench.acceptance --prompts 100 --tokens 96
    python -m bench.acceptance --kinds marginal lookup --edits --settings T=0 --out /tmp/edits.json

Kinds of trees: of the drafter's marginals, conditional ones of its selector, and those of a look at the text itself.
`--edits`: prompts as in editing, a text and then its beginning again. The first kind's figures stand under the shapes'
names, the others' under "KIND SHAPE".

Tokens per step counts what decode steps emit, bonus included; the prompt's own step, which emits the first token, is
left out on both sides. A chain is a tree with one candidate a depth (topk_cap 1) and the block's depth as its budget.
The texts of all shapes must be the same; those of T=0 are scored: see bench.scoring.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.arguments import whole_from
from bench.drive import Job, drive_now
from bench.scoring import MOST_DROPPED, score
from bench.subjects import KINDS, Kind, Subjects, machine
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
# What the bundled pair promises (docs/claims.md), over this many held-out heads.
PROMISED_OVER = 100
LEAST = {"chain 7": 3.4, "tree 16": 4.1}  # tokens a step at T=0
LEAST_PARSED = 0.75  # of the completions, when up to MOST_DROPPED trailing lines may be dropped
SETTINGS = {"T=0": Sampling(temperature=0.0), "T=0.8 top-p 0.95": Sampling(temperature=0.8, top_p=0.95)}


class Answers(NamedTuple):
    """What one shape of tree made of the prompts."""

    per_step: list[float]  # tokens per decode step, by prompt
    texts: list[list[int]]  # tokens, by prompt


def measure(
    subjects: Subjects,
    sampling: Sampling,
    shape: tuple[int, int],
    prompts: Sequence[int],
    tokens: int,
    kind: Kind = "marginal",
) -> Answers:
    """`tokens` tokens after each prompt; a prompt's number is its seed."""
    budget, cap = shape
    limits, reads = EngineConfig(max_sequences=8), subjects.reads(kind)
    engine = VerifierEngine(subjects.model, limits, subjects.vocabulary, subjects.eos, reads)
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
    run = drive_now(engine, subjects.drafter(kind), jobs)
    rates = [(run.usage[job.name].completion_tokens - 1) / (run.usage[job.name].steps - 1) for job in jobs]
    return Answers(rates, [run.tokens[job.name] for job in jobs])


def measure_setting(
    subjects: Subjects,
    setting: str,
    shapes: Sequence[str],
    prompts: Sequence[int],
    tokens: int,
    kinds: Sequence[Kind] = ("marginal",),
) -> tuple[dict[str, float], list[list[int]]]:
    """Prints and returns the mean of every shape of every kind, and the texts. Texts that differ end the run."""
    means: dict[str, float] = {}
    texts: list[list[int]] = []
    for kind, shape in itertools.product(kinds, shapes):
        name = shape if kind == kinds[0] else f"{kind} {shape}"
        answers = measure(subjects, SETTINGS[setting], SHAPES[shape], prompts, tokens, kind)
        # steps add up, so the mean over tokens is the harmonic one
        means[name] = round(statistics.harmonic_mean(answers.per_step), 3)
        cuts = statistics.quantiles(answers.per_step, n=10)
        print(f"{setting:18} {name:20} {means[name]:.2f}  ({cuts[0]:.2f}, {cuts[4]:.2f}, {cuts[8]:.2f})", flush=True)
        texts = texts or answers.texts
        if answers.texts != texts:
            raise SystemExit(f"{setting}: the tokens of {name} are not those of {shapes[0]}")
    for shape in shapes if "conditional" in kinds and kinds[0] == "marginal" else ():
        gain = means[f"conditional {shape}"] / means[shape] - 1
        print(f"{setting:18} conditional over marginal, {shape}: {gain:+.1%}; same tokens: yes")
    if {"tree 16", "chain 7"} <= means.keys():
        print(f"{setting:18} tree 16 over chain 7: {means['tree 16'] / means['chain 7'] - 1:+.1%}; same tokens: yes")
    return means, texts


def edited(prompt: Sequence[int]) -> list[int]:
    """The text, and its first quarter again: what an editor asks for that changes little."""
    return [*prompt, *prompt[: len(prompt) // 4]]


def python_score(subjects: Subjects, heads: Sequence[str], texts: Sequence[Sequence[int]]) -> dict[str, int]:
    """How many of the texts are Python after their heads. A text ends at its first end-of-sequence token."""
    as_cut = dropped = 0
    for head, tokens in zip(heads, texts, strict=True):
        end = next((i for i, token in enumerate(tokens) if token in subjects.eos), len(tokens))
        text = b"".join(subjects.vocabulary[token] for token in tokens[:end]).decode("utf-8", "replace")
        scored = score(head, text)
        as_cut += scored.dropped == 0
        dropped += scored.dropped is not None
    print(f"T=0: of {len(texts)} completions cut at the last complete line {as_cut} parse with their heads, "
          f"{dropped} when up to {MOST_DROPPED} trailing lines may be dropped (at least 75 of 100 must)")  # fmt: skip
    return {"completions": len(texts), "parse_as_cut": as_cut, "parse_dropping_at_most_6_lines": dropped}


def broken_promises(result: dict[str, Any]) -> list[str]:
    """What of LEAST and LEAST_PARSED a result falls short of; of a shorter run, or what it left out, nothing."""
    if result["prompts"] < PROMISED_OVER:
        return []
    found = []
    for shape, least in LEAST.items():
        got = result["tokens_per_step"].get("T=0", {}).get(shape, least)
        if got < least:
            found.append(f"{shape}: {got:.2f} tokens a step, at least {least} are promised")
    if python := result.get("python"):
        parsed, most = python["parse_dropping_at_most_6_lines"], python["completions"]
        if parsed < LEAST_PARSED * most:
            found.append(f"{parsed} of {most} completions parse, at least {LEAST_PARSED:.0%} are promised")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.acceptance", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", type=Path, default=Path("models/sapling"))
    parser.add_argument("--drafter", type=Path, default=Path("models/sapling-dflash"))
    parser.add_argument("--heads", type=Path, default=Path("models/heldout/heads.jsonl"))
    parser.add_argument("--prompts", type=whole_from(1), default=100)
    parser.add_argument("--tokens", type=whole_from(1), default=96)
    parser.add_argument("--threads", type=whole_from(1), default=2)
    parser.add_argument("--settings", nargs="*", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--kinds", nargs="*", default=None, choices=KINDS, help="of drafters; all models' if not given")
    parser.add_argument("--amplitude", type=float, help="what multiplies the drafter's cos and sin under YaRN")
    parser.add_argument("--edits", action="store_true", help="prompts as in editing")
    parser.add_argument("--out", type=Path, default=Path("bench/results/acceptance.json"))
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    subjects = Subjects.read(args.model, args.drafter, args.heads, 2048, "auto", amplitude=args.amplitude)
    if args.edits:
        subjects = replace(subjects, prompts=[edited(prompt) for prompt in subjects.prompts])
    kinds = args.kinds or [kind for kind in subjects.kinds if kind != "lookup"]
    chosen = range(min(args.prompts, len(subjects.prompts)))
    heads = [json.loads(line)["head"] for line in args.heads.read_text(encoding="utf-8").splitlines()]
    print(
        f"{len(chosen)} held-out heads, {args.tokens} tokens each: tokens per step, mean (10 %, 50 %, 90 % of prompts)"
    )
    result: dict[str, Any] = {
        "machine": machine(), "identity": subjects.identity, "prompts": len(chosen), "tokens": args.tokens,
        "tokens_per_step": {},
    }  # fmt: skip
    for setting in args.settings:
        means, texts = measure_setting(subjects, setting, args.shapes, chosen, args.tokens, kinds)
        result["tokens_per_step"][setting] = means
        if setting == "T=0" and not args.edits:
            result["python"] = python_score(subjects, heads[: len(chosen)], texts)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    short = broken_promises(result)
    print(*(f"BELOW: {what}" for what in short), sep="\n", end="\n" if short else "")
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main())
