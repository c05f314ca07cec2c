"""Steps that feed each other while everything happens at once, by chance: the tokens of plain decoding all the same.

Sequences join, are cancelled and attached again with more than is here; the store lags; buffers move; launches fail;
prompts begin alike and are longer than a step; trees are right for a while and wrong then.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from bench.drive import Job
from hedgerow.engine.config import EngineConfig
from hedgerow.engine.drafter import DrafterConfig, DrafterEngine
from hedgerow.engine.fed import FedVerifier
from hedgerow.engine.step import LocalDrafter, step_here
from hedgerow.engine.types import Finish, Update
from kernels.tree_build import PlainTree
from tests.engine_rig import EOS, SETTINGS, VOCABULARY, Rig, prompt
from tests.fed_host import HostFed, Slot

PATIENCE = 300  # steps without any work, until it counts as stuck


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return Rig(tmp_path_factory.mktemp("rig"))


class Chance(HostFed):
    """Two of three trees hold what follows in a text of the same place."""

    def __init__(self, rig: Rig, choose: random.Random, texts: Sequence[Sequence[int]], **more: Any) -> None:
        super().__init__(rig.model, rig.draft_model, **more)
        self.choose, self.texts = choose, texts

    def _trees(self, asked: Sequence[tuple[Slot, int]]) -> list[PlainTree]:
        return [self._told(slot, most, tree) for (slot, most), tree in zip(asked, super()._trees(asked), strict=True)]

    def _told(self, slot: Slot, most: int, tree: PlainTree) -> PlainTree:
        texts = [text for text in self.texts if len(text) > slot.prefix and text[slot.prefix] == slot.anchor]
        if not texts or not most or self.choose.random() < 0.3:
            return tree
        count = min(most, self.choose.randint(1, self.block - 1))
        chain = list(self.choose.choice(texts)[slot.prefix + 1 : slot.prefix + 1 + count])
        return PlainTree(chain, list(range(-1, len(chain) - 1)), [0.0] * len(chain))


class World:
    """An engine, its users, and a store that takes its time."""

    def __init__(self, rig: Rig, seed: int) -> None:
        self.choose = choose = random.Random(seed)
        self.jobs = {f"s{n}": self._job(n) for n in range(choose.randint(2, 6))}
        self.plain = rig.plain_all(list(self.jobs.values()))
        texts = [[*job.prompt, *self.plain[name]] for name, job in self.jobs.items()]
        fails = choose.choice([0, 0, 0, choose.randint(1, 20), -choose.randint(1, 4)])  # of steps; below 0 of chunks
        self.feed = Chance(rig, choose, texts, fails=lambda n: n == fails)
        pages, run_ahead = choose.choice([10, 14, 30]), choose.choice([24, 64, 512])
        limits = EngineConfig(choose.choice([2, 3, 8]), pages=pages, prefill_rows=64, run_ahead=run_ahead)
        self.engine = FedVerifier(rig.model, limits, VOCABULARY, EOS)
        self.engine.feed(self.feed)
        self.drafter = LocalDrafter(DrafterEngine(rig.draft_model, DrafterConfig()))
        self.tokens, self.finish = dict[str, list[int]](), dict[str, Finish]()
        self.attempt, self.acks = dict[str, int](), list[tuple[str, int, int]]()
        self.promptness = choose.choice([1, 0.5, 0.1])

    def _job(self, n: int) -> Job:
        choose = self.choose
        text = (prompt(130) if choose.random() < 0.5 else []) + prompt(choose.choice([3, 20, 90]), n)
        law = replace(SETTINGS[choose.choice(list(SETTINGS))], seed=n, max_tokens=choose.choice([1, 2, 20, 60, 90]))
        law = replace(law, ignore_eos=choose.random() < 0.7, min_tokens=3 * (choose.random() < 0.1) % law.max_tokens)
        return Job(f"s{n}", text, law, choose.choice([0, 3, 7, 12]), choose.randint(0, 25))

    def run(self) -> None:
        waiting, steps, idle = sorted(self.jobs.values(), key=lambda job: job.arrives), 0, 0
        while waiting or self.acks or self.engine.has_work():
            while waiting and (waiting[0].arrives <= steps or not self.engine.has_work()):
                self._start(waiting.pop(0), [])
            self._happens()
            result = step_here(self.engine, self.drafter)
            self.feed.stale = False
            self.engine.check()
            for update in result.updates if result else ():
                self._take(update)
            self._acknowledge(everything=result is None)
            steps, idle = steps + 1, 0 if result else idle + 1
            assert idle < PATIENCE, "stuck"

    def _start(self, job: Job, committed: Sequence[int]) -> None:
        attempt = self.attempt[job.name] = self.attempt.get(job.name, 0) + 1
        self.tokens[job.name] = list(committed)
        self.engine.start(replace(job, committed=committed).start(attempt=attempt))

    def _happens(self) -> None:
        what, name = self.choose.random(), self.choose.choice(list(self.tokens))
        if what < 0.02:
            self.engine.cancel(name, 1, self.attempt[name])
        elif what < 0.14 and self.engine.sequence(name) is not None:
            known = self.plain[name][: len(self.tokens[name]) + self.choose.choice([0, 2, 6])]
            if len(known) < len(self.plain[name]):
                self.acks = [ack for ack in self.acks if ack[0] != name]
                self._start(self.jobs[name], known)
        self.feed.stale = self.choose.random() < 0.01

    def _take(self, update: Update) -> None:
        name = update.session_id
        if update.attempt < self.attempt[name]:
            return
        assert update.error is None, update.error
        assert update.offset == len(self.tokens[name])
        self.tokens[name] += update.tokens
        if update.finish:
            self.finish[name] = update.finish
        self.acks.append((name, update.attempt, len(self.tokens[name])))

    def _acknowledge(self, everything: bool) -> None:
        late = [ack for ack in self.acks if not everything and self.choose.random() > self.promptness]
        for name, attempt, offset in self.acks:
            if (name, attempt, offset) not in late:
                self.engine.committed(name, 1, attempt, offset)
        self.acks = late


def test_tokens_are_those_of_plain_decoding_whatever_happens(rig: Rig) -> None:
    fed = chunks = 0
    for seed in range(8):
        world = World(rig, seed)
        world.run()
        for name, plain in world.plain.items():
            cut = len(world.tokens[name]) if world.finish[name] is Finish.CANCELLED else None
            assert world.tokens[name] == plain[:cut], (seed, name)
        assert world.engine.load().free_pages == world.engine.pool.pages, seed
        fed, chunks = fed + world.engine.fed_steps, chunks + world.feed.computes
    assert fed > 60
    assert chunks > 4
