"""Runs generations through the engine in this process, and plainly without it, for exactness runs and tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from hedgerow.engine.fed import FedVerifier
from hedgerow.engine.sampler import RowDraw, draw
from hedgerow.engine.step import Drafter, LocalDrafter, step, step_here
from hedgerow.engine.types import Finish, Sampling, Start, StepResult, UsageCount
from hedgerow.engine.verifier import VerifierEngine
from hedgerow.errors import InvariantViolation
from hedgerow.model.batch import SequenceRows
from hedgerow.model.cache import LatentCache
from hedgerow.model.interface import Target


@dataclass(frozen=True)
class Job:
    """One generation. It starts once `arrives` steps have run; None as a budget: the engine's default."""

    name: str
    prompt: Sequence[int]
    sampling: Sampling
    budget: int | None = None
    arrives: int = 0
    committed: Sequence[int] = ()
    topk_cap: int = 0
    want_trees: bool = False
    priority: int = 0

    def start(self, epoch: int = 1, attempt: int = 1) -> Start:
        return Start(
            session_id=self.name,
            epoch=epoch,
            attempt=attempt,
            prompt=self.prompt,
            sampling=self.sampling,
            committed=self.committed,
            budget=self.budget,
            topk_cap=self.topk_cap,
            priority=self.priority,
            want_trees=self.want_trees,
        )


@dataclass
class Run:
    """What `drive` saw of the jobs, by name."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    finish: dict[str, Finish] = field(default_factory=dict)
    usage: dict[str, UsageCount] = field(default_factory=dict)
    results: list[StepResult] = field(default_factory=list)

    def take(self, result: StepResult) -> None:
        """Appends a step's tokens. An update that does not continue its sequence is an InvariantViolation."""
        self.results.append(result)
        for update in result.updates:
            tokens = self.tokens[update.session_id]
            if update.offset != len(tokens) or update.session_id in self.finish:
                raise InvariantViolation(
                    f"{update.session_id}: an update at offset {update.offset} where {len(tokens)} tokens are",
                    metadata={"offset": update.offset, "length": len(tokens)},
                )
            tokens += update.tokens
            if update.finish is not Finish.NONE:
                self.finish[update.session_id] = update.finish
            if update.usage is not None:
                self.usage[update.session_id] = update.usage


Between = Callable[[VerifierEngine, int, Run], None]


async def drive(engine: VerifierEngine, drafter: Drafter, jobs: Sequence[Job], between: Between | None = None) -> Run:
    """Runs the jobs to their ends, as a gateway with an instant store would: every update is acknowledged at once.

    `between` is called before each step, with how many there were and what they gave. Raises the error of a sequence
    that failed.
    """
    run, waiting, steps = Run(), sorted(jobs, key=lambda job: job.arrives), 0
    feeds = isinstance(engine, FedVerifier)
    while waiting or engine.has_work():
        while waiting and (waiting[0].arrives <= steps or not engine.has_work()):
            job = waiting.pop(0)
            run.tokens[job.name] = list(job.committed)
            engine.start(job.start())
        if between is not None:
            between(engine, steps, run)
        if feeds and isinstance(drafter, LocalDrafter):
            result = step_here(engine, drafter)
        else:
            result = await step(engine, drafter)
        if result is not None:
            steps += 1
            run.take(result)
            for update in result.updates:
                if update.error is not None:
                    raise update.error
                engine.committed(update.session_id, update.epoch, update.attempt, len(run.tokens[update.session_id]))
    engine.check()
    return run


def drive_now(engine: VerifierEngine, drafter: Drafter, jobs: Sequence[Job], between: Between | None = None) -> Run:
    """`drive`, for callers without an event loop."""
    return asyncio.run(drive(engine, drafter, jobs, between))


@torch.inference_mode()
def plain(model: Target, prompt: Sequence[int], sampling: Sampling, eos: frozenset[int]) -> list[int]:
    """Plain one-by-one decoding: the prompt in one pass, then one row a token. No scheduler, no tree, no batch.

    Ends at max_tokens and at an end-of-sequence token; knows no stop strings.
    """
    page_size = LatentCache.page_size
    pages = range(-(-(len(prompt) + sampling.max_tokens) // page_size))
    cache, output = model.new_cache(len(pages)), list[int]()
    limit = len(prompt) + sampling.max_tokens
    tokens: Sequence[int] = prompt
    while True:
        prefix = len(prompt) + len(output) - len(tokens) if output else 0
        covered = pages[: -(-(prefix + len(tokens)) // page_size)]
        last = len(tokens) - 1
        rows = SequenceRows(prefix, covered, tokens, range(-1, last), [last], not output, limit)
        logits, _ = model.forward([rows], cache)
        output += draw(logits, [RowDraw(sampling, len(prompt) + len(output), len(output))], eos, model.walk)
        if len(output) == sampling.max_tokens or (output[-1] in eos and not sampling.ignore_eos):
            return output
        tokens = output[-1:]
