"""The guides' commands, where the order or a word of them decides whether they work at a first try."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("docs/deploy.md", "deploy/k8s/hedgerow/README.md")


@pytest.mark.parametrize("page", PAGES)
def test_a_release_is_waited_for_before_it_is_tested(page: str) -> None:
    """`helm test` calls the gateways at once: without `--wait` they may not be up yet."""
    text = (ROOT / page).read_text().replace("\\\n", " ")
    tested = [block for block in re.findall(r"```\n(.*?)```", text, re.S) if "\nhelm test" in block]
    assert tested, f"{page} has no `helm test`"
    for block in tested:
        installed = re.findall(r"^helm install .*$", block.partition("\nhelm test")[0], re.M)
        assert installed, block
        assert all("--wait" in line.partition("#")[0].split() for line in installed), block


def test_every_service_of_the_compose_file_logs_json() -> None:
    """As the chart and the units do; one variable of the caller's changes all of them."""
    services = yaml.safe_load((ROOT / "deploy/docker/compose.yaml").read_text())["services"]
    ours = {name: each for name, each in services.items() if each.get("command", [""])[0].startswith("services.")}
    assert sorted(ours) == ["drafter", "gateway", "kvstore", "verifier"]
    for name, each in ours.items():
        assert each["environment"]["HEDGEROW_LOG_FORMAT"] == "${HEDGEROW_LOG_FORMAT:-json}", name
