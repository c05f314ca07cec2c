"""The exactness run itself: a difference is found and told, and a stopped run goes on where it was."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bench.exactness import Comparison, main, split_by
from bench.sharing import taken
from bench.subjects import Subjects
from tests.fed_host import HostFed

ROOT = Path(__file__).resolve().parents[2]


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
    run = ["run", "--tiny", "--prompts", "1", "--tokens", "2", "--jobs", "1", "--results", str(tmp_path / "cells")]
    summary = ["summary", "--results", str(tmp_path / "cells")]
    assert main(run) == 0
    files = sorted(path.name for path in (tmp_path / "cells").glob("*.json"))
    assert len(files) == 8
    assert capsys.readouterr().out.count("0 differ") == 8
    (tmp_path / "cells" / files[3]).unlink()
    assert main(run) == 0
    assert capsys.readouterr().out.startswith(files[3].removesuffix(".json"))
    assert main(summary) == 0
    assert capsys.readouterr().out.startswith("104 sequences, 208 tokens, 0 differ")
    (total,) = json.loads((tmp_path / "cells.json").read_text())
    assert (total["sequences"], total["tokens"], total["differences"]) == (104, 208, [])
    path = tmp_path / "cells" / files[0]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"differences": [{"prompt": 7}]}))
    assert main(summary) == 1
    assert '{"prompt": 7}' in capsys.readouterr().err


def test_steps_that_feed_each_other_are_compared_where_there_are_such() -> None:
    comparison = Comparison(subjects := Subjects.tiny(prompts=2), tokens=12)
    comparison.feed = HostFed(subjects.model, subjects.draft_model)
    tally = comparison.run("t1", [0, 1], budget=7, batch=8, trees="drafter")
    assert (tally.tokens, tally.differences) == (24, [])
    assert 0 < tally.fed < tally.steps
    assert str(tally).endswith(f", {tally.fed} of {tally.steps} steps fed")
    assert comparison.run("t1", [0], budget=7, batch=1, trees="random").fed == 0


def test_splits_by_batch_are_those_of_a_block_alone() -> None:
    cuda_plan = pytest.importorskip("hedgerow.model.cuda_plan")
    with split_by(1):
        assert cuda_plan.width_of(5000) == 64
    with split_by(8):
        assert cuda_plan.width_of(5000) == 256
    assert cuda_plan.width_of(5000) == 128


def test_processes_share_the_cells_and_none_runs_twice(tmp_path: Path) -> None:
    options = ["run", "--tiny", "--prompts", "1", "--tokens", "2", "--jobs", "2", "--results", str(tmp_path / "cells")]
    done = subprocess.run([sys.executable, "-m", "bench.exactness", *options], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = [line.split(":")[0] for line in done.stdout.splitlines()]
    assert sorted(told) == sorted(path.stem for path in (tmp_path / "cells").glob("*.json"))
    assert len(told) == 8


def test_a_part_is_free_again_when_its_process_is_gone(tmp_path: Path) -> None:
    lock = tmp_path / "part.lock"
    with taken(lock) as first, taken(lock) as second:
        assert (first, second) == (True, False)
    with taken(lock) as again:
        assert again
