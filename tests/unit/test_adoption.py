"""A session that is attached again, wherever it stood, gives the tokens and the cache of the undisturbed one."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from bench.drive import Job, drive_now
from hedgerow.engine.adopt import KeptEnds
from hedgerow.engine.sequence import AttachedSequence, Phase
from hedgerow.engine.step import NoDrafter
from hedgerow.engine.types import Finish, Sampling, Start, TreeNodes, Update
from hedgerow.engine.verifier import VerifierEngine
from hedgerow.errors import Fenced, Overloaded
from tests.engine_rig import EOS, SETTINGS, VOCABULARY, Oracle, Rig, latents, prompt

TOKENS = 40


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Rig(tmp_path_factory.mktemp("tiny"), seed=7)
    torch.set_num_threads(threads)


def job(name: str = "s", length: int = 70, budget: int = 0, **sampling: object) -> Job:
    given = {"temperature": 1.0, "seed": 11, "max_tokens": TOKENS, "ignore_eos": True, **sampling}
    return Job(name, tuple(prompt(length)), Sampling(**given), budget=budget)  # type: ignore[arg-type]


def mixed(count: int) -> list[Job]:
    """Greedy and seeded, with everything that depends on history: minimum, bias, stop tokens and stop strings."""
    jobs = []
    for n in range(count):
        more = [
            {},
            {"min_tokens": 25, "ignore_eos": False},
            {"logit_bias": {7: 3.0, 9: -2.0}},
            {"stop": ("\x07", "ab")},
        ]
        settings = replace(SETTINGS[[*SETTINGS][n % 4]], seed=n, max_tokens=TOKENS, ignore_eos=True)
        sampling = replace(settings, **more[n // 4 % 4])  # type: ignore[arg-type]
        jobs.append(Job(f"s{n}", tuple(prompt(20 + 5 * n, n)), sampling, budget=[12, 0, 5, 31][n % 4]))
    return jobs


def undisturbed(rig: Rig, jobs: list[Job]) -> dict[str, list[int]]:
    """Each alone, without trees."""
    return {j.name: drive_now(rig.engine(), NoDrafter(), [replace(j, budget=0)]).tokens[j.name] for j in jobs}


class Truth(Oracle):
    """Draws trees around the true text of whatever sequence of `engine` it is asked about."""

    def __init__(self, engine: VerifierEngine, texts: dict[str, list[int]], seed: int) -> None:
        super().__init__({}, seed)
        self.engine, self.by_name = engine, texts

    def tree_of(self, sequence: AttachedSequence) -> None:
        self.texts[sequence.number] = [*sequence.start.prompt, *self.by_name[sequence.start.session_id]]


class Owner:
    """A gateway and its store: per session a log, the pair it is attached under, and where."""

    def __init__(self, jobs: list[Job]) -> None:
        self.jobs = {j.name: j for j in jobs}
        self.log: dict[str, list[int]] = {j.name: [] for j in jobs}
        self.pair = {j.name: (1, 0) for j in jobs}
        self.at: dict[str, VerifierEngine] = {}
        self.finish: dict[str, Finish] = {}

    def attach(self, name: str, engine: VerifierEngine, budget: int | None = None) -> None:
        """Under the next attempt, with the whole log."""
        epoch, attempt = self.pair[name] = (self.pair[name][0], self.pair[name][1] + 1)
        start = replace(self.jobs[name], committed=tuple(self.log[name])).start(epoch, attempt)
        engine.start(start if budget is None else replace(start, budget=budget))
        self.at[name] = engine

    def take(self, engine: VerifierEngine, updates: list[Update], behind: int = 0) -> None:
        """Commits updates of the current pairs; acknowledges all but the last `behind` tokens of each."""
        for update in updates:
            name, log = update.session_id, self.log[update.session_id]
            if self.at.get(name) is not engine or (update.epoch, update.attempt) != self.pair[name]:
                assert update.error is None or isinstance(update.error, Fenced)
                continue
            assert update.error is None
            assert name not in self.finish, "two ends"
            assert update.offset == len(log), "an adopted sequence begins where its owner's log ends"
            log += update.tokens
            if update.finish:
                self.finish[name] = update.finish
            engine.committed(name, update.epoch, update.attempt, max(0, len(log) - behind))

    @property
    def running(self) -> list[str]:
        return [name for name in self.jobs if name not in self.finish]


def one_step(engine: VerifierEngine, drafter: Truth | None = None) -> list[Update]:
    plan = engine.plan()
    if plan is None:
        return []
    answer = None
    if drafter is not None:
        for work in plan.works:
            drafter.tree_of(work.sequence)
        coroutine = drafter.draft(plan.draft)
        try:
            coroutine.send(None)
        except StopIteration as done:
            answer = done.value
    return list(engine.verify(plan, answer).updates)


def loads(engine: VerifierEngine) -> tuple[int, int]:
    return engine.load().adopted, engine.load().rebuilt


def assert_empty(engine: VerifierEngine) -> None:
    while engine.plan() is not None:
        one_step(engine)
    load = engine.load()
    assert (load.running, load.waiting, load.held_sequences) == (0, 0, 0)
    assert load.free_pages == load.total_pages
    engine.check()


# Tokens


@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("seed", range(4))
def test_sessions_that_move_at_random_give_the_undisturbed_tokens(rig: Rig, batch: int, seed: int) -> None:
    """Adopted here, rebuilt there, in other batches, with other trees, lost updates and acknowledgements that lag."""
    jobs, choose = mixed(16)[seed % 4 :: 16 // batch][:batch] if batch == 1 else mixed(16), random.Random(seed)
    expected = undisturbed(rig, jobs)
    engines = [rig.engine(pages=64, prefill_rows=40, run_ahead=9), rig.engine(pages=50, prefill_rows=64, replay_rows=7)]
    drafters = [Truth(engine, expected, seed) for engine in engines]
    owner = Owner(jobs)
    for name in owner.jobs:
        owner.attach(name, choose.choice(engines))
    while owner.running:
        for engine, drafter in zip(engines, drafters, strict=True):
            updates = one_step(engine, drafter if choose.random() < 0.8 else None)
            if choose.random() < 0.85:
                owner.take(engine, updates, behind=choose.randint(0, 3))
                lost = []
            else:
                lost = [update.session_id for update in updates]  # the stream broke
            moved = [name for name in owner.running if name in lost or choose.random() < 0.04]
            for name in moved:
                target = owner.at[name] if choose.random() < 0.6 else choose.choice(engines)
                owner.attach(name, target, budget=choose.choice([None, 0, 9]))
            engine.check()
    assert owner.log == expected
    assert {Finish.LENGTH} <= set(owner.finish.values()) <= {Finish.LENGTH, Finish.STOP}
    adopted, rebuilt = (sum(counts) for counts in zip(*map(loads, engines), strict=True))
    assert adopted >= 1
    assert batch == 1 or rebuilt >= 1


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {}])
@pytest.mark.parametrize("emitted", [0, 1, 2, 17, 39])
@pytest.mark.parametrize("lag", [0, 1, 13])
def test_an_adopted_sequence_keeps_the_bits_of_its_cache_and_computes_nothing_twice(
    rig: Rig, settings: dict[str, float], emitted: int, lag: int
) -> None:
    work = job(**settings)
    expected, bits = final(rig, work)
    engine, owner = rig.engine(prefill_rows=40), Owner([work])
    owner.attach("s", engine)
    while len(owner.log["s"]) < emitted:
        owner.take(engine, one_step(engine))
    del owner.log["s"][max(0, emitted - lag) :]
    owner.attach("s", engine)
    pages: tuple[int, ...] = ()
    while owner.running:
        held = engine.sequence("s")
        pages = held.pages if held is not None and held.pages else pages
        owner.take(engine, one_step(engine))
    assert owner.log["s"] == expected
    assert torch.equal(latents(engine, pages, bits.shape[1]), bits)
    assert loads(engine) == (1, 0)
    assert engine.load().tokens == TOKENS
    assert_empty(engine)


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {}])
@pytest.mark.parametrize("offset", [1, 2, 17, 38, 39])
def test_a_rebuilt_session_has_the_bits_of_the_undisturbed_one_in_any_batch(
    rig: Rig, settings: dict[str, float], offset: int
) -> None:
    work = job(**settings)
    expected, bits = final(rig, work)
    beside = [replace(other, name=f"n{other.name}") for other in mixed(15)]
    texts = {"s": expected, **undisturbed(rig, beside)}
    engine, owner = rig.engine(prefill_rows=40, pages=90), Owner([replace(work, budget=8), *beside])
    drafter = Truth(engine, texts, offset)
    owner.log["s"] = expected[:offset]
    for name in owner.jobs:
        owner.attach(name, engine)
    pages: tuple[int, ...] = ()
    while owner.running:
        held = engine.sequence("s")
        pages = held.pages if held is not None and held.pages else pages
        owner.take(engine, one_step(engine, drafter))
        if "s" in owner.finish and bits is not None:
            assert torch.equal(latents(engine, pages, bits.shape[1]), bits)
            break
    assert owner.log["s"] == expected
    assert loads(engine) == (0, 1)


def final(rig: Rig, work: Job) -> tuple[list[int], torch.Tensor]:
    """Tokens and latents of the session alone, plain and undisturbed."""
    engine, owner = rig.engine(), Owner([replace(work, budget=0)])
    owner.attach("s", engine)
    pages: tuple[int, ...] = ()
    while owner.running:
        owner.take(engine, one_step(engine))
        held = engine.sequence("s")
        pages = held.pages if held is not None else pages
    return owner.log["s"], latents(engine, pages, len(work.prompt) + TOKENS - 1)


# Wherever it stood


@pytest.mark.parametrize("phase", [Phase.WAITING, Phase.PREFILLING, Phase.REPLAYING, Phase.DECODING])
def test_a_sequence_is_adopted_whatever_it_was_doing(rig: Rig, phase: Phase) -> None:
    work = job(length=100)
    (expected,) = undisturbed(rig, [work]).values()
    engine = rig.engine(max_sequences=1, prefill_rows=60, replay_rows=4)
    owner = Owner([work])
    if phase is Phase.WAITING:
        engine.start(job("first", max_tokens=3).start())
    owner.log["s"] = expected[:20] if phase is Phase.REPLAYING else []
    owner.attach("s", engine)
    held = None
    while held is None or held.phase is not phase:
        owner.take(engine, [u for u in one_step(engine) if u.session_id == "s"])
        held = engine.sequence("s")
    cached, budget = held.cached, engine.load().rebuilt
    owner.attach("s", engine)
    owner.take(engine, [u for u in one_step(engine) if u.session_id == "s"])
    assert engine.sequence("s") is held
    assert held.cached >= cached
    while owner.running:
        owner.take(engine, [u for u in one_step(engine) if u.session_id == "s"])
    assert owner.log["s"] == expected
    assert loads(engine) == (1, budget)
    assert_empty(engine)


def test_a_sequence_that_is_held_back_tells_its_new_owner_what_the_old_one_lost(rig: Rig) -> None:
    work = job()
    (expected,) = undisturbed(rig, [work]).values()
    engine, owner = rig.engine(run_ahead=10), Owner([work])
    owner.attach("s", engine)
    while one_step(engine):
        pass
    assert not engine.has_work(), "it waits for the store"
    owner.attach("s", engine)
    assert engine.has_work()
    fenced, again = one_step(engine)
    assert fenced.finish is Finish.ERROR
    assert (again.offset, list(again.tokens), again.stats) == (0, expected[:10], None)
    assert one_step(engine) == [], "what is told again is not acknowledged yet"
    owner.take(engine, [again])
    while owner.running:
        owner.take(engine, one_step(engine))
    assert owner.log["s"] == expected
    assert engine.load().tokens == TOKENS


def test_a_log_that_is_ahead_of_the_verifier_is_replayed_and_not_built_again(rig: Rig) -> None:
    """Another verifier had the session meanwhile, and its tokens were committed."""
    work = job()
    expected, bits = final(rig, work)
    engine, owner = rig.engine(replay_rows=4), Owner([work])
    owner.attach("s", engine)
    while len(owner.log["s"]) < 5:
        owner.take(engine, one_step(engine))
    held = engine.sequence("s")
    assert held is not None
    owner.log["s"] = expected[:30]
    owner.attach("s", engine)
    one_step(engine)
    assert (engine.sequence("s"), held.phase) == (held, Phase.REPLAYING)
    pages = held.pages
    while owner.running:
        owner.take(engine, one_step(engine))
    assert owner.log["s"] == expected
    assert torch.equal(latents(engine, pages, bits.shape[1]), bits)
    assert loads(engine) == (1, 0)


def test_a_log_that_another_verifier_brought_to_its_end_ends_here_too(rig: Rig) -> None:
    work = job()
    (expected,) = undisturbed(rig, [work]).values()
    engine, owner = rig.engine(), Owner([work])
    owner.attach("s", engine)
    owner.take(engine, one_step(engine))
    owner.log["s"] = list(expected)
    owner.attach("s", engine)
    owner.take(engine, one_step(engine))
    assert owner.finish["s"] is Finish.LENGTH
    assert_empty(engine)


@pytest.mark.parametrize(
    "other",
    [
        {"prompt": tuple(prompt(71))},
        {"sampling": Sampling(temperature=1.0, seed=12, max_tokens=TOKENS, ignore_eos=True)},
        {"committed": (1, 2, 3)},
    ],
)
def test_another_text_is_computed_again_and_never_mixed_with_the_one_held(rig: Rig, other: dict[str, object]) -> None:
    engine, work = rig.engine(), job()
    engine.start(work.start())
    for _ in range(5):
        one_step(engine)
    changed: Start = replace(work.start(attempt=2), **other)  # type: ignore[arg-type]
    engine.start(changed)
    run: list[int] = list(changed.committed)
    while engine.has_work():
        run += [t for u in one_step(engine) if u.attempt == 2 for t in u.tokens]
    alone = Job("s", changed.prompt, changed.sampling, budget=0, committed=changed.committed)
    assert run == drive_now(rig.engine(), NoDrafter(), [alone]).tokens["s"]
    assert loads(engine) == (0, bool(changed.committed))
    assert_empty(engine)


def test_a_session_that_has_its_place_is_never_refused_for_a_full_queue(rig: Rig) -> None:
    engine, work = rig.engine(max_sequences=1, max_waiting=1), job("a")
    engine.start(work.start())
    engine.start(job("b").start())
    with pytest.raises(Overloaded):
        engine.start(job("c").start())
    one_step(engine)
    engine.start(work.start(attempt=2))
    engine.start(job("b").start(attempt=2))
    assert [(u.session_id, u.attempt, bool(u.error)) for u in one_step(engine)] == [
        ("a", 1, True), ("b", 1, True), ("a", 2, False),
    ]  # fmt: skip


def test_a_new_priority_moves_an_adopted_sequence_in_the_queue(rig: Rig) -> None:
    engine = rig.engine(max_sequences=1)
    for name in ("runs", "first", "last"):
        engine.start(job(name).start())
    one_step(engine)
    engine.start(replace(job("last").start(attempt=2), priority=5))
    one_step(engine)
    assert [s.start.session_id for s in engine.scheduler.waiting] == ["last", "first"]


def test_an_adopted_sequence_takes_the_new_owner_deadline_and_wishes(rig: Rig) -> None:
    engine, work = rig.engine(), replace(job(), budget=4)
    engine.start(replace(work.start(), owner=b"old"))
    one_step(engine)
    one_step(engine)
    late = replace(work.start(attempt=2), owner=b"new", deadline=time.monotonic() - 1, want_trees=True, budget=9)
    engine.start(late)
    fenced, last = one_step(engine)
    assert (fenced.owner, fenced.attempt, fenced.error is not None) == (b"old", 1, True)
    assert (last.owner, last.attempt, last.finish) == (b"new", 2, Finish.DEADLINE)
    assert (last.offset, len(last.tokens)) == (0, 2), "one update, with all that its owner lacked"
    assert_empty(engine)


def test_a_budget_grows_for_nobody_whose_pages_are_counted(rig: Rig) -> None:
    engine, work = rig.engine(), job(budget=4)
    engine.start(work.start())
    one_step(engine)
    engine.start(replace(work.start(attempt=2), budget=30))
    plan = engine.plan()
    assert plan is not None
    assert [draft.budget for draft in plan.draft.works] == [4]


# Ends that nobody acknowledged


def test_an_end_whose_last_update_was_lost_is_told_again(rig: Rig) -> None:
    work = job(stop=("ab", "\x07"), min_tokens=2)
    (expected,) = undisturbed(rig, [work]).values()
    engine, owner = rig.engine(), Owner([work])
    owner.attach("s", engine)
    lost: list[Update] = []
    while engine.has_work():
        updates = one_step(engine)
        owner.take(engine, [u for u in updates if not u.finish])
        lost += [u for u in updates if u.finish]
    assert (engine.load().held_sequences, engine.load().kept_ends) == (0, 1)
    steps = engine.load().steps
    owner.attach("s", engine)
    owner.take(engine, one_step(engine))
    assert owner.log["s"] == expected
    assert engine.load().steps == steps + 1
    ended = engine.load()
    one_step(engine)
    assert (ended.tokens, engine.load().kept_ends, lost[0].finish) == (len(expected), 0, owner.finish["s"])
    assert_empty(engine)


def test_an_end_can_be_told_until_it_is_acknowledged_and_a_lower_pair_is_fenced(rig: Rig) -> None:
    engine, work = rig.engine(), job(max_tokens=3)
    engine.start(work.start(epoch=2, attempt=4))
    while engine.has_work():
        one_step(engine)
    for attempt in (5, 6):
        engine.start(work.start(epoch=2, attempt=attempt))
        (again,) = one_step(engine)
        assert (again.attempt, again.offset, len(again.tokens), again.finish) == (attempt, 0, 3, Finish.LENGTH)
        assert again.usage is not None
    engine.start(work.start(epoch=2, attempt=5))
    (refused,) = one_step(engine)
    assert (refused.attempt, refused.finish) == (5, Finish.ERROR)
    assert isinstance(refused.error, Fenced)
    assert refused.error.metadata["held_attempt"] == "6"
    engine.committed("s", 2, 5, 3)
    one_step(engine)
    assert engine.load().kept_ends == 1, "an old attempt's offset must not count"
    engine.committed("s", 2, 6, 3)
    one_step(engine)
    assert engine.load().kept_ends == 0


def test_an_end_that_is_cancelled_or_acknowledged_is_not_kept(rig: Rig) -> None:
    engine = rig.engine()
    for name in ("a", "b"):
        engine.start(job(name, max_tokens=2).start())
    while engine.has_work():
        one_step(engine)
    assert engine.load().kept_ends == 2
    engine.cancel("a", 1, 1)
    engine.committed("b", 1, 1, 2)
    assert one_step(engine) == []
    assert engine.load().kept_ends == 0


def test_cancels_and_deadlines_keep_nothing(rig: Rig) -> None:
    engine = rig.engine()
    for name in ("a", "b"):
        engine.start(job(name).start())
        one_step(engine)
    held = engine.sequence("b")
    assert held is not None
    held.start = replace(held.start, deadline=time.monotonic())
    engine.cancel("a", 1, 1)
    assert {u.finish for u in one_step(engine)} == {Finish.CANCELLED, Finish.DEADLINE}
    assert engine.load().kept_ends == 0


def ended(name: str, tokens: int) -> AttachedSequence:
    start = replace(job(name, length=10, max_tokens=100).start(), committed=())
    sequence = AttachedSequence(1, start, 0, 8, VOCABULARY, EOS)
    sequence.output += [1] * tokens
    sequence.finish = Finish.STOP
    return sequence


def test_kept_ends_are_few_small_and_short_lived() -> None:
    kept = KeptEnds(limit=3, tokens=100, seconds=10)
    for n in range(5):
        kept.add(ended(f"s{n}", 5), float(n))
    assert len(kept) == 3
    assert kept.take("s1", 5.0) is None
    kept.add(ended("large", 70), 5.0)
    assert len(kept) == 2, "80 and 15 of 100 tokens"
    kept.add(ended("too large", 95), 5.0)
    assert len(kept) == 0
    kept.add(ended("s", 5), 6.0)
    kept.add(ended("s", 6), 7.0)
    assert len(kept) == 1
    assert kept.take("s", 17.0) is None, "its time is over"
    kept.add(ended("s", 5), 20.0)
    assert kept.take("s", 29.9) is not None
    assert kept.take("s", 29.9) is None


def test_no_tree_takes_a_sequence_further_ahead_than_the_store_may_be_behind(rig: Rig) -> None:
    """A tree of 30 used to carry it up to 30 tokens beyond."""
    work = replace(job(), budget=30)
    (expected,) = undisturbed(rig, [work]).values()
    engine, owner = rig.engine(run_ahead=10), Owner([work])
    chain = Truth(engine, {"s": expected}, 0)
    chain.tree = lambda work: path(expected[work.anchor_position - 69 :][:30])  # type: ignore[method-assign]
    owner.attach("s", engine)
    told: list[int] = []
    for committed in (0, 3, 4, 14, 24, 30):
        engine.committed("s", 1, 1, committed)
        while updates := one_step(engine, chain):
            told += [token for u in updates for token in u.tokens]
        assert len(told) == min(committed + 10, TOKENS), "so far and no further, and on when the store is"
    assert told == expected


def path(tokens: list[int]) -> TreeNodes:
    return TreeNodes(tokens, range(-1, len(tokens) - 1), [0.0] * len(tokens))
