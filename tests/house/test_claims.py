"""docs/claims.md: every row has a command that exists, a result and a date."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NUMBER = re.compile(r"\d(?:[\d,]*\d)?(?:\.\d+)?")


def rows() -> list[list[str]]:
    lines = (ROOT / "docs" / "claims.md").read_text().splitlines()
    table = [line for line in lines if line.startswith("|") and not re.match(r"\|[\s|:-]+\|$", line)]
    return [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in table
        if not line.startswith("| Claim")
    ]


def test_there_are_claims() -> None:
    assert len(rows()) >= 10


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0][:60])
def test_a_claim_has_a_command_that_exists(row: list[str]) -> None:
    assert len(row) == 5, f"claim, command, last result, machine, date: {row}"
    claim, command, result, machine, date = row
    assert all((claim, result, machine)), row
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", date), row
    for code in re.findall(r"`([^`]+)`", command):
        words = code.split()
        if words[0] == "make":
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.M), code
        paths = re.findall(r"[\w/.-]+\.(?:py|jsonl?|md|sh)", code)
        for path in paths:
            assert (ROOT / path).exists(), f"{code}: no {path}"
        if picked := re.search(r"-k (\w+)", code):
            names = [name for path in paths for name in re.findall(r"def (test_\w+)", (ROOT / path).read_text())]
            assert any(picked[1] in name for name in names), f"{code}: no test of that name, so nothing is proved"
        module = re.search(r"-m (bench[\w.]*|models[\w.]*)", code)
        if module:
            assert (ROOT / (module.group(1).replace(".", "/") + ".py")).exists(), code
    assert re.search(r"`[^`]+`", command), f"no command: {row}"


def test_every_figure_of_the_readme_is_in_a_row() -> None:
    """What is measured anew is changed in both places."""
    readme = (ROOT / "README.md").read_text()
    assert "docs/claims.md" in readme
    shown = readme.split("\n## Measured\n")[1].split("\n## ")[0]
    cells = [line.split("|")[2] for line in shown.splitlines() if line.startswith("|")]
    known = set(NUMBER.findall(" ".join(row[2] for row in rows())))
    strange = {number for cell in cells for number in NUMBER.findall(cell)} - known
    assert len(cells) > 5
    assert not strange, f"in the README and in no row's result: {sorted(strange)}"


def test_the_configuration_page_is_what_the_services_take() -> None:
    import runpy

    written = runpy.run_path(str(ROOT / "deploy" / "configuration.py"))["page"]()
    assert (ROOT / "docs" / "configuration.md").read_text() == written, "run python deploy/configuration.py"
