"""compose.yaml's profile `observe`, without a container: what it mounts is sound and leads where its services are."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from tests.system.tools import ROOT, tool

pytestmark = pytest.mark.system
DOCKER = ROOT / "deploy" / "docker"
PORTS = {"prometheus": 9090, "jaeger": 16686, "grafana": 3000}  # what these programs listen on


def services() -> dict[str, dict[str, Any]]:
    """Those of the file."""
    return dict(yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"])


def mounts(service: str) -> dict[str, Path]:
    """Files of this repository by where the container has them."""
    given = (each.split(":") for each in services()[service]["volumes"])
    return {words[1]: (DOCKER / words[0]).resolve() for words in given if words[0].startswith(".")}


def test_the_profile_has_the_three_and_publishes_to_this_machine_alone() -> None:
    watched = {name: each for name, each in services().items() if each.get("profiles") == ["observe"]}
    assert watched.keys() == PORTS.keys()
    for name, each in watched.items():
        (port,) = each["ports"]
        assert port.startswith("127.0.0.1:${HEDGEROW_")
        assert port.endswith(f":-{PORTS[name]}}}:{PORTS[name]}")


def test_prometheus_takes_its_configuration(tmp_path: Path) -> None:
    """By its own checker, laid out as in the container."""
    for where, path in mounts("prometheus").items():
        laid = tmp_path / where.lstrip("/")
        laid.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, laid)
    config = tmp_path / "etc" / "prometheus" / "prometheus.yml"
    done = subprocess.run([tool("promtool"), "check", "config", config], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rules found" in done.stdout


def test_prometheus_scrapes_every_service() -> None:
    (job,) = yaml.safe_load((DOCKER / "prometheus.yaml").read_text())["scrape_configs"]
    targets = {each for group in job["static_configs"] for each in group["targets"]}
    ours = {name for name, each in services().items() if each.get("command") == [f"services.{name}"]}
    assert targets == {f"{name}:7413" for name in ours}


def test_grafana_finds_its_sources_and_the_dashboard() -> None:
    sources = yaml.safe_load((DOCKER / "grafana.yaml").read_text())["datasources"]
    for each in sources:
        url = urlsplit(each["url"])
        assert (url.hostname, url.port) == (each["type"], PORTS[each["type"]]), each
    assert [each["type"] for each in sources if each.get("isDefault")] == ["prometheus"]
    (provider,) = yaml.safe_load((DOCKER / "dashboards.yaml").read_text())["providers"]
    held = [
        path for where, path in mounts("grafana").items() if Path(where).parent == Path(provider["options"]["path"])
    ]
    assert [json.loads(path.read_text())["title"] for path in held] == ["Hedgerow"]
    assert {str(Path(where).parent.name) for where in mounts("grafana")} >= {"datasources", "dashboards"}
