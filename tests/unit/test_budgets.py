"""Budgets that nobody fixed: what steps and trees have shown decides, and no token depends on it."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from bench.drive import Job, Run, drive_now
from hedgerow.engine.budgets import FIRST, Budgets
from hedgerow.engine.config import EngineConfig
from hedgerow.engine.costs import CostModel
from hedgerow.engine.curves import Curve, SharedCurve, hull, sizes
from hedgerow.engine.drafter import DrafterConfig, DrafterEngine
from hedgerow.engine.scheduler import Work
from hedgerow.engine.sequence import AttachedSequence, Phase
from hedgerow.engine.step import LocalDrafter, NoDrafter
from hedgerow.engine.step_times import Load, StepTimes
from hedgerow.engine.types import DraftBatch, Sampling, Start
from hedgerow.errors import InvalidRequest
from kernels.tree_build import top_logprobs, tree_build
from kernels.tree_pairs import tree_pairs
from tests.engine_rig import SETTINGS, Rig, oracle, prompt

MOST = 16
NUMBERS = itertools.count(1)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return Rig(tmp_path_factory.mktemp("tiny"))


def sequence(temperature: float = 0.0, free: bool = True) -> AttachedSequence:
    sampling = Sampling(max_tokens=1 << 20, temperature=temperature)
    made = AttachedSequence(next(NUMBERS), Start("s", 1, 1, [1] * 10, sampling), MOST, 4, [b"x"] * 4, frozenset())
    made.curve = Curve(MOST) if free else None
    return made


@dataclass
class Machine:
    """Steps that take what a formula says, blurred, and a drafter that is right so often at each depth."""

    good: float
    seed: int = 0
    blur: float = 0.1
    now: float = 1.0  # times what everything takes

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def accepted(self) -> list[int]:
        path, node = list[int](), -1
        while self.random.random() < self.good and len(path) < 7:
            node += 1
            while self.random.random() < 0.35:
                node += 1
            path.append(node)
        return path

    def draft(self, budgets: Sequence[int]) -> float:
        trees = sum(budget > 0 for budget in budgets)
        return 0.35 + 0.1 * trees + 0.012 * sum(budgets) if trees else 0.0

    def rest(self, budgets: Sequence[int]) -> float:
        return 1.2 + 0.2 * len(budgets) + 0.09 * sum(budgets)

    def blurred(self, ms: float) -> float:
        late = 3.0 if self.random.random() < 0.02 else 1.0  # somebody else had the cores
        return ms * self.now * late * self.random.lognormvariate(0, self.blur)

    def fixed(self, sequences: int, budget: int) -> float:
        """Tokens a millisecond with one budget for all."""
        kept = [sum(node < budget for node in self.accepted()) for _ in range(4000)]
        budgets = [budget] * sequences
        return sequences * (1 + sum(kept) / len(kept)) / (self.draft(budgets) + self.rest(budgets))


class Served:
    """Sequences on a machine, all with budgets that are chosen, as the engine would run them."""

    def __init__(self, machine: Machine, sequences: int, life: int = 60) -> None:
        self.machine, self.times = machine, StepTimes()
        self.budgets, self.life = Budgets(self.times, MOST), life
        self.sequences = [sequence() for _ in range(sequences)]
        self.chosen: Counter[int] = Counter()
        self.step = 0

    def run(self, steps: int) -> float:
        """Tokens a millisecond, by what steps take on average."""
        tokens = ms = 0.0
        for _ in range(steps):
            more, took = self._one()
            tokens, ms = tokens + more, ms + took
        return tokens / ms

    def _one(self) -> tuple[int, float]:
        self.step += 1
        n = len(self.sequences)
        if self.step % max(1, self.life // n) == 0:  # one ends, another begins
            self.sequences[self.step % n] = sequence()
        works = self.budgets.choose([Work(s, Phase.DECODING, 100, 1, MOST, 500) for s in self.sequences])
        budgets = [work.budget for work in works]
        tokens = n
        for work in works:
            accepted = [node for node in self.machine.accepted() if node < work.budget]
            tokens += len(accepted)
            if work.budget:
                self.budgets.verified(work.sequence, work.budget, accepted)
        self.chosen.update(budgets)
        draft, rest = self.machine.draft(budgets), self.machine.rest(budgets)
        trees, nodes = sum(budget > 0 for budget in budgets), sum(budgets)
        load = Load(n, n + nodes, 100 * n, trees, nodes, tokens if trees else 0)
        waited, took = self.machine.blurred(draft), self.machine.blurred(rest)
        self.times.took(load, waited, took)
        self.budgets.took(tokens, waited + took)
        return tokens, draft + rest


@pytest.mark.parametrize("good", [0.75, 0.5])
@pytest.mark.parametrize("sequences", [1, 8, 32])
def test_the_choice_is_about_as_fast_as_the_best_fixed_budget(good: float, sequences: int) -> None:
    machine = Machine(good)
    served = Served(machine, sequences)
    served.run(300)
    best = max(machine.fixed(sequences, budget) for budget in sizes(MOST))
    assert served.run(600) > 0.95 * best


@pytest.mark.parametrize("sequences", [1, 8, 32])
def test_a_useless_drafter_costs_about_a_hundredth(sequences: int) -> None:
    machine = Machine(0.0)
    served = Served(machine, sequences)
    assert served.run(300) > 0.93 * machine.fixed(sequences, 0)  # the first steps, in which it is found out, too
    assert served.run(1000) > 0.99 * machine.fixed(sequences, 0)
    begun = served.budgets.trials
    assert served.run(2000) > 0.99 * machine.fixed(sequences, 0)
    assert 2 < served.budgets.trials - begun < 50  # it is tried again, and the less often the more often in vain


@pytest.mark.parametrize("good", [0.75, 0.5, 0.0])
@pytest.mark.parametrize("sequences", [8, 32])
def test_with_a_cost_model_the_first_steps_are_few_trials(sequences: int, good: float) -> None:
    """It is off by a fifth, and knows no drafts. Without it, 32 sequences lose a fifth in their first sixty steps."""
    machine = Machine(good)
    served = Served(machine, sequences)
    served.times.expect(CostModel(fixed=0.9, expert=0.0, row=0.08, key=1e-4, score=0.0))
    best = max(machine.fixed(sequences, budget) for budget in sizes(MOST))
    assert served.run(60) > (0.88 if good else 0.85) * best
    assert served.run(600) > 0.95 * best


def test_a_drafter_that_becomes_good_is_found() -> None:
    served = Served(Machine(0.0), 1)
    served.run(2000)
    assert not served.budgets.speculates
    served.machine.good = 0.75
    served.run(1500)
    assert served.run(500) > 0.93 * max(served.machine.fixed(1, budget) for budget in sizes(MOST))


def test_a_trial_in_which_the_machine_stood_still_is_paid_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten seconds in one step: paid with 0.7 % of what steps take, they forbade trials for an hour."""
    served, stood = Served(Machine(0.0), 1), list[float]()
    served.run(600)
    usual = served.machine.blurred

    def blurred(ms: float) -> float:
        if served.budgets.trying and not stood:
            stood.append(ms)
            return 10_000.0
        return usual(ms)

    monkeypatch.setattr(served.machine, "blurred", blurred)
    while not stood:
        served.run(1)
    begun = served.budgets.trials
    served.run(8000)
    assert served.budgets.trials > begun


def test_one_that_becomes_useless_is_left() -> None:
    served = Served(Machine(0.75), 1)
    served.run(1500)
    assert served.chosen[0] < 150
    served.machine.good = 0.0
    served.run(500)
    assert served.run(1000) > 0.97 * served.machine.fixed(1, 0)


def left_for(rows: int) -> int:
    """The budget that one sequence has after so many positions without a tree, where feeding one takes 0.2 ms."""
    times = StepTimes()
    for fed in (1, 3, 40, 80) * 40:  # a tree of 4 nodes brings two tokens more for half a plain step
        for nodes in (0, 4):
            load = Load(1, 1 + nodes, 100, int(nodes > 0), nodes, fed if nodes else 0)
            times.took(load, 0.2 + 0.2 * fed if nodes else 0.0, 2.0 + 0.05 * nodes)
    budgets, one = Budgets(times, 4), sequence()
    for _ in range(400):
        budgets.shared[0].saw(4, [0, 1])
    for _ in FIRST:
        budgets.choose([Work(one, Phase.DECODING, 100, 1, 4, 500)])
    assert one.features is not None
    one.features.skip(100 + rows)
    one.features.start, one.features.sent = 100, 98 + min(rows, 2)
    return budgets.choose([Work(one, Phase.DECODING, 100, 1, 4, 500)])[0].budget


def test_feeding_a_drafter_that_was_left_is_reckoned() -> None:
    assert left_for(2) == 2  # all that is accepted of four
    assert left_for(30) == 2  # 6 ms once, of which each of some 32 steps bears its part
    assert left_for(3000) == 0


def test_what_a_drafter_lacks_is_known(rig: Rig) -> None:
    """It is what the sequence's next request carries; plain steps let it grow, a tree makes it small again."""
    seen = list[tuple[int, int]]()
    work = [Job("one", prompt(20), Sampling(max_tokens=60, ignore_eos=True))]
    engine = rig.engine(auto_budget=MOST)
    compose = engine._desk.compose

    def spied(step_id: int, works: list[Work]) -> DraftBatch:
        waiting = {work.sequence.number: work.sequence.features.waiting for work in works if work.sequence.features}
        batch = compose(step_id, works)
        seen.extend((waiting[asked.sequence], len(asked.features)) for asked in batch.works if asked.budget)
        return batch

    engine._desk.compose = spied  # type: ignore[method-assign]
    drive_now(engine, LocalDrafter(DrafterEngine(rig.draft_model, DrafterConfig())), work)
    assert len(seen) > 2
    assert all(waiting == rows for waiting, rows in seen)


def test_a_machine_that_gets_slower_changes_no_choice() -> None:
    machine = Machine(0.75)
    served = Served(machine, 1)
    best = max(machine.fixed(1, budget) for budget in sizes(MOST))
    served.run(1000)
    for now in (3.0, 0.5, 2.0):
        machine.now = now
        assert served.run(600) > 0.93 * best


def test_what_a_request_fixed_stays_beside_those_that_are_chosen() -> None:
    budgets = Budgets(StepTimes(), MOST)
    fixed, free = sequence(free=False), sequence()
    for first in FIRST:
        works = [Work(fixed, Phase.DECODING, 100, 1, 5, 500), Work(free, Phase.DECODING, 100, 1, MOST, 500)]
        assert [work.budget for work in budgets.choose(works)] == [5, first]


def test_the_last_token_has_no_tree() -> None:
    budgets, free = Budgets(StepTimes(), MOST), sequence()
    works = [Work(free, Phase.DECODING, 100, 1, 0, 1)]
    assert [work.budget for work in budgets.choose(works)] == [0]


def test_a_curve_knows_the_smaller_trees_of_a_larger_one() -> None:
    shared = SharedCurve(4)
    for _ in range(2000):
        shared.saw(4, [0, 2])
        shared.saw(2, [0])
    assert shared.expected(None, (0, 1, 2, 3, 4)) == pytest.approx([1, 2, 2, 3, 3], abs=1e-3)
    own = Curve(4)
    for _ in range(500):
        own.saw(4, [])
    assert shared.expected(own, (0, 4))[1] < 2.2
    corners = hull((0, 1, 2, 3), (1.0, 1.125, 1.75, 2.0))  # all of them exact in binary
    assert corners == [(float("inf"), 0, 1.0), (0.375, 2, 1.75), (0.25, 3, 2.0)]


def test_the_first_nodes_of_a_tree_are_the_smaller_tree() -> None:
    generator = torch.Generator().manual_seed(1)
    best = top_logprobs(torch.randn(3, 7, 200, generator=generator), MOST)
    choice = torch.argsort(torch.rand(3, 7, MOST, MOST, generator=generator), dim=-1)
    pairs = torch.randn(3, 7, MOST, MOST, generator=generator).log_softmax(-1).sort(-1, descending=True).values

    def built(budget: int) -> list[list[tuple[int, int]]]:
        budgets, caps = torch.full((3,), budget), torch.zeros(3, dtype=torch.int64)
        trees = [tree_build(*best, budgets, caps, MOST), tree_pairs(pairs, choice, best.tokens, budgets, MOST)]
        return [
            list(zip(tree.tokens[s, :budget].tolist(), tree.parents[s, :budget].tolist(), strict=True))
            for tree in trees
            for s in range(3)
        ]

    whole = built(MOST)
    for budget in sizes(MOST)[1:]:
        assert built(budget) == [nodes[:budget] for nodes in whole]


def budgets_of(run: Run) -> Counter[int]:
    stats = [update.stats for result in run.results for update in result.updates if update.stats is not None]
    return Counter(each.budget for each in stats)


@pytest.mark.parametrize(("setting", "sequences"), [("greedy", 4), ("t08-p095", 1)])
def test_chosen_budgets_change_no_token(rig: Rig, setting: str, sequences: int) -> None:
    sampling = replace(SETTINGS[setting], max_tokens=60, ignore_eos=True)
    work = [Job(f"{setting}-{i}", prompt(20 + i, i), replace(sampling, seed=i), arrives=3 * i) for i in range(5)]
    work[3] = replace(work[3], budget=5)  # beside one that is fixed
    expected = rig.plain_all(work)
    for drafter in (oracle(work, expected), LocalDrafter(DrafterEngine(rig.draft_model, DrafterConfig())), NoDrafter()):
        engine = rig.engine(max_sequences=sequences, auto_budget=MOST, prefill_factor=2)
        run = drive_now(engine, drafter, work)
        assert run.tokens == expected
        assert len(budgets_of(run)) > 3
        assert engine.load().pace.measured_seconds > 0


def test_a_request_with_a_budget_has_it_in_every_step(rig: Rig) -> None:
    work = [Job("fixed", prompt(20), Sampling(max_tokens=40, ignore_eos=True), budget=6)]
    run = drive_now(rig.engine(auto_budget=MOST), LocalDrafter(DrafterEngine(rig.draft_model, DrafterConfig())), work)
    assert set(budgets_of(run)) <= {0, 6}  # the first token and the last one have no tree
    assert budgets_of(run)[0] <= 2


def test_limits_are_named() -> None:
    with pytest.raises(InvalidRequest, match="auto_budget"):
        EngineConfig(auto_budget=65)
    with pytest.raises(InvalidRequest, match="prefill_factor"):
        EngineConfig(prefill_factor=0.5)


def test_no_drafter_means_no_choice(rig: Rig) -> None:
    engine = rig.engine(auto_budget=MOST)
    job = Job("plain", prompt(20), Sampling(max_tokens=12, ignore_eos=True))
    assert drive_now(engine, NoDrafter(), [job]).tokens == rig.plain_all([job])
