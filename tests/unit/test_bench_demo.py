"""How the demo shows text: accepted runs are marked, on a terminal by colours, elsewhere by brackets."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest

from bench import demo
from bench.budgets import Measured
from hedgerow.client import Chunk, Step

RUNS = ["def f():\n", "    return", " 1", "\n"]
ACCEPTED = [1, 5, 0, 2]
INK = re.compile(r"((?:\x1b\[[0-9;]*m)+)([^\x1b]*)\x1b\[0m")


def chunks() -> list[Chunk]:
    steps = [Step(i, 8, 8, accepted, accepted + 1, 1, 9) for i, accepted in enumerate(ACCEPTED)]
    return [Chunk(i, 0, (i,), text, b"", (step,)) for i, (text, step) in enumerate(zip(RUNS, steps, strict=True))]


@pytest.fixture
def prompt(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(demo, "open_stream", lambda client, prompt, budget: chunks())
    return {"id": "x", "prompt": "# read\n", "max_tokens": 4, "temperature": 0}


def test_on_a_terminal_every_run_has_its_own_colour_and_long_ones_are_bold(
    prompt: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    demo.show(None, prompt, 8, colour=True)  # type: ignore[arg-type]
    shown = capsys.readouterr().out
    asked, *runs = INK.findall(shown)
    assert asked[1] == "# read\n"
    assert [text for _, text in runs] == RUNS
    inks = [ink.replace(demo.BONUS, "") for ink, _ in runs]
    assert all(a != b for a, b in itertools.pairwise(inks)), "neighbours can be told apart"
    assert [demo.BONUS in ink for ink, _ in runs] == [accepted > 3 for accepted in ACCEPTED]


def test_elsewhere_runs_of_several_tokens_are_in_brackets(
    prompt: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    demo.show(None, prompt, 8, colour=False)  # type: ignore[arg-type]
    told = capsys.readouterr().out
    assert "\x1b" not in told
    marked = [f"[{text}]" if accepted else text for text, accepted in zip(RUNS, ACCEPTED, strict=True)]
    assert told == "\n# read\n" + "".join(marked) + "\n"


def test_both_kinds_of_trees_stand_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    def run(steps: int, last: int = 9) -> list[list[Measured]]:
        return [[Measured([*range(8), last], 8, steps, 1.0)]]

    marginal = {0: run(8), 8: run(4), 16: run(2)}
    assert demo.print_kinds({8: run(2), 16: run(1)}, marginal)
    head, small, large = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["tokens/step", "marginal", "conditional", "gain"]
    assert small.split() == ["trees", "of", "8", "2.00", "4.00", "+100.0%", "yes"]
    assert large.split() == ["trees", "of", "16", "4.00", "8.00", "+100.0%", "yes"]
    for one, other in ((1, 9), (9, 1)):
        assert not demo.print_kinds({8: run(2, last=one)}, {**marginal, 8: run(4, last=other)})
        assert capsys.readouterr().out.rstrip().endswith("NO")
