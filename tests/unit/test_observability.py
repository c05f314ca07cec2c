"""Dashboard, alerts and runbooks name what the services really expose, and each other. No program is needed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.observability import dashboard
from services.gateway.metrics import METHODS, OUTCOMES
from services.kvstore.metrics import STATUSES

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "deploy" / "observability" / "rules.yaml"
CHART = ROOT / "deploy" / "k8s" / "hedgerow"
RUNBOOKS = (ROOT / "docs" / "runbooks.md").read_text()
PAGE = (ROOT / "docs" / "metrics.md").read_text()
VALUES = {
    "outcome": {*OUTCOMES, "sent", "failed", "answered", "late", "unasked"},
    "method": set(METHODS),
    "status": set(STATUSES),
}
METRIC = re.compile(r"(hedgerow_\w+|process_\w+|\bup\b)(?:\{([^}]*)\})?")


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def queries() -> list[str]:
    made = json.loads(dashboard.text())
    return [target["expr"] for panel in made["panels"] for target in panel.get("targets", ())]


def documented() -> dict[str, set[str]]:
    """Labels by metric, of docs/metrics.md."""
    found = {}
    for line in PAGE.splitlines():
        if line.startswith("| `hedgerow_"):
            cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
            labels = set(cells[1].split(", ")) if len(cells) > 2 and cells[1] else set()
            found |= dict.fromkeys(re.findall(r"`(hedgerow_\w+)`", cells[0]), labels)
    return found


@pytest.mark.parametrize("text", [*queries(), *(rule["expr"] for rule in alerts())])
def test_a_query_names_metrics_and_labels_that_there_are(text: str) -> None:
    known = documented()
    found = METRIC.findall(text)
    assert found, text
    for name, selector in found:
        if not name.startswith("hedgerow_"):
            continue
        family = re.sub(r"_(bucket|sum|count)$", "", name)
        assert family in known, f"{family} is not in docs/metrics.md"
        for label, values in re.findall(r'(\w+)=~?"([^"]*)"', selector):
            assert label in known[family] | {"namespace"}, f"{name} has no label {label}"
            if label in VALUES:
                unknown = set(values.split("|")) - VALUES[label]
                assert not unknown, f"{name} is never {label}={unknown}"


def test_the_dashboard_has_its_four_rows_and_no_panel_without_a_word() -> None:
    made = dashboard.dashboard()
    assert [panel["title"] for panel in made["panels"] if panel["type"] == "row"] == [
        "Users",
        "Steps",
        "Machine",
        "Store",
    ]
    drawn = [panel for panel in made["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in made["panels"]}) == len(made["panels"])
    for panel in drawn:
        assert panel["description"], panel["title"]
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in drawn]
    assert len(set(places)) == len(places)


def test_the_files_are_what_the_sources_make() -> None:
    for path in (dashboard.FILE, CHART / "files" / "hedgerow.json"):
        assert path.read_text() == dashboard.text(), f"run python -m deploy.observability.dashboard: {path.name}"
    assert (CHART / "files" / "rules.yaml").read_text() == RULES.read_text()


def test_every_alert_has_its_runbook_and_no_runbook_is_of_nothing() -> None:
    names = [rule["alert"] for rule in alerts()]
    assert len(set(names)) == len(names)
    headings = re.findall(r"^### (\w+)$", RUNBOOKS, re.M)
    assert sorted(headings) == sorted(names)
    for rule in alerts():
        assert rule["annotations"]["runbook_url"] == f"docs/runbooks.md#{rule['alert'].lower()}"
        assert rule["labels"]["severity"] in ("warning", "critical")
    for section in re.split(r"^### ", RUNBOOKS, flags=re.M)[1:]:
        assert re.findall(r"\*\*(Means|Look|Do)\.\*\*", section) == ["Means", "Look", "Do"], section[:40]


def test_runbooks_name_panels_and_variables_that_there_are() -> None:
    titles = {panel["title"] for panel in dashboard.dashboard()["panels"]}
    named = {" ".join(found.split()) for found in re.findall(r"(?<!\*)\*([^*]+)\*(?!\*)", RUNBOOKS)}
    assert named <= titles, named - titles
    settings = (ROOT / "docs" / "configuration.md").read_text()
    for variable in set(re.findall(r"`(HEDGEROW_\w+)", RUNBOOKS)):
        assert f"`{variable}`" in settings, variable
