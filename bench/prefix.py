"""What a prompt costs that begins like one before it: time to the first token, through the whole stack and the SDK.

    python -m bench.prefix             prompts of 2,000 tokens, each asked for again, and with another end

Of each prompt three requests, one after the other: `first` finds nothing, `again` is the same one, `other` has the same
1,900 tokens and another end. The ratio is the median over prompts of paired ratios. Tokens of `first` and `again` must
be the same; tokens a step are told beside each other, for a drafter must not have less to go by after a hit.
Results go to bench/results/prefix.json with commit and machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.arguments import whole_from
from bench.serving import RESULTS, running
from bench.subjects import machine
from hedgerow.client import AsyncClient
from hedgerow.errors import InvariantViolation

SHARED, PAGE = 0.95, 64


@dataclass(frozen=True)
class Asked:
    """One request, as its client saw it."""

    first_ms: float
    tokens: Sequence[int]
    hits: int  # prompt tokens that were not computed
    steps: int


async def ask(client: AsyncClient, prompt: Sequence[int], tokens: int, budget: int) -> Asked:
    begun, first, seen = time.perf_counter(), 0.0, list[int]()
    stream = client.generate(list(prompt), max_tokens=tokens, budget=budget, ignore_eos=True)
    async for chunk in stream:
        first = first or 1e3 * (time.perf_counter() - begun)
        seen += chunk.tokens
    assert stream.finished is not None
    usage = stream.finished.usage
    return Asked(first, seen, usage.cached_prompt_tokens, usage.steps)


async def prompts(client: AsyncClient, args: argparse.Namespace) -> list[list[int]]:
    """Held-out Python, of `length` tokens each, no two with a page in common."""
    heads = [json.loads(line)["prompt"] for line in args.heads.read_text().splitlines()]
    found = list[list[int]]()
    tokens = list[int]()
    for text in heads:
        tokens += await client.tokenize(text)
        if len(tokens) >= args.length:
            found.append(tokens[-args.length :])
            tokens = []
        if len(found) == args.prompts + 1:
            break
    return found


def summary(first: Sequence[Asked], later: Sequence[Asked], length: int) -> dict[str, float]:
    """Of requests beside those that found nothing."""
    pairs = list(zip(first, later, strict=True))
    return {
        "first_token_ms": round(statistics.median(each.first_ms for each in later), 1),
        "ratio": round(statistics.median(b.first_ms / a.first_ms for a, b in pairs), 3),
        "hits": round(sum(each.hits for each in later) / length / len(later), 3),
        "tokens_per_step": round(sum(len(a.tokens) for a in later) / sum(a.steps for a in later), 3),
    }


async def measure(client: AsyncClient, args: argparse.Namespace) -> dict[str, Any]:
    warm, *texts = await prompts(client, args)
    await ask(client, warm, 8, args.budget)
    kinds = dict[str, list[Asked]](first=[], again=[], other=[])
    for number, text in enumerate(texts):
        kept = int(SHARED * len(text))
        kinds["first"].append(await ask(client, text, args.tokens, args.budget))
        kinds["again"].append(await ask(client, text, args.tokens, args.budget))
        if kinds["again"][-1].tokens != kinds["first"][-1].tokens:
            raise InvariantViolation(f"prompt {number}: other tokens after a hit", metadata={"prompt": number})
        end = warm[: len(text) - kept]
        kinds["other"].append(await ask(client, [*text[:kept], *end], args.tokens, args.budget))
        if kinds["first"][-1].hits or kinds["other"][-1].hits != kept // PAGE * PAGE:
            raise InvariantViolation(f"prompt {number}: it does not hit as it should", metadata={"prompt": number})
    figures = {kind: summary(kinds["first"], asked, args.length) for kind, asked in kinds.items()}
    for kind, each in figures.items():
        print(f"{kind:6} {each}", flush=True)
    return figures


async def run(address: str, args: argparse.Namespace) -> None:
    async with AsyncClient(address) as client:
        figures = await measure(client, args)
    result = {"machine": machine(), "engine": args.engine, "length": args.length, "budget": args.budget, **figures}
    (RESULTS / "prefix.json").write_text(json.dumps(result, indent=1) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.prefix", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--engine", choices=("auto", "compiled", "torch"), default="auto", help="of both models")
    parser.add_argument("--model", type=Path, default=Path("models/sapling"))
    parser.add_argument("--drafter", type=Path, default=Path("models/sapling-dflash"))
    parser.add_argument("--heads", type=Path, default=Path("models/heldout/heads.jsonl"))
    parser.add_argument("--prompts", type=whole_from(1), default=8)
    parser.add_argument("--length", type=whole_from(1), default=2000, help="tokens of a prompt")
    parser.add_argument("--tokens", type=whole_from(1), default=48)
    parser.add_argument("--budget", type=whole_from(0), default=8)
    args = parser.parse_args(argv)
    with running(args) as stack:
        asyncio.run(run(stack.address("gateway"), args))
    return 0


if __name__ == "__main__":
    sys.exit(main())
