"""`hedgerow eval` through the SDK, against a scripted gateway."""

from __future__ import annotations

import json

import pytest

from hedgerow.cli.command import NOBODY_THERE, REFUSED
from hedgerow.cli.evaluation import sandbox
from hedgerow.cli.main import main
from hedgerow.errors import Overloaded
from tests.evaluation_answers import RIGHT
from tests.unit.client_gateway import chunk, finished, started
from tests.unit.test_client_sync import served

CODE = f"```python{RIGHT['clockwise']}```"
BODY = "    return sum(n * n for n in numbers)\nprint(sum_of_squares([1]))\n"


def script(text: str, *tokens: int) -> list[object]:
    return [started(), chunk(0, list(tokens), text), finished("STOP", len(tokens))]


def run(server: object, *arguments: str) -> int:
    return main(["eval", "--address", server.address, "--parallel", "1", *arguments])  # type: ignore[attr-defined]


def test_trees_and_plain_are_asked_alike(capsys: pytest.CaptureFixture[str]) -> None:
    with served(script(CODE, 1, 2), script(CODE, 1, 2)) as (server, _):  # type: ignore[arg-type]
        assert run(server, "--task", "clockwise", "--budget", "16", "--seed", "7", "--max-tokens", "99") == 0
        trees, plain = server.requests
    assert (trees.speculation.budget, plain.speculation.budget) == (16, 0)
    for asked in (trees, plain):
        assert "def clockwise(rows):" in asked.chat.messages[0].content
        assert (asked.sampling.seed, asked.sampling.max_tokens, asked.sampling.temperature) == (7, 99, 0)
    out = capsys.readouterr().out
    assert "pass@1 trees: 1 of 1 (1.000)" in out
    assert "same text with trees and plain: 1 of 1" in out
    assert "\nmodel: m\n" in out


def test_other_tokens_with_the_same_text_are_not_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    with served(script(CODE, 1, 2), script(CODE, 1, 3)) as (server, _):  # type: ignore[arg-type]
        assert run(server, "--task", "clockwise", "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert found["passed"] == {"trees": 1, "plain": 1}
    assert found["same_text"] == {"compared": 1, "same": 0}


def test_an_answer_steers_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Neither by what it raises, nor by the kind of failure that it claims."""
    raises = "raise ValueError('\\x1b]0;mine\\x07')"
    said = '{"failure": "\\\\u001b[2J"}\\n'
    claims = f"import os\nfor fd in range(3, 1024):\n try: os.write(fd, b'{said}')\n except OSError: pass"
    for code, shown in ((raises, "\ufffd]0;mine"), (claims, "failed (\ufffd[2J)")):
        text = f"```python\ndef clockwise(rows): pass\n{code}\n```"
        with served(script(text, 1), script(text, 1)) as (server, _):  # type: ignore[arg-type]
            assert run(server, "--task", "clockwise") == 0
        out = capsys.readouterr().out
        assert shown in out
        assert "\x1b" not in out


def test_a_base_model_continues_the_stub(capsys: pytest.CaptureFixture[str]) -> None:
    with served(script(BODY, 1), script(BODY, 1)) as (server, _):  # type: ignore[arg-type]
        assert run(server, "--task", "sum_of_squares", "--completion") == 0
        assert server.requests[0].text.startswith('def sum_of_squares(numbers):\n    """Return')
    assert "sum_of_squares     trees passed   plain passed   same text" in capsys.readouterr().out


def test_a_refused_question_is_that_tasks_failure(capsys: pytest.CaptureFixture[str]) -> None:
    with served([Overloaded("queue", 9, 9, 0.0)], script(CODE, 1)) as (server, _):  # type: ignore[arg-type]
        assert run(server, "--task", "clockwise", "--patience", "0") == 1
    out = capsys.readouterr().out
    assert "trees failed (no answer)   plain passed" in out


def test_a_gateway_that_is_not_there_is_asked_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "--address", "localhost:1", "--patience", "0"]) == NOBODY_THERE
    told = capsys.readouterr()
    assert "nothing answers at localhost:1" in told.err
    assert not told.out


def test_a_model_that_is_not_served_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with served() as (server, _):
        assert run(server, "--model", "other") == REFUSED
        assert not server.requests
    assert "no model 'other'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--task", "nothing"], "--task"),
        (["--seconds", "0"], "--seconds"),
        (["--seconds", "nan"], "--seconds"),
        (["--parallel", "65"], "--parallel"),
        (["--timeout", "-1"], "--timeout"),
        (["--body", "{}"], "--body"),
        (["--endpoint", "http://h/v1"], "--model"),
        (["--endpoint", "h", "--model", "m"], "--endpoint"),
        (["--endpoint", "http://h/v1", "--model", "m", "--body", "[1]"], "--body"),
        (["--endpoint", "http://h/v1", "--model", "m", "--plain-body", "{"], "--plain-body"),
        (["--endpoint", "http://h/v1", "--model", "m", "--budget", "3"], "--budget"),
    ],
)
def test_nonsense_is_refused_by_name(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"hedgerow: {named}: ")


def test_without_isolation_it_says_so_and_else_it_does_not_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "jail.py"  # type: ignore[operator]
    broken.write_text(sandbox.JAIL.read_text().replace("prctl(PR_SET_SECCOMP,", "prctl(99,"))
    monkeypatch.setattr(sandbox, "JAIL", broken)
    with served(script(CODE, 1), script(CODE, 1)) as (server, _):  # type: ignore[arg-type]
        assert run(server, "--task", "clockwise") == 2
        assert not server.requests
        assert "does not isolate a process: seccomp" in capsys.readouterr().err
        assert run(server, "--task", "clockwise", "--without-isolation") == 0
    told = capsys.readouterr()
    assert "WARNING" in told.err
    assert "isolation: NONE" in told.out
