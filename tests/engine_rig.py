"""An engine on random weights, and drafters that are good, bad or strange, for the tests of hedgerow.engine."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from bench.drive import Job, plain
from hedgerow.engine.config import EngineConfig
from hedgerow.engine.types import DraftAnswer, DraftBatch, DraftTree, DraftWork, Sampling, TreeNodes
from hedgerow.engine.verifier import VerifierEngine
from hedgerow.model.cache import LatentCache
from hedgerow.model.compiled import CompiledCache
from hedgerow.model.select import Engine, load_drafter, load_target
from tests.compiled_builds import missing_compiler
from tests.tiny import TinyTarget, write_tiny

SETTINGS = {
    "greedy": Sampling(),
    "t1": Sampling(temperature=1.0),
    "t08-p095": Sampling(temperature=0.8, top_p=0.95),
    "t07-k20": Sampling(temperature=0.7, top_k=20),
}
EOS = frozenset({509, 510, 511})  # drawn now and then at temperature 1, so that some sequences end early
VOCABULARY = [bytes([token % 256]) for token in range(512)]


class Rig:
    """Models of one seed on one engine, and plain decodings of them that are computed once."""

    def __init__(self, folder: Path, seed: int = 0, engine: Engine = "torch") -> None:
        # few layers: the tests compare tokens by the ten thousand, and every op is there with two
        paths = write_tiny(folder, TinyTarget(layers=2), seed=seed)
        self.model = load_target(paths.target, paths.feature_layers, engine)
        self.draft_model = load_drafter(paths.drafter, paths.target, engine)
        self._plain: dict[str, list[int]] = {}

    def engine(self, **limits: int) -> VerifierEngine:
        limits.setdefault("pages", 64)
        return VerifierEngine(self.model, EngineConfig(**limits), VOCABULARY, EOS)

    def plain(self, job: Job) -> list[int]:
        key = f"{job.prompt} {job.sampling}"
        if key not in self._plain:
            self._plain[key] = plain(self.model, job.prompt, job.sampling, EOS)
        return self._plain[key]

    def plain_all(self, jobs: Sequence[Job]) -> dict[str, list[int]]:
        return {job.name: self.plain(job) for job in jobs}


def one_thread(folder: Path, engine: Engine) -> Iterator[Rig]:
    """A rig while torch has one thread, for a fixture to yield from. The test is skipped where there is no compiler."""
    if engine == "compiled" and missing_compiler():
        pytest.skip(missing_compiler())
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Rig(folder, seed=3, engine=engine)
    torch.set_num_threads(threads)


def prompt(length: int, seed: int = 0) -> list[int]:
    choose = random.Random(f"{length}-{seed}")
    return [choose.randrange(256) for _ in range(length)]


class ScriptedDrafter:
    """Answers each work with whatever `tree` makes of it; keeps the batches that it was sent."""

    def __init__(self, tree: Callable[[DraftWork], TreeNodes]) -> None:
        self.tree = tree
        self.batches: list[DraftBatch] = []
        self.incarnation = b"scripted"

    async def draft(self, batch: DraftBatch) -> DraftAnswer | None:
        self.batches.append(batch)
        trees = [
            DraftTree(work.sequence, self.tree(work), work.feature_position + len(work.features))
            for work in batch.works
            if work.budget
        ]
        return DraftAnswer(batch.step_id, trees, self.incarnation)


class Oracle(ScriptedDrafter):
    """Trees that hold the true continuation down to a random depth, at random places among wrong siblings.

    Random weights agree with no drafter; this one gives long accepted paths through rows that are not neighbours.
    `texts` are prompt + output by the engine's sequence number.
    """

    def __init__(self, texts: dict[int, list[int]], seed: int = 0) -> None:
        super().__init__(self._grow)
        self.texts, self._choose = texts, random.Random(seed)

    def _grow(self, work: DraftWork) -> TreeNodes:
        choose = self._choose
        truth = self.texts[work.sequence][work.anchor_position + 1 :]
        nodes = choose.randint(0, work.budget)
        true_depth = min(choose.randint(0, nodes), len(truth))
        tokens, parents, depth, spine = list[int](), list[int](), list[int](), [-1]
        taken: set[tuple[int, int]] = set()
        while len(tokens) < nodes:
            if len(spine) <= true_depth and choose.random() < 0.5:
                parent, token = spine[-1], truth[len(spine) - 1]
            else:
                parent, token = choose.randint(-1, len(tokens) - 1), choose.randrange(512)
            level = 1 + (depth[parent] if parent >= 0 else 0)
            on_spine = parent in spine and level <= len(truth) and truth[level - 1] == token
            if (parent, token) in taken or (on_spine and parent != spine[-1]):
                continue
            if on_spine:
                spine.append(len(tokens))
            taken.add((parent, token))
            tokens.append(token)
            parents.append(parent)
            depth.append(level)
        return TreeNodes(tokens, parents, [0.0] * nodes)


def oracle(jobs: Sequence[Job], texts: dict[str, list[int]], seed: int = 0) -> Oracle:
    """For jobs that a fresh engine is given in the order of their arrival."""
    ordered = sorted(jobs, key=lambda job: job.arrives)
    return Oracle({n: [*job.prompt, *texts[job.name]] for n, job in enumerate(ordered, 1)}, seed)


def latents(engine: VerifierEngine, pages: Sequence[int], positions: int) -> torch.Tensor:
    """[layers, positions, width] of the positions 0 .. positions - 1 that lie in `pages`."""
    size, cache = engine.cache.page_size, engine.cache
    slots = [pages[p // size] * size + p % size for p in range(positions)]
    if isinstance(cache, CompiledCache):  # which keeps the latents twice
        return torch.cat((cache.read(slots), cache.latents.flatten(1, 2)[:, slots]), -1)
    assert isinstance(cache, LatentCache)
    return cache.data[:, slots]


def spoil(engine: VerifierEngine, slots: Sequence[int]) -> None:
    """Overwrites slots that nothing may read as a key or a value again; finite, since masked places are read."""
    cache, size = engine.cache, engine.cache.page_size
    if isinstance(cache, CompiledCache):
        at = torch.tensor(slots)
        cache.keys[:, at // size, :, at % size] = 1e4
        cache.latents.flatten(1, 2)[:, slots] = 1e4
        return
    assert isinstance(cache, LatentCache)
    cache.data[:, slots] = 1e4
