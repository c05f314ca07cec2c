"""`make acceptance` fails where the bundled pair keeps less than it promises."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.acceptance import broken_promises

ROOT = Path(__file__).resolve().parents[2]


def result(chain: float = 3.4, tree: float = 4.1, parsed: int = 75) -> dict[str, Any]:
    python = {"completions": 100, "parse_as_cut": 50, "parse_dropping_at_most_6_lines": parsed}
    return {"prompts": 100, "tokens_per_step": {"T=0": {"chain 7": chain, "tree 16": tree}}, "python": python}


def test_what_falls_short_is_named() -> None:
    assert broken_promises(result()) == []
    assert broken_promises(result(chain=3.39)) == ["chain 7: 3.39 tokens a step, at least 3.4 are promised"]
    assert broken_promises(result(tree=4.0)) == ["tree 16: 4.00 tokens a step, at least 4.1 are promised"]
    assert broken_promises(result(parsed=74)) == ["74 of 100 completions parse, at least 75% are promised"]


def test_a_part_of_the_run_promises_nothing_about_the_rest() -> None:
    assert broken_promises({"prompts": 100, "tokens_per_step": {"T=0.8 top-p 0.95": {"chain 7": 2.4}}}) == []
    assert broken_promises(result(chain=1.0) | {"prompts": 99}) == []


def test_the_recorded_run_keeps_them() -> None:
    assert broken_promises(json.loads((ROOT / "bench" / "results" / "acceptance.json").read_text())) == []
