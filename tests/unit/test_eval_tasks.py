"""The tasks of `hedgerow eval`: right answers pass, nearly right ones do not, and code is found in a model's text."""

from __future__ import annotations

import pytest

from hedgerow.cli.evaluation.answers import code_of_chat, code_of_completion, opening, question
from hedgerow.cli.evaluation.sandbox import judge, same
from hedgerow.cli.evaluation.task import Task
from hedgerow.cli.evaluation.tasks import TASKS
from tests.evaluation_answers import RIGHT, wrong

BY_NAME = {task.name: task for task in TASKS}
each = pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)


def test_there_are_enough_and_each_has_an_answer() -> None:
    assert len(TASKS) >= 12
    assert list(BY_NAME) == list(RIGHT)


@each
def test_a_right_answer_passes(task: Task) -> None:
    verdict = judge(RIGHT[task.name], task.calls, task.driver)
    assert verdict.passed, verdict


@each
def test_a_nearly_right_answer_does_not(task: Task) -> None:
    verdict = judge(wrong(task.name), task.calls, task.driver)
    assert verdict.failure == "wrong answer", verdict


@each
def test_a_stub_alone_does_not_pass(task: Task) -> None:
    assert not judge(task.stub, task.calls, task.driver).passed


@each
def test_what_a_model_sees_holds_no_test(task: Task) -> None:
    compile(task.stub, "stub", "exec")
    for shown in (question(task), opening(task)):
        assert task.stub in shown
        assert not [call for call, _ in task.calls if call in shown and call != 'run_lengths("aabc")']


def test_code_is_the_last_block_that_defines_it() -> None:
    task = BY_NAME["to_roman"]
    old, new, use = "python\ndef to_roman(n): old\n", "py\ndef to_roman(n): new\n", "\nto_roman(3)\n"
    text = f"Plan:\n```{old}```\nBetter:\n```{new}```\nUse:\n```{use}```"
    assert code_of_chat(task, text) == "def to_roman(n): new\n"
    assert code_of_chat(task, "```python\nx = 1\n```\n```\ny = 2") == "y = 2"
    assert code_of_chat(task, "def to_roman(n):\n    return n") == "def to_roman(n):\n    return n"
    assert code_of_chat(task, "I cannot.") == ""


def test_code_in_reasoning_does_not_count() -> None:
    task = BY_NAME["to_roman"]
    draft = "```python\ndef to_roman(n): draft\n```"
    assert code_of_chat(task, f"<think>{draft}</think>") == ""
    assert code_of_chat(task, f"{draft}</think>```python\ndef to_roman(n): done\n```") == "def to_roman(n): done\n"


def test_a_continuation_ends_where_its_indentation_does() -> None:
    task = BY_NAME["sum_of_squares"]
    code = code_of_completion(task, "    total = 0\n\n    return total\ndef other():\n    pass\n")
    assert code == opening(task) + "    total = 0\n\n    return total\n"


@pytest.mark.parametrize(
    ("value", "expected", "equal"),
    [
        (1, True, False), (1.0, 1, False), (1, 1.0, True), (0.1 + 0.2, 0.3, True), ([1, [2]], (1, (2,)), True),
        ({"1": 2}, {1: 2}, True), (None, False, False), ("a", ["a"], False), ([1], [1, 2], False), (True, 1.0, False),
    ],
)  # fmt: skip
def test_values_are_compared_strictly(value: object, expected: object, equal: bool) -> None:
    assert same(value, expected) is equal
