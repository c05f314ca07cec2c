"""The exactness run itself: a difference is found and told, and a stopped run goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bench.exactness import Comparison, main
from bench.subjects import Subjects


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_a_difference_is_told_with_its_place_tokens_and_logit_gap() -> None:
    comparison = Comparison(Subjects.tiny(prompts=2), tokens=6)
    expected = comparison.reference("greedy", 1)
    token, wrong = expected[4], (expected[4] + 1) % 512
    expected[4] = wrong  # as if plain decoding had drawn another token
    tally = comparison.run("greedy", [0, 1], budget=7, batch=8, trees="drafter")
    assert (tally.sequences, tally.tokens) == (2, 12)
    (difference,) = tally.differences
    length = len(comparison.subjects.prompts[1])
    gap = difference.pop("logit_gap")
    assert isinstance(gap, float)
    assert gap < 0, "greedy decoding took the token with the larger logit"
    assert difference == {
        "setting": "greedy", "prompt": 1, "budget": 7, "batch": 8, "trees": "drafter",
        "offset": 4, "position": length + 4, "plain": wrong, "tree": token,
    }  # fmt: skip


def test_a_stopped_run_goes_on_and_a_difference_fails_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ["run", "--tiny", "--prompts", "1", "--tokens", "2", "--results", str(tmp_path)]
    summary = ["summary", "--results", str(tmp_path)]
    assert main(run) == 0
    files = sorted(path.name for path in tmp_path.iterdir())
    assert len(files) == 8
    assert capsys.readouterr().out.count("0 differ") == 8
    (tmp_path / files[3]).unlink()
    assert main(run) == 0
    assert capsys.readouterr().out.startswith(files[3].removesuffix(".json"))
    assert main(summary) == 0
    assert capsys.readouterr().out.startswith("104 sequences, 208 tokens, 0 differ")
    path = tmp_path / files[0]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"differences": [{"prompt": 7}]}))
    assert main(summary) == 1
    assert '{"prompt": 7}' in capsys.readouterr().err
