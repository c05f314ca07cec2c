"""The number of threads follows what steps cost: more only while that pays, and back to fewer at once."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hedgerow.model.batch import SequenceRows
from hedgerow.model.compiled import CompiledK2
from hedgerow.model.compiled_dflash import CompiledDFlash
from hedgerow.model.select import load_drafter, load_target
from hedgerow.model.threads import LATEST, SOONEST, ThreadChoice, usual_threads
from tests.compiled_builds import missing_compiler
from tests.tiny import write_tiny

needs_compiler = pytest.mark.skipif(bool(missing_compiler()), reason=missing_compiler())
Cost = Callable[[int, int], float]  # of a step, by rows and threads


def quiet(rows: int, threads: int) -> float:
    """A machine of its own: a plain step gains nothing from a second thread, a tree does."""
    return 2.3 if rows == 1 else {1: 8.0, 2: 5.0}[threads]


def busy(rows: int, threads: int) -> float:
    """Something else wants the second core: the step waits for a thread that is not scheduled."""
    return {1: 9.0, 2: 110.0}[threads]


def run(choice: ThreadChoice, cost: Cost, steps: int, rows: int) -> list[int]:
    used = []
    for _ in range(steps):
        used.append(choice.threads(rows))
        choice.took(rows, cost(rows, used[-1]))
    return used


def test_trees_get_the_second_thread_and_plain_steps_do_not() -> None:
    choice = ThreadChoice(most=2, usual=1)
    assert run(choice, quiet, 2, 9) == [1, 1], "the usual number first"
    trees, plain = run(choice, quiet, 1000, 9), run(choice, quiet, 1000, 1)
    assert trees.count(2) > 950
    assert plain.count(2) < 30
    assert choice.threads(9) == choice.threads(15) == 2


def test_one_step_that_waited_for_a_descheduled_thread_ends_it() -> None:
    choice = ThreadChoice(2, 1)
    run(choice, quiet, 40, 9)
    while choice.threads(9) == 1:
        run(choice, quiet, 1, 9)
    assert run(choice, busy, 3, 9) == [2, 1, 1]


def test_a_busy_machine_is_tried_ever_more_seldom() -> None:
    used = run(ThreadChoice(2, 1), busy, 5000, 9)
    tries = [i for i, count in enumerate(used) if count == 2]
    assert len(tries) <= 12, "one slow step a trial is enough"
    gaps = [b - a for a, b in itertools.pairwise(tries)]
    assert gaps == sorted(gaps)
    assert SOONEST < gaps[0] <= gaps[-1] <= LATEST + 2


def test_steps_of_other_sizes_do_not_blur_a_comparison() -> None:
    """Nine rows and thirteen in turns: with two threads the larger steps take as long as the smaller with one."""
    choice = ThreadChoice(2, 1)

    def cost(rows: int, threads: int) -> float:
        return rows * {1: 1.0, 2: 0.7}[threads]

    for _ in range(200):
        run(choice, cost, 1, 9)
        run(choice, cost, 1, 13)
    assert (choice.threads(9), choice.threads(13)) == (2, 2)


def test_one_slow_step_of_a_trial_does_not_speak_against_the_second_thread() -> None:
    """The first has the other core's cold caches; the stack's steps are few, and the next trial would be far."""
    choice, cold = ThreadChoice(2, 1), iter([7.9])
    run(choice, lambda rows, threads: next(cold, 5.0) if threads == 2 else 8.0, 30, 9)
    assert choice.threads(9) == 2


def test_the_second_thread_comes_back_when_the_machine_is_quiet_again() -> None:
    choice = ThreadChoice(2, 1)
    run(choice, quiet, 100, 9)
    run(choice, busy, 300, 9)
    used = run(choice, quiet, 2 * LATEST, 9)
    assert used[-1] == choice.threads(9) == 2


def test_a_number_that_pays_is_compared_with_the_usual_one_again_and_again() -> None:
    """With longer contexts, say, every step is slower; only a comparison tells whether two are still better."""
    choice = ThreadChoice(2, 1)
    run(choice, quiet, 200, 9)

    def slower_with_two(rows: int, threads: int) -> float:
        return {1: 4.0, 2: 4.9}[threads]

    assert run(choice, slower_with_two, LATEST + SOONEST, 9)[-1] == 1


def test_where_there_is_no_choice_none_is_made() -> None:
    for most, usual in ((1, 1), (2, 7), (3, 3)):
        choice = ThreadChoice(most, usual)
        assert run(choice, lambda rows, threads: 1.0, 100, 9) == [most] * 100
    assert [usual_threads(cores) for cores in (0, 1, 2, 3, 8)] == [1, 1, 1, 2, 7]


@needs_compiler
def test_the_engine_takes_what_is_chosen_and_keeps_its_bits(tmp_path: Path) -> None:
    paths = write_tiny(tmp_path)
    model = CompiledK2.load(paths.target, paths.feature_layers, threads=2)
    rows, told = SequenceRows(0, [0], range(9), range(-1, 8), range(9)), list[tuple[int, float]]()

    class Alternating(ThreadChoice):
        def threads(self, rows: int) -> int:
            return 1 + len(told) % 2

        def took(self, rows: int, seconds: float) -> None:
            told.append((rows, seconds))

    model.choice = Alternating(2, 1)
    first, second = (model.forward([rows], model.new_cache(1)).logits for _ in range(2))
    assert torch.equal(first, second)
    assert [rows for rows, _ in told] == [9, 9]
    assert all(seconds > 0 for _, seconds in told)


@needs_compiler
def test_models_that_are_loaded_choose_between_the_usual_number_and_the_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = write_tiny(tmp_path)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    models = (
        load_target(paths.target, paths.feature_layers, "compiled", threads=2),
        load_drafter(paths.drafter, paths.target, "compiled", threads=2),
        load_target(paths.target, paths.feature_layers, "compiled", threads=1),
    )
    numbers = []
    for model in models:
        assert isinstance(model, CompiledK2 | CompiledDFlash)
        numbers.append((model.choice.usual, model.choice.most))
    assert numbers == [(1, 2), (1, 2), (1, 1)]
