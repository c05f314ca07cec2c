"""What counts as a completion that is Python."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.scoring import MOST_DROPPED, Score, enclosing, parses, score

ROOT = Path(__file__).resolve().parents[2]
HEAD = 'def area(r):\n    """The area of a circle."""\n'
METHOD = '    @property\n    def area(self):\n        """The area of a circle."""\n'


def test_a_whole_body_counts_as_it_is() -> None:
    assert score(HEAD, "    return 3.14 * r * r\n") == Score(1, 0)


def test_what_follows_the_last_complete_line_is_cut() -> None:
    assert score(HEAD, "    x = r * r\n    return 3.14 * (x +") == Score(1, 0)


def test_an_open_bracket_costs_the_lines_that_it_began_on() -> None:
    assert score(HEAD, "    x = r\n    return dict(\n        a=x,\n        b=(\n") == Score(4, 3)


def test_at_most_six_lines_are_dropped() -> None:
    open_call = "    return dict(\n" + "        a=1,\n" * (MOST_DROPPED - 1)
    assert score(HEAD, "    x = r\n" + open_call) == Score(7, 6)
    assert score(HEAD, "    x = r\n" + open_call + "        b=2,\n") == Score(8, None)


def test_a_syntax_error_early_on_is_hopeless() -> None:
    assert score(HEAD, "    return = 3\n" + "    x = r\n" * 7) == Score(8, None)


def test_the_head_alone_is_no_completion() -> None:
    """The head with its docstring parses: dropping all that the model wrote would let any text of six lines pass."""
    assert score(HEAD, "    return ((\n") == Score(1, None)
    assert score(HEAD, "\n\n    return ((\n") == Score(3, None)
    assert score(HEAD, "    return 3") == Score(0, None)
    assert score(HEAD, "") == Score(0, None)


def test_a_method_may_be_followed_by_another_and_by_the_end_of_its_class() -> None:
    body = "        return 3.14\n\n    def next(self):\n        return 4\n\n\ndef outside():\n    return 5\n"
    assert score(METHOD, body) == Score(8, 0)


def test_a_wrong_indentation_is_an_error() -> None:
    assert score(METHOD, "        return 3.14\n   x = 4\n" + "        y = 5\n" * 6) == Score(8, None)


def test_code_two_blocks_deep_may_go_back_to_either() -> None:
    head = '        def inner():\n            """Deep."""\n'
    assert score(head, "            return 1\n    x = 2\n") == Score(2, 0)


def test_every_held_out_head_parses_without_its_file() -> None:
    """The prompts are excerpts, from the middle of a file on, and do not parse as they stand; their heads do."""
    records = [json.loads(line) for line in (ROOT / "models/heldout/heads.jsonl").read_text().splitlines()]
    assert not [r["id"] for r in records if not parses(enclosing(r["head"]) + r["head"])]
    assert not all(parses(r["prompt"]) for r in records)


@pytest.mark.parametrize("text", ["x = 1\n", "def f():\n    return '\\d'\n", "await x\n"])
def test_a_warning_is_no_error(text: str) -> None:
    assert parses(text)
