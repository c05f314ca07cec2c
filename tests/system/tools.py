"""Programs that these tests need and that no wheel brings: looked up on PATH, and named where a test is skipped."""

from __future__ import annotations

import functools
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "k8s" / "hedgerow"
KUBERNETES = "1.34"  # what templates are rendered for
# Given, so that renders are the same every time; and planted, so that a test finds where they end up.
SECRETS = {
    "tenantSecret": "planted-tenant-secret",
    "redisPassword": "plantedRedisPassword",
    "operatorPassword": "plantedOperator",
    "groupSecret": "planted-group-secret",
}
API_KEY = "planted-api-key-0123456789"
VALUES = ("values", "values-laptop", "values-h200", "values-pro6000")


def tool(name: str) -> str:
    """Its path. Skips the test where there is none."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not on PATH")
    return found


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs helm, without a cluster."""
    return subprocess.run([tool("helm"), *arguments], capture_output=True, text=True, timeout=60)


@functools.cache
def template(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`helm template` of the chart."""
    return helm("template", "demo", str(CHART), "--namespace=serving", f"--kube-version={KUBERNETES}", *arguments)


def render(values: str = "values", *sets: str, secrets: bool = True) -> list[dict[str, Any]]:
    """Every object of the chart with these values; `sets` are KEY=VALUE. Without `secrets` they are new each time."""
    arguments = chosen(values, *sets, secrets=secrets)
    done = template(*arguments) if secrets else template.__wrapped__(*arguments)
    assert done.returncode == 0, done.stderr
    return [each for each in yaml.safe_load_all(done.stdout) if each]


def chosen(values: str, *sets: str, secrets: bool = True) -> list[str]:
    """helm's arguments for a file of values and single ones."""
    given = [*(f"secrets.{name}={value}" for name, value in SECRETS.items() if secrets), *sets]
    return ["-f", str(CHART / f"{values}.yaml"), *(word for each in given for word in ("--set", each))]


def named(objects: Sequence[dict[str, Any]], kind: str, suffix: str = "") -> dict[str, Any]:
    """The one object of this kind whose name ends so."""
    found = [each for each in objects if each["kind"] == kind and each["metadata"]["name"].endswith(suffix)]
    assert len(found) == 1, [each["metadata"]["name"] for each in objects if each["kind"] == kind]
    return found[0]


def pod_specs(objects: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The pod specification of every object that has one, by KIND/NAME."""
    specs = {}
    for each in objects:
        spec = each.get("spec", {})
        where = f"{each['kind']}/{each['metadata']['name']}"
        if each["kind"] == "LeaderWorkerSet":
            group = spec["leaderWorkerTemplate"]
            spec = {"template": group.get("leaderTemplate", group["workerTemplate"])}
            if "leaderTemplate" in group:
                specs[f"{where}, workers"] = group["workerTemplate"]["spec"]
        found = spec if each["kind"] == "Pod" else spec.get("template", {}).get("spec")
        if found:
            specs[where] = found
    return specs
