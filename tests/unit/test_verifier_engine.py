"""The engine around the tokens: queues, cancels, fences, deadlines, bad drafters, faults, and nothing left behind."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from bench.drive import Job, Run, drive_now
from hedgerow.engine.drafter import DrafterConfig, DrafterEngine
from hedgerow.engine.step import NoDrafter
from hedgerow.engine.types import (
    DraftAnswer,
    DraftBatch,
    DraftWork,
    Finish,
    Sampling,
    StepTimings,
    TreeNodes,
    Update,
)
from hedgerow.engine.verifier import VerifierEngine
from hedgerow.errors import Fenced, HedgerowError, InvalidRequest, Overloaded
from tests.engine_rig import EOS, Rig, ScriptedDrafter, oracle, prompt


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Rig(tmp_path_factory.mktemp("tiny"), seed=1)
    torch.set_num_threads(threads)


def job(name: str = "s", length: int = 20, tokens: int = 30, **fields: object) -> Job:
    return Job(name, prompt(length), Sampling(max_tokens=tokens, ignore_eos=True), **fields)  # type: ignore[arg-type]


def one_step(engine: VerifierEngine, answer: DraftAnswer | None = None) -> list[Update]:
    plan = engine.plan()
    return [] if plan is None else list(engine.verify(plan, answer).updates)


def assert_empty(engine: VerifierEngine) -> None:
    load = engine.load()
    assert (load.running, load.waiting, load.held_sequences) == (0, 0, 0)
    assert load.free_pages == load.total_pages
    engine.check()


# Cancels, deadlines, fences


def test_two_hundred_random_cancels_leave_nothing(rig: Rig) -> None:
    engine, choose = rig.engine(pages=16, prefill_rows=40), random.Random(4)
    ends: dict[str, Finish] = {}
    alive: list[str] = []
    started = cancelled = 0
    drafter = ScriptedDrafter(lambda work: TreeNodes([7, 8], [-1, 0], [0.0, 0.0]))
    while cancelled < 200 or engine.has_work():
        for _ in range(choose.randint(0, 4) if cancelled < 200 else 0):
            engine.start(replace(job(f"s{started}", choose.randint(1, 100), choose.randint(1, 20)), budget=4).start())
            alive.append(f"s{started}")
            started += 1
        if alive and cancelled < 200 and choose.random() < 0.9:
            cancelled += 1
            engine.cancel(alive.pop(choose.randrange(len(alive))), 1, 1)
        plan = engine.plan()
        if plan is None:
            continue
        answer = drafter_answer(drafter, plan.draft) if choose.random() < 0.8 else None
        for update in engine.verify(plan, answer).updates:
            if update.finish:
                assert update.session_id not in ends, "two terminal updates"
                ends[update.session_id] = update.finish
                if update.session_id in alive:
                    alive.remove(update.session_id)
        engine.check()
    assert len(ends) == started
    assert sum(finish is Finish.CANCELLED for finish in ends.values()) == 200
    assert Finish.LENGTH in ends.values()
    assert_empty(engine)


def drafter_answer(drafter: ScriptedDrafter, batch: DraftBatch) -> DraftAnswer:
    coroutine = drafter.draft(batch)
    try:
        coroutine.send(None)
    except StopIteration as done:
        answer = done.value
        assert isinstance(answer, DraftAnswer)
        return answer
    raise AssertionError("a scripted drafter never waits")


def test_a_cancel_takes_effect_within_one_step_and_frees_the_pages(rig: Rig) -> None:
    engine = rig.engine()
    engine.start(job().start())
    one_step(engine)
    one_step(engine)
    engine.cancel("s", 1, 1)
    (update,) = one_step(engine)
    assert (update.finish, update.offset, update.tokens) == (Finish.CANCELLED, 2, ())
    assert update.usage is not None
    assert update.usage.completion_tokens == 2
    assert_empty(engine)
    engine.cancel("s", 1, 1)
    engine.cancel("nobody", 1, 1)
    assert engine.plan() is None


def test_a_waiting_sequence_can_be_cancelled(rig: Rig) -> None:
    engine = rig.engine(max_sequences=1)
    engine.start(job("runs").start())
    engine.start(job("waits").start())
    one_step(engine)
    engine.cancel("waits", 1, 1)
    ends = {update.session_id: update.finish for update in one_step(engine)}
    assert ends == {"runs": Finish.NONE, "waits": Finish.CANCELLED}


@pytest.mark.parametrize("admitted", [True, False])
def test_a_deadline_ends_a_sequence_running_or_waiting(rig: Rig, admitted: bool) -> None:
    engine = rig.engine(max_sequences=1)
    if not admitted:
        engine.start(job("first").start())
    engine.start(replace(job().start(), deadline=time.monotonic() + 3600))
    one_step(engine)
    held = engine.sequence("s")
    assert held is not None
    deadline = time.monotonic()
    held.start = replace(held.start, deadline=deadline)
    assert engine.next_deadline() == deadline
    assert engine.has_work()
    update = next(update for update in one_step(engine) if update.session_id == "s")
    assert update.finish is Finish.DEADLINE
    assert engine.sequence("s") is None
    engine.cancel("first", 1, 1)
    one_step(engine)
    assert_empty(engine)


def test_an_older_attempt_is_fenced_and_a_newer_one_replaces_it(rig: Rig) -> None:
    engine = rig.engine()
    start = job().start(epoch=2, attempt=3)
    engine.start(start)
    one_step(engine)
    for epoch, attempt in ((1, 9), (2, 2)):
        with pytest.raises(Fenced) as raised:
            engine.start(replace(start, epoch=epoch, attempt=attempt))
        assert raised.value.metadata["held"] == "2"
        assert raised.value.metadata["held_attempt"] == "3"
        with pytest.raises(Fenced):
            engine.cancel("s", epoch, attempt)
    engine.start(start)  # the same again: nothing
    assert [(u.epoch, u.attempt, u.offset) for u in one_step(engine)] == [(2, 3, 1)]
    engine.start(replace(start, epoch=3, attempt=1, committed=rig.plain(job())[:2]))
    old, new = one_step(engine)
    assert (old.epoch, old.attempt, old.finish) == (2, 3, Finish.ERROR)
    assert isinstance(old.error, Fenced)
    assert (old.error.metadata["held"], old.error.metadata["held_attempt"]) == ("3", "1")
    assert (new.epoch, new.attempt, new.offset, tuple(new.tokens)) == (3, 1, 2, tuple(rig.plain(job())[2:3]))
    engine.committed("s", 2, 3, 3)
    one_step(engine)
    held = engine.sequence("s")
    assert held is not None
    assert held.committed == 2, "an old attempt's offset must not count"


def test_an_equal_attempt_of_another_gateway_is_fenced(rig: Rig) -> None:
    """Redis forgot a session, a second gateway made it again with epoch 1: its start was taken for the first one's,
    whose sequence was still here, and the second one waited for ever."""
    engine = rig.engine()
    start = replace(job().start(), owner=b"first")
    engine.start(start)
    one_step(engine)
    with pytest.raises(Fenced) as raised:
        engine.start(replace(start, owner=b"second"))
    assert (raised.value.metadata["held"], raised.value.metadata["held_attempt"]) == ("1", "1")
    engine.start(replace(start, owner=b"second", epoch=2))
    (update,) = [update for update in one_step(engine) if update.owner == b"second"]
    assert (update.epoch, update.offset) == (2, 0)
    assert list(update.tokens) == rig.plain(job())[: len(update.tokens)]
    assert update.tokens


# Limits and input


def test_the_queue_is_bounded_and_says_when_to_come_back(rig: Rig) -> None:
    engine = rig.engine(max_sequences=2, max_waiting=3)
    for i in range(5):
        engine.start(job(f"s{i}").start())
    with pytest.raises(Overloaded) as raised:
        engine.start(job("late").start())
    assert raised.value.retry_after is not None
    assert 0 < raised.value.retry_after <= 30
    assert raised.value.metadata == {"what": "the waiting queue", "queued": "5", "limit": "5"}
    one_step(engine)
    load = engine.load()
    assert (load.running, load.waiting, load.waiting_limit) == (2, 3, 3)
    with pytest.raises(Overloaded):
        engine.start(job("late").start())
    engine.cancel("s4", 1, 1)
    one_step(engine)
    engine.start(job("late").start())


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"prompt": ()}, "prompt"),
        ({"prompt": (1, 512)}, "prompt"),
        ({"prompt": (-1,)}, "prompt"),
        ({"committed": (600,)}, "committed"),
        ({"committed": (1,) * 31}, "committed"),
        ({"budget": -1}, "budget"),
        ({"topk_cap": -1}, "topk_cap"),
        ({"sampling": Sampling(max_tokens=4096)}, "max_tokens"),
        ({"sampling": Sampling(max_tokens=4000)}, "max_tokens"),
        ({"sampling": Sampling(max_tokens=0)}, "max_tokens"),
        ({"sampling": Sampling(temperature=float("nan"))}, "temperature"),
        ({"sampling": Sampling(top_p=0.0)}, "top_p"),
        ({"sampling": Sampling(stop=("\ud800",))}, "stop"),
    ],
)
def test_what_cannot_run_is_refused_with_its_field_and_starts_nothing(
    rig: Rig, change: dict[str, object], field: str
) -> None:
    engine = rig.engine(pages=4)
    with pytest.raises(InvalidRequest) as raised:
        engine.start(replace(job().start(), **change))  # type: ignore[arg-type]
    assert raised.value.field == field
    assert engine.plan() is None
    assert_empty(engine)


def test_a_budget_above_the_limit_is_cut_to_it(rig: Rig) -> None:
    engine = rig.engine(max_budget=5, default_budget=0)
    engine.start(replace(job(), budget=1000).start())
    one_step(engine)
    plan = engine.plan()
    assert plan is not None
    assert [work.budget for work in plan.draft.works] == [5]


def test_a_model_without_feature_layers_never_asks_for_trees(rig: Rig) -> None:
    """A verifier without a drafter would otherwise compose features of width 0 in every step."""
    model = rig.model
    layers, width = model.feature_layers, model.feature_width
    try:
        model.feature_layers, model.feature_width = (), 0
        engine = rig.engine()
        assert (engine.config.max_budget, engine.config.default_budget) == (0, 0)
        run = drive_now(engine, NoDrafter(), [replace(job(), budget=8)])
    finally:
        model.feature_layers, model.feature_width = layers, width
    assert run.tokens["s"] == rig.plain(job())
    assert engine.load().missed_drafts == 0


# Ends


def test_the_last_update_carries_finish_usage_and_the_token_that_stopped_it(rig: Rig) -> None:
    expected = rig.plain(job())
    token = expected[9]
    sampling = Sampling(max_tokens=30, ignore_eos=True, stop_token_ids=(token,))
    work = Job("s", prompt(20), sampling, budget=16)
    end = expected.index(token) + 1
    run = drive_now(rig.engine(), oracle([work], {"s": expected}), [work])
    last = run.results[-1].updates[0] if run.results[-1].updates else run.results[-2].updates[0]
    assert run.tokens["s"] == expected[:end]
    assert (last.finish, last.matched_token) == (Finish.STOP, token)
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (20, end)
    assert 0 < last.usage.accepted_draft_tokens <= last.usage.draft_tokens


@pytest.mark.parametrize("budget", [0, 7, 32])
def test_a_stop_string_cuts_the_accepted_path_where_plain_decoding_stops(rig: Rig, budget: int) -> None:
    expected = rig.plain(job())
    # the bytes of three tokens in the middle; tests.engine_rig's vocabulary is one byte a token
    text = bytes(token % 256 for token in expected)
    stop = next(
        piece.decode() for at in range(8, 24) if (piece := text[at : at + 3]).isascii() and text.index(piece) == at
    )
    end = text.index(stop.encode()) + 3
    work = replace(job(), sampling=Sampling(max_tokens=30, ignore_eos=True, stop=(stop,)), budget=budget)
    run = drive_now(rig.engine(), oracle([work], {"s": expected}, seed=budget), [work])
    assert run.tokens["s"] == expected[:end]
    assert run.finish["s"] is Finish.STOP
    assert [u.matched_stop for r in run.results for u in r.updates if u.finish] == [stop]


def test_a_session_that_was_complete_before_ends_at_once(rig: Rig) -> None:
    """Its tokens were committed and its end was lost: nothing may be computed or emitted again."""
    expected = rig.plain(job())
    run = drive_now(rig.engine(), NoDrafter(), [replace(job(), committed=expected)])
    assert (run.tokens["s"], run.finish["s"]) == (expected, Finish.LENGTH)
    assert run.usage["s"].completion_tokens == 30


# Drafters that fail


BAD_TREES = {
    "own_parent": TreeNodes([1, 2], [-1, 1], [0.0] * 2),
    "forward_parent": TreeNodes([1, 2, 3], [-1, 2, 1], [0.0] * 3),  # a cycle
    "over_budget": TreeNodes([1] * 10_000, list(range(-1, 9_999)), [0.0] * 10_000),
    "token_out_of_range": TreeNodes([1, 512], [-1, 0], [0.0] * 2),
    "parent_out_of_range": TreeNodes([1, 2], [-1, -2], [0.0] * 2),
    "duplicate_sibling": TreeNodes([1, 1], [-1, -1], [0.0] * 2),
    "length_mismatch": TreeNodes([1, 2], [-1], [0.0] * 2),
}


@pytest.mark.parametrize("why", BAD_TREES)
def test_a_bad_tree_is_refused_counted_and_changes_nothing(rig: Rig, why: str) -> None:
    engine = rig.engine()
    run = drive_now(engine, ScriptedDrafter(lambda work: BAD_TREES[why]), [replace(job(), budget=8)])
    assert run.tokens["s"] == rig.plain(job())
    assert set(engine.load().refused_trees) == {why}
    assert engine.load().refused_trees[why] == 28  # every step but the prompt's and the last token's
    assert_empty(engine)


def test_one_sequences_bad_tree_leaves_its_neighbours_trees_alone(rig: Rig) -> None:
    engine = rig.engine()
    jobs = [job("bad"), job("good")]
    good = oracle(jobs, rig.plain_all(jobs))

    def tree(work: DraftWork) -> TreeNodes:
        return BAD_TREES["own_parent"] if work.sequence == 1 else good.tree(work)

    run = drive_now(engine, ScriptedDrafter(tree), jobs)
    assert run.tokens == rig.plain_all(jobs)
    assert run.usage["bad"].draft_tokens == 0
    assert run.usage["good"].accepted_draft_tokens > 5


def test_an_answer_to_another_step_is_dropped_and_counted(rig: Rig) -> None:
    engine, truth = rig.engine(), rig.plain(job())

    class Late(ScriptedDrafter):
        async def draft(self, batch: DraftBatch) -> DraftAnswer | None:
            answer = await super().draft(batch)
            return replace(answer, step_id=batch.step_id - 1) if answer is not None else None

    run = drive_now(engine, Late(lambda work: TreeNodes([truth[0]], [-1], [0.0])), [replace(job(), budget=4)])
    assert run.tokens["s"] == truth
    assert run.usage["s"].draft_tokens == 0
    assert engine.load().missed_drafts == 28


def test_an_answer_about_unknown_or_unasked_sequences_is_ignored(rig: Rig) -> None:
    engine = rig.engine()
    jobs = [replace(job("plain"), budget=0), replace(job("tree"), budget=4)]

    class Chatty(ScriptedDrafter):
        async def draft(self, batch: DraftBatch) -> DraftAnswer | None:
            answer = await super().draft(batch)
            assert answer is not None
            more = [replace(tree, sequence=n) for tree in answer.trees for n in (1, 77)]
            return replace(answer, trees=[*more, *answer.trees, *answer.trees])

    run = drive_now(engine, Chatty(lambda work: TreeNodes([5], [-1], [0.0])), jobs)
    assert run.tokens == rig.plain_all(jobs)
    assert run.usage["plain"].draft_tokens == 0


# Features on their way to the drafter


def test_the_drafter_gets_every_position_once_and_in_order(rig: Rig) -> None:
    engine = rig.engine(prefill_rows=16)
    jobs = [replace(job("a", length=50), budget=6), replace(job("b", length=3), budget=6, arrives=4)]
    drafter = oracle(jobs, rig.plain_all(jobs))
    drive_now(engine, drafter, jobs)
    lengths = {1: 50, 2: 3}
    have = dict.fromkeys(lengths, 0)
    for batch in drafter.batches:
        for work in batch.works:
            assert work.feature_position == have[work.sequence]
            have[work.sequence] += len(work.features)
            if work.budget:
                assert have[work.sequence] == work.anchor_position, "a tree is asked for with features up to its anchor"
            assert len(work.features) <= 16
    assert all(have[n] >= lengths[n] + 20 for n in lengths)
    assert sorted(n for batch in drafter.batches for n in batch.release) == [1, 2]


def test_the_features_are_those_of_the_accepted_rows(rig: Rig) -> None:
    """Taking the first rows instead of the path's is wrong for trees, and only shows as lower acceptance."""
    seen: dict[int, dict[int, torch.Tensor]] = {}
    for budget in (1, 32):
        work = replace(job(), budget=budget)
        base = oracle([work], rig.plain_all([work]), seed=2)
        rows: dict[int, torch.Tensor] = {}

        def note(draft: DraftWork, base: ScriptedDrafter = base, rows: dict[int, torch.Tensor] = rows) -> TreeNodes:
            for i, row in enumerate(draft.features):
                rows[draft.feature_position + i] = row.clone()
            return base.tree(draft)

        drive_now(rig.engine(), ScriptedDrafter(note), [work])
        seen[budget] = rows
    positions = seen[1].keys() & seen[32].keys()
    assert len(positions) >= 40
    assert all(torch.equal(seen[1][p], seen[32][p]) for p in positions)


def test_a_restarted_drafter_gets_what_the_ring_still_holds_in_bounded_chunks(rig: Rig) -> None:
    engine = rig.engine(feature_ring=64, feature_rows=24)
    work = replace(job(length=100, tokens=40), budget=4)
    drafter = oracle([work], rig.plain_all([work]))
    asked: list[DraftWork] = []

    class Restarts(ScriptedDrafter):
        async def draft(self, batch: DraftBatch) -> DraftAnswer | None:
            asked.extend(batch.works)
            if any(work.anchor_position >= 110 for work in batch.works):
                self.incarnation = b"another"
            return await super().draft(batch)

    run = drive_now(engine, Restarts(drafter.tree), [work])
    assert run.tokens["s"] == rig.plain(work)
    assert all(len(draft.features) <= 24 for draft in asked)
    restart = next(i for i, draft in enumerate(asked) if draft.anchor_position >= 110)
    again = asked[restart + 1]
    assert again.anchor_position - 64 <= again.feature_position < asked[restart].feature_position
    assert again.budget == 0, "no tree before the features reach the anchor"
    assert any(draft.budget == 4 for draft in asked[restart + 2 :])


def test_a_drafter_that_forgot_everything_has_its_context_again_two_steps_later(rig: Rig) -> None:
    """It used to keep only what came after its restart: the context stayed short and acceptance with it."""
    engine, drafter = rig.engine(), DrafterEngine(rig.draft_model, DrafterConfig())
    engine.start(replace(job(), budget=4).start())
    trees: list[int] = []
    for turn in range(8):
        plan = engine.plan()
        assert plan is not None
        if turn == 4:
            drafter.drop_all()
        answer = drafter.draft(plan.draft)
        trees += [len(tree.nodes.tokens) for tree in answer.trees]
        engine.verify(plan, answer)
    (state,) = drafter._states.values()
    assert state.start == 0
    assert trees == [4, 4, 4, 0, 4, 4, 4], "no tree on the few features that were meant for the one before"


def test_a_batch_names_the_drafter_whose_answer_was_used_last(rig: Rig) -> None:
    """Nothing said whose state a request's positions follow, so that another drafter took them for its own."""
    engine, drafter = rig.engine(), DrafterEngine(rig.draft_model, DrafterConfig())
    engine.start(replace(job(), budget=4).start())
    named = []
    for turn in range(6):
        plan = engine.plan()
        assert plan is not None
        named.append(plan.draft.drafter)
        if turn == 3:
            first = drafter.incarnation
            drafter.drop_all()
        answer = drafter.draft(plan.draft)
        engine.verify(plan, answer if turn not in (0, 3) else None)  # those two come too late
    assert named == [b"", b"", first, first, first, drafter.incarnation]


def test_the_last_update_says_where_the_sequences_time_went(rig: Rig) -> None:
    """No update carried it, so that no session's end did."""
    engine = rig.engine(max_sequences=1, prefill_rows=16)
    engine.start(job("first", tokens=6).start())
    engine.start(job("second", length=40, tokens=4).start())
    begun, updates, steps = time.perf_counter_ns(), list[Update](), list[StepTimings]()
    while engine.has_work():
        plan = engine.plan()
        assert plan is not None
        result = engine.verify(plan, None)
        updates += result.updates
        steps.append(result.timings)
    taken = time.perf_counter_ns() - begun
    told = [bool(update.finish) or update.offset == 0 for update in updates]  # the first ones say how long they waited
    assert [update.timings is not None for update in updates] == told
    first, second = (update.timings for update in updates if update.finish)
    assert first is not None
    assert second is not None
    assert first.prefill_ns == sum(step.total_ns for step in steps[:2])  # 20 rows, 16 a step; they draw the first token
    assert first.verify_ns == sum(step.verify_ns for step in steps[2:7])
    assert first.accept_ns == sum(step.accept_ns for step in steps[2:7])
    assert second.queue_ns > first.prefill_ns + first.verify_ns + first.accept_ns > first.queue_ns
    assert second.prefill_ns == sum(step.total_ns for step in steps[7:10])
    assert second.step_end_unix_ns == steps[12].step_end_unix_ns  # a last one only tells the drafter that it is over
    for t in (first, second):
        assert t.queue_ns + t.prefill_ns + t.draft_ns + t.verify_ns + t.accept_ns < t.total_ns < 2 * taken
        assert min(t.queue_ns, t.prefill_ns, t.draft_ns, t.verify_ns, t.accept_ns) > 0


def test_a_sequence_that_never_ran_spent_all_its_time_in_the_queue(rig: Rig) -> None:
    engine = rig.engine(max_sequences=1)
    engine.start(job("runs").start())
    engine.start(job("waits").start())
    one_step(engine)
    engine.cancel("waits", 1, 1)
    (last,) = [update for update in one_step(engine) if update.session_id == "waits"]
    assert last.timings is not None
    assert last.timings.queue_ns == last.timings.total_ns > 0
    assert last.timings.prefill_ns == last.timings.verify_ns == 0


def test_features_that_nobody_acknowledged_are_sent_again(rig: Rig) -> None:
    engine = rig.engine()
    engine.start(replace(job(), budget=4).start())
    one_step(engine)
    first = engine.plan()
    assert first is not None
    engine.verify(first, None)
    second = engine.plan()
    assert second is not None
    assert [w.feature_position for w in first.draft.works] == [w.feature_position for w in second.draft.works] == [0]
    assert [len(w.features) for w in (*first.draft.works, *second.draft.works)] == [20, 21]
    assert engine.load().missed_drafts == 1


# Pace, faults, threads


def test_a_slow_store_holds_a_sequence_until_it_acknowledges(rig: Rig) -> None:
    engine = rig.engine(run_ahead=5)
    engine.start(job().start())
    run = Run(tokens={"s": []})
    while engine.has_work():
        plan = engine.plan()
        assert plan is not None
        run.take(engine.verify(plan, None))
    assert len(run.tokens["s"]) == 5
    engine.committed("s", 1, 1, 2)
    assert engine.has_work()
    while (plan := engine.plan()) is not None:
        run.take(engine.verify(plan, None))
    assert len(run.tokens["s"]) == 7


def test_a_fault_in_the_forward_pass_ends_the_running_cleanly_and_the_engine_goes_on(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = rig.engine(max_sequences=2)
    for name in ("a", "b", "waits"):
        engine.start(job(name).start())
    one_step(engine)
    one_step(engine)
    with monkeypatch.context() as broken:
        broken.setattr(rig.model, "forward", lambda *_: 1 / 0)
        ends = one_step(engine)
    assert [(u.session_id, u.finish, u.offset) for u in ends] == [("a", Finish.ERROR, 2), ("b", Finish.ERROR, 2)]
    assert all(isinstance(u.error, HedgerowError) and "ZeroDivisionError" in str(u.error) for u in ends)
    assert all(u.usage is not None for u in ends)
    assert engine.load().faults == 1
    engine.check()
    run = Run(tokens={"waits": []})
    while (plan := engine.plan()) is not None:
        run.take(engine.verify(plan, None))
    assert run.tokens["waits"] == rig.plain(job())
    assert_empty(engine)


def test_a_plan_that_was_dropped_is_planned_again(rig: Rig) -> None:
    """A step may be abandoned between plan and verify, when its caller is cancelled."""
    engine = rig.engine()
    engine.start(job().start())
    run = Run(tokens={"s": []})
    while (plan := engine.plan()) is not None:
        again = engine.plan()
        assert again is not None
        assert (again.works, again.step_id) == (plan.works, plan.step_id + 1)
        run.take(engine.verify(again, None))
    assert run.tokens["s"] == rig.plain(job())


def test_callers_on_other_threads_lose_nothing(rig: Rig) -> None:
    engine = rig.engine(max_waiting=1000)
    ends: list[str] = []

    def caller(number: int) -> None:
        for i in range(25):
            name = f"{number}-{i}"
            engine.start(job(name, length=3, tokens=3).start())
            if i % 2:
                engine.cancel(name, 1, 1)

    threads = [threading.Thread(target=caller, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) or engine.has_work():
        ends += [update.session_id for update in one_step(engine) if update.finish]
    assert sorted(ends) == sorted(f"{n}-{i}" for n in range(4) for i in range(25))
    assert_empty(engine)


def test_trees_are_returned_where_they_were_asked_for(rig: Rig) -> None:
    jobs = [replace(job("asks"), budget=4, want_trees=True), replace(job("silent"), budget=4)]
    run = drive_now(rig.engine(), ScriptedDrafter(lambda work: TreeNodes([5, 6], [-1, 0], [0.0, 0.0])), jobs)
    stats = {u.session_id: u.stats for r in run.results for u in r.updates if u.offset == 3}
    asks, silent = stats["asks"], stats["silent"]
    assert asks is not None
    assert silent is not None
    assert (asks.tree_tokens, asks.tree_parents, asks.tree_nodes, asks.budget) == ((5, 6), (-1, 0), 2, 4)
    assert (silent.tree_tokens, silent.tree_parents, silent.tree_nodes) == ((), (), 2)
    assert (asks.batch_sequences, asks.batch_rows, asks.emitted) == (2, 6, 1 + asks.accepted)
    assert EOS.isdisjoint({5, 6})
