"""Writes hedgerow.json, the Grafana dashboard; deploy/k8s/generate.py copies it and rules.yaml into the chart.

    python -m deploy.observability.dashboard

Four rows: what users see, what a step does, what the machine has left, how the store is. The panels are in panels.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from deploy.observability.panels import ROWS
from deploy.observability.queries import G, Panel

HERE = Path(__file__).resolve().parent
FILE = HERE / "hedgerow.json"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH, HEIGHT, ACROSS = 6, 7, 24


def dashboard() -> dict[str, Any]:
    """As Grafana imports it."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        panels.append(
            {
                "type": "row",
                "id": len(panels) + 1,
                "title": title,
                "collapsed": False,
                "panels": [],
                "gridPos": {"x": 0, "y": y, "w": ACROSS, "h": 1},
            }
        )
        y += 1
        for n, panel in enumerate(row):
            x, down = n * WIDTH % ACROSS, n * WIDTH // ACROSS * HEIGHT
            panels.append(drawn(panel, len(panels) + 1, {"x": x, "y": y + down, "w": WIDTH, "h": HEIGHT}))
        y += -(-len(row) * WIDTH // ACROSS) * HEIGHT
    return {
        "uid": "hedgerow",
        "title": "Hedgerow",
        "tags": ["hedgerow"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "30s",
        "templating": {"list": variables()},
        "panels": panels,
    }


def variables() -> list[dict[str, Any]]:
    """What can be chosen above the panels. Without Kubernetes there are no namespaces: all of them are none."""
    namespaces = f"label_values({G}_verifiers, namespace)"
    return [
        {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"},
        {
            "name": "namespace",
            "type": "query",
            "label": "Namespace",
            "datasource": SOURCE,
            "query": namespaces,
            "definition": namespaces,
            "refresh": 2,
            "includeAll": True,
            "allValue": ".*",
            "current": {"text": "All", "value": "$__all"},
        },
    ]


def drawn(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    """One panel."""
    stacking = {"mode": "normal" if panel.stacked else "none"}
    custom = {"stacking": stacking, "fillOpacity": 30 if panel.stacked else 5, "showPoints": "never"}
    targets = [
        {"refId": chr(ord("A") + n), "datasource": SOURCE, "expr": query.text, "legendFormat": query.legend}
        for n, query in enumerate(panel.queries)
    ]
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": SOURCE,
        "gridPos": place,
        "targets": targets,
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": custom}, "overrides": []},
    }


def text() -> str:
    """The file."""
    return json.dumps(dashboard(), indent=1) + "\n"


def main() -> None:
    """Writes it."""
    FILE.write_text(text())


if __name__ == "__main__":
    main()
