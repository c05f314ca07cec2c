"""A scheduler with its prefix cache, and steps that write what their tokens stand for: no model, every slot checked."""

from __future__ import annotations

import itertools
import random
import zlib
from array import array
from collections.abc import Sequence

import torch

from hedgerow.engine.config import EngineConfig
from hedgerow.engine.kv_cache import PagePool
from hedgerow.engine.scheduler import Scheduler, Work
from hedgerow.engine.sequence import AttachedSequence, Phase
from hedgerow.engine.types import PrefixLoad, Sampling, Start

SIZE = 4  # positions of a page
RING = 10
NUMBERS = itertools.count(1)


def sequence(
    prompt: Sequence[int], output: int = 4, budget: int = 0, tenant: str = "", committed: int = 0
) -> AttachedSequence:
    number = next(NUMBERS)
    start = Start(
        f"s{number}", 1, 1, tuple(prompt), Sampling(max_tokens=output), committed=[9] * committed, tenant=tenant
    )
    return AttachedSequence(number, start, budget, RING, [b"x"] * 16, frozenset())


def value(tokens: Sequence[int]) -> float:
    """What a position's latents and features stand for: they depend on every token up to it."""
    return float(zlib.crc32(array("I", tokens).tobytes()) >> 8)


class Machine:
    """A scheduler and what its steps would write: a number a slot, which depends on all tokens up to it."""

    def __init__(self, pages: int, **limits: object) -> None:
        config = EngineConfig(feature_ring=RING, run_ahead=10_000, **limits)  # type: ignore[arg-type]
        self.scheduler = Scheduler(config, PagePool(pages, SIZE))
        self.memory = [[float("nan")] * SIZE for _ in range(pages)]

    @property
    def prefixes(self) -> PrefixLoad:
        """Tokens asked for and found, pages kept, bytes of features, pages given back."""
        return self.scheduler.prefixes.load()

    def add(self, *sequences: AttachedSequence) -> None:
        for each in sequences:
            self.scheduler.add(each)

    def step(self) -> int:
        """Schedules and runs; gives the rows."""
        works = self.scheduler.schedule()
        self.write(works)
        return sum(work.rows for work in works)

    def write(self, works: Sequence[Work]) -> list[AttachedSequence]:
        """Checks what is read and writes what is computed; takes those out that end, and gives them."""
        ended = []
        for work in works:
            self.read(work.sequence)
            text = [*work.sequence.start.prompt, *work.sequence.output]
            for position in range(work.prefix, work.prefix + work.rows):
                page = work.sequence.pages[position // SIZE]
                self.memory[page][position % SIZE] = value(text[: position + 1])
        for work in works:
            each, end = work.sequence, work.prefix + work.rows
            text = [*each.start.prompt, *each.output]
            each.keep(torch.tensor([[value(text[: p + 1])] for p in range(work.prefix, end)]))
            if work.phase is Phase.DECODING or (end == len(each.start.prompt) and not each.output):
                each.output.append(7)
            if each.remaining == 0 and work.phase is Phase.DECODING:
                self.scheduler.remove(each)
                ended.append(each)
        return ended

    def read(self, each: AttachedSequence) -> None:
        """Every position that counts as computed holds what its own tokens make of it, in memory and in the ring."""
        text, ring = [*each.start.prompt, *each.output], each.features
        for position in range(each.cached):
            assert self.memory[each.pages[position // SIZE]][position % SIZE] == value(text[: position + 1])
        if ring is not None:
            assert ring.end == each.cached
            for position in range(ring.start, ring.end):
                assert ring.read(position, 1).item() == value(text[: position + 1])

    def run(self, *sequences: AttachedSequence) -> int:
        """To their ends; gives the rows that it took."""
        self.add(*sequences)
        rows = 0
        while self.scheduler.ready():
            rows += self.step()
            self.scheduler.check()
        return rows


def text(length: int, seed: int = 0) -> list[int]:
    choose = random.Random(seed)
    return [choose.randrange(8) for _ in range(length)]
