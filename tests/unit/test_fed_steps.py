"""Steps that feed each other and are read one later: the tokens of plain decoding, whatever happens in between."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from bench.drive import Between, Job, Run, drive_now
from hedgerow.engine.config import EngineConfig
from hedgerow.engine.drafter import DrafterConfig, DrafterEngine
from hedgerow.engine.fed import FedVerifier
from hedgerow.engine.sequence import Phase
from hedgerow.engine.step import LocalDrafter, step_here
from hedgerow.engine.types import Finish, Sampling
from hedgerow.engine.verifier import VerifierEngine
from hedgerow.model.fed import fed_steps
from kernels.tree_build import PlainTree
from tests.engine_rig import EOS, SETTINGS, VOCABULARY, Rig, prompt
from tests.fed_host import HostFed

SHORT = Sampling(max_tokens=30, ignore_eos=True)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return Rig(tmp_path_factory.mktemp("rig"))


class Fed:
    """An engine in which steps feed each other, and what drove it."""

    def __init__(self, rig: Rig, feed: Any = None, **limits: int) -> None:
        limits.setdefault("pages", 64)
        self.engine = FedVerifier(rig.model, EngineConfig(**limits), VOCABULARY, EOS)
        self.drafts = DrafterEngine(rig.draft_model, DrafterConfig())
        self.feed = feed or HostFed(rig.model, rig.draft_model)
        self.engine.feed(self.feed)

    def run(self, jobs: Sequence[Job], between: Between | None = None) -> Run:
        return run(self.engine, LocalDrafter(self.drafts), jobs, between)


def run(engine: VerifierEngine, drafter: LocalDrafter, jobs: Sequence[Job], between: Between | None = None) -> Run:
    """`drive_now`, with the engine's own check at every step and no page kept at the end."""

    def each(engine: VerifierEngine, steps: int, done: Run) -> None:
        engine.check()
        if between is not None:
            between(engine, steps, done)

    done = drive_now(engine, drafter, jobs, each)
    assert engine.load().free_pages == engine.pool.pages
    return done


def jobs(count: int, budget: int, tokens: int = 40, **more: Any) -> list[Job]:
    names = list(SETTINGS)
    return [
        Job(f"s{n}", prompt(5 + 7 * n, n), replace(SETTINGS[names[n % 4]], seed=n, max_tokens=tokens), budget, **more)
        for n in range(count)
    ]


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("budget", [0, 7, 16])
def test_tokens_are_those_of_plain_decoding(rig: Rig, budget: int, count: int) -> None:
    fed, given = Fed(rig), jobs(count, budget)
    done = fed.run(given)
    assert done.tokens == rig.plain_all(given)
    apart = run(rig.engine(), LocalDrafter(DrafterEngine(rig.draft_model, DrafterConfig())), given)
    assert done.finish == apart.finish
    assert fed.engine.fed_steps >= 0.7 * len(apart.results)
    assert len(done.results) <= len(apart.results) + 2 * fed.feed.lines
    drafted = sum(usage.draft_tokens for usage in done.usage.values())
    assert (drafted > 100) is (budget > 0)


def test_other_budgets_in_one_line(rig: Rig) -> None:
    given = [replace(job, budget=budget) for job, budget in zip(jobs(4, 0), (0, 3, 16, 7), strict=True)]
    fed = Fed(rig)
    done = fed.run(given)
    assert done.tokens == rig.plain_all(given)
    assert 4 in fed.feed.members
    assert done.usage["s0"].draft_tokens == 0 < done.usage["s1"].draft_tokens


def test_sequences_join_and_leave(rig: Rig) -> None:
    """Long prompts in chunks beside running ones; more than there are places and pages for."""
    given = [
        Job(f"s{n}", prompt(90 if n % 3 else 10, n), Sampling(seed=n, max_tokens=12 + 9 * n), 7, arrives=4 * n)
        for n in range(8)
    ]
    fed = Fed(rig, max_sequences=4, pages=9, prefill_rows=32)
    done = fed.run(given)
    assert done.tokens == rig.plain_all(given)
    assert fed.feed.lines > 5
    assert max(fed.feed.members) > 1


@pytest.mark.parametrize("trouble", ["none", "no room", "a fault", "a cancelled one", "logits of its own"])
def test_prompts_are_computed_beside_a_line(rig: Rig, trouble: str) -> None:
    late = replace(SHORT, min_tokens=4) if trouble == "logits of its own" else SHORT
    given = [*jobs(3, 7, tokens=60), *(Job(f"l{n}", prompt(200, n), late, 7, arrives=4 + n) for n in range(2))]
    fed, lines, plain = Fed(rig, prefill_rows=16), list[int](), rig.plain_all(given)
    fed.feed.fails = lambda n: trouble == "a fault" and n == -5
    fed.feed.crowded = trouble == "no room"

    def between(engine: VerifierEngine, steps: int, done: Run) -> None:
        first = engine.sequence("l0")
        if first is not None and first.phase is Phase.PREFILLING:
            lines.append(fed.feed.lines)
        if trouble == "a cancelled one" and fed.feed.computes == 6:
            engine.cancel("l0", 1, 1)

    done = fed.run(given, between)
    cut = ["l0"] if trouble == "a cancelled one" else []
    assert [name for name in done.tokens if done.tokens[name] != plain[name]] == cut
    if trouble == "none":
        assert lines[1] == lines[-1], "the line went on"
        assert fed.feed.computes > 20
        assert fed.feed.members[-1] > 3, "whose first token came joined it"
        first = next(u for result in done.results for u in result.updates if u.session_id == "l1")
        assert sum(piece.prompt_rows for piece in first.chunks) == 200


def test_pages_of_prompts_that_begin_alike(rig: Rig) -> None:
    """Shared by sequences that end and come while steps are under way: nobody writes what another one reads."""
    begin = prompt(130)
    given = [
        Job(f"s{n}", begin + prompt(n % 3, n), Sampling(seed=n, max_tokens=10 + 7 * n), 7, arrives=3 * n)
        for n in range(6)
    ]
    fed = Fed(rig, max_sequences=3, pages=14)
    done = fed.run(given)
    assert done.tokens == rig.plain_all(given)
    assert fed.engine.load().prefixes.hit_tokens >= 5 * 128
    assert fed.feed.lines > 3


def test_stop_strings_and_tokens_end_a_sequence_before_what_was_computed_behind_them(rig: Rig) -> None:
    plain, given = rig.plain_all(jobs(4, 16)), list[Job]()
    for n, job in enumerate(jobs(4, 16)):
        text = [bytes([t % 128]).decode() for t in plain[job.name]]
        stops = {"stop": ("".join(text[5:7]),)} if n % 2 else {"stop_token_ids": (plain[job.name][9],)}
        given.append(replace(job, sampling=replace(job.sampling, **stops)))
    vocabulary = [bytes([token % 128]) for token in range(512)]
    ended = []
    for kind in (FedVerifier, VerifierEngine):
        engine = kind(rig.model, EngineConfig(pages=64), vocabulary, EOS)
        if isinstance(engine, FedVerifier):
            engine.feed(HostFed(rig.model, rig.draft_model))
        done = run(engine, LocalDrafter(DrafterEngine(rig.draft_model, DrafterConfig())), given)
        last = {update.session_id: update for result in done.results for update in result.updates if update.finish}
        ended.append((done.tokens, done.finish, {n: (u.matched_stop, u.matched_token) for n, u in last.items()}))
        if isinstance(engine, FedVerifier):
            assert engine.fed_steps > 3
    assert ended[0] == ended[1]
    assert set(ended[0][1].values()) == {Finish.STOP}


def test_cancelled_in_any_step(rig: Rig) -> None:
    """What was under way for it is told to nobody, and the others go on."""
    given = jobs(5, 7, tokens=60)
    plain = rig.plain_all(given)
    for seed in range(3):
        choose = random.Random(seed)
        at = {choose.randint(1, 20): f"s{n}" for n in range(3)}

        def between(engine: VerifierEngine, steps: int, done: Run, at: dict[int, str] = at) -> None:
            if (name := at.pop(steps, None)) is not None:
                engine.cancel(name, 1, 1)

        done = Fed(rig).run(given, between)
        for name, tokens in done.tokens.items():
            if done.finish[name] is Finish.CANCELLED:
                assert tokens == plain[name][: len(tokens)]
            else:
                assert tokens == plain[name]
        assert Finish.CANCELLED in done.finish.values()


@pytest.mark.parametrize("ahead", [0, 3])
def test_attached_again_while_steps_are_under_way(rig: Rig, ahead: int) -> None:
    """With what it has here, and with more, which another verifier computed meanwhile."""
    given = jobs(3, 7, tokens=50)
    plain, attempts = rig.plain_all(given), list[int]()

    def between(engine: VerifierEngine, steps: int, done: Run) -> None:
        if steps in (6, 11):
            attempts.append(steps)
            known = len(done.tokens["s1"])
            job = replace(given[1], committed=plain["s1"][: known + ahead])
            engine.start(job.start(attempt=len(attempts) + 1))
            done.tokens["s1"] = list(job.committed)

    fed = Fed(rig)
    done = run_attached(fed, given, between)
    assert done.tokens == plain
    assert len(attempts) == 2
    assert fed.engine.load().adopted == 2


def run_attached(fed: Fed, given: Sequence[Job], between: Between) -> Run:
    """Updates of attempts that were replaced are refusals, and nobody's tokens."""
    engine, done, steps = fed.engine, Run(), 0
    attempt = dict.fromkeys((job.name for job in given), 1)
    for job in given:
        done.tokens[job.name] = []
        engine.start(job.start())
    while engine.has_work():
        between(engine, steps, done)
        held = {name: engine.sequence(name) for name in attempt}
        result = step_here(engine, LocalDrafter(fed.drafts))
        if result is None:
            continue
        steps += 1
        for name, sequence in held.items():
            attempt[name] = max(attempt[name], sequence.pair[1] if sequence else 1)
        kept = [update for update in result.updates if update.error is None]
        done.take(replace(result, updates=kept))
        for update in kept:
            engine.committed(update.session_id, update.epoch, update.attempt, len(done.tokens[update.session_id]))
    return done


def test_a_store_that_lags_holds_them_back_as_ever(rig: Rig) -> None:
    """Nothing is acknowledged: no token beyond what may be emitted, and the line ends in time."""
    fed, given = Fed(rig, run_ahead=20), jobs(2, 7, tokens=60)
    told = {job.name: list[int]() for job in given}
    for job in given:
        fed.engine.start(job.start())
    for _ in range(60):
        if not fed.engine.has_work():
            break
        result = step_here(fed.engine, LocalDrafter(fed.drafts))
        for update in result.updates if result else ():
            told[update.session_id] += update.tokens
    plain = rig.plain_all(given)
    assert fed.engine.fed_steps > 0
    for name, tokens in told.items():
        assert tokens == plain[name][:20]
    for job in given:
        fed.engine.committed(job.name, 1, 1, 20)
        fed.engine.cancel(job.name, 1, 1)


def twins(n: int, tree: PlainTree) -> PlainTree:
    """Of the second member two equal siblings: a walk would go down both."""
    if n != 1 or not tree.tokens:
        return tree
    return PlainTree([tree.tokens[0], *tree.tokens[:-1]], [-1] * len(tree.tokens), tree.logprobs)


def out_of_range(n: int, tree: PlainTree) -> PlainTree:
    return tree._replace(tokens=[1 << 30, *tree.tokens[1:]], parents=[5, *tree.parents[1:]]) if tree.tokens else tree


@pytest.mark.parametrize("spoil", [twins, out_of_range])
def test_a_tree_that_fails_its_check_after_the_fact(rig: Rig, spoil: Callable[[int, PlainTree], PlainTree]) -> None:
    given = jobs(3, 7)
    fed = Fed(rig, HostFed(rig.model, rig.draft_model, spoil))
    done = fed.run(given)
    assert done.tokens == rig.plain_all(given)
    assert sum(fed.engine.load().refused_trees.values()) > 3
    assert fed.engine.fed_steps > 3


@pytest.mark.parametrize("at", [1, 2, 9])
def test_a_step_that_cannot_be_launched(rig: Rig, at: int) -> None:
    fed, given = Fed(rig, HostFed(rig.model, rig.draft_model, fails=lambda n: n == at)), jobs(3, 7)
    done = fed.run(given)
    assert done.tokens == rig.plain_all(given)
    assert fed.feed.launched == at, "it was tried again"
    assert sum(usage.draft_tokens for usage in done.usage.values()) > 100, "trees go on, and so does all else"


def test_buffers_that_move_end_the_line(rig: Rig) -> None:
    fed, given = Fed(rig), jobs(2, 7)

    def between(engine: VerifierEngine, steps: int, done: Run) -> None:
        fed.feed.stale = steps == 8

    done = fed.run(given, between)
    assert done.tokens == rig.plain_all(given)
    assert fed.feed.lines >= 2


def test_what_changes_logits_is_computed_apart(rig: Rig) -> None:
    biased = jobs(1, 7)[0]
    biased = replace(biased, sampling=replace(biased.sampling, logit_bias={3: 2.0}))
    late = Job("late", prompt(9), Sampling(max_tokens=30, min_tokens=10), 7)
    fed = Fed(rig)
    done = fed.run([biased])
    assert done.tokens == rig.plain_all([biased])
    assert fed.engine.fed_steps == 0
    fed = Fed(rig)
    assert fed.run([late]).tokens == rig.plain_all([late])
    assert fed.engine.fed_steps > 0


def test_rebuilt_from_its_tokens_and_shown_its_trees(rig: Rig) -> None:
    first, other = jobs(2, 7)
    plain = rig.plain_all([first, other])
    again = replace(first, committed=plain[first.name][:11], want_trees=True)
    fed = Fed(rig)
    done = fed.run([again, other])
    assert done.tokens == plain
    shown = [u.stats for r in done.results for u in r.updates if u.session_id == again.name and u.stats]
    assert any(stats.tree_tokens and len(stats.tree_parents) == stats.tree_nodes for stats in shown)


def test_models_that_are_not_on_one_gpu_have_no_such_steps(rig: Rig) -> None:
    assert fed_steps(rig.model, rig.draft_model) is None
