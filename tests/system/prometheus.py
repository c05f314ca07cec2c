"""A real Prometheus that scrapes what it is told."""

from __future__ import annotations

import json
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hedgerow.cli.ports import free_ports
from tests.polling import eventually
from tests.system.tools import tool

CONFIG = """
global: {{scrape_interval: 1s, evaluation_interval: 2s}}
rule_files: ["{rules}"]
scrape_configs:
  - job_name: hedgerow
    static_configs: [{{targets: {targets}}}]
"""


class Prometheus:
    """Its query API."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def ask(self, path: str, **query: object) -> Any:
        """The data of one answer. Raises AssertionError with what it says of a query that is wrong."""
        url = f"{self._url}{path}?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as refused:
            raise AssertionError(f"{query}: {refused.read().decode()}") from refused

    def query(self, text: str) -> list[dict[str, Any]]:
        """The series of an instant query."""
        found: list[dict[str, Any]] = self.ask("/api/v1/query", query=text)["result"]
        return found

    def firing(self) -> set[str]:
        """Names of alerts that fire, or are about to."""
        return {each["labels"]["alertname"] for each in self.ask("/api/v1/alerts")["alerts"]}


@contextmanager
def prometheus(folder: Path, rules: Path, targets: Sequence[str]) -> Iterator[Prometheus]:
    """Runs it on a free port. Skips the test where there is none."""
    program = tool("prometheus")
    port = next(free_ports(1))
    config = folder / "prometheus.yml"
    config.write_text(CONFIG.format(rules=rules, targets=json.dumps(list(targets))))
    arguments = [f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
    arguments += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    with (folder / "prometheus.log").open("w") as said:
        process = subprocess.Popen([program, *arguments], stdout=said, stderr=subprocess.STDOUT)
    made = Prometheus(port)

    def scraped() -> bool:
        try:
            return len(made.query("up == 1")) == len(targets)
        except (OSError, AssertionError):  # it is starting
            return False

    try:
        eventually(scraped, 30, f"every target: {(folder / 'prometheus.log').read_text()[-500:]}")
        yield made
    finally:
        process.kill()
        process.wait()
