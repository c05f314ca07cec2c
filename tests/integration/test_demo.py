"""`make demo` without a terminal: text, the tables, one recommendation, and nothing left running."""

from __future__ import annotations

import json
import re
from pathlib import Path

import psutil
import pytest

from bench.demo import main
from tests.stack import Models


def test_the_demo_compares_every_budget_and_stops_what_it_started(
    models: Models, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    prompts = [
        {"id": "code", "prompt": "def read(path):\n", "max_tokens": 16, "temperature": 0},
        {"id": "chat", "messages": [{"role": "user", "content": "Write `f()`."}], "max_tokens": 8, "temperature": 0},
    ]
    (tmp_path / "prompts.json").write_text(json.dumps(prompts))
    folders = ["--model", str(models.target), "--drafter", str(models.drafter)]
    assert main([*folders, "--prompts", str(tmp_path / "prompts.json"), "--seconds", "0"]) == 0
    said = capfd.readouterr().out
    assert "\x1b" not in said
    assert said.index("def read(path):\n") < said.index("\n    ", said.index("def read(path):\n")), "the text was shown"
    for budget in ("no tree", "trees of 4", "trees of 8", "trees of 12", "trees of 16", "chosen, to 16"):
        assert re.search(rf"^{budget} .*yes$", said, re.M), budget
    assert re.search(r"^demo: recommended budget: (0, no tree|4|8|12|16), \d+ tok/s: a step with trees of ", said, re.M)
    assert said.count(" <- recommended") == 1
    assert "demo: same tokens as plain decoding, every budget and round: yes" in said
    left = {child.pid for child in psutil.Process().children(recursive=True)} - before
    assert not left
