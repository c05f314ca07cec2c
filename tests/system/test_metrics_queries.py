"""Every query of the dashboard and of the alerts, against a real Prometheus that scrapes real services."""

from __future__ import annotations

import asyncio
import json
import math
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from deploy.observability import dashboard
from hedgerow.cli.ports import free_ports
from hedgerow.cli.supervisor import Stack, StackConfig
from hedgerow.client import AsyncClient
from hedgerow.errors import InvalidRequest
from tests.stack import ROOT, Models
from tests.system.prometheus import Prometheus, prometheus
from tests.system.tools import tool

pytestmark = pytest.mark.system
RULES = ROOT / "deploy" / "observability" / "rules.yaml"
METRIC = re.compile(r"(?:hedgerow|process)_\w+(?:\{[^}]*\})?|up\{[^}]*\}")
WINDOW = "20s"
# No series until something of the kind has happened.
NEVER = ("hedgerow_tls_expiry_seconds",)


@dataclass(frozen=True)
class Watched:
    """A stack with a collector that is away, so that its spans are counted, and a Prometheus."""

    stack: Stack
    prometheus: Prometheus


@pytest.fixture(scope="module")
def watched(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    ports = list(free_ports(5))
    names = ("kvstore", "drafter", "verifier", "gateway")
    settings = {
        name: {"METRICS_ADDRESS": f"127.0.0.1:{port}", "OTLP_ENDPOINT": f"127.0.0.1:{ports[4]}"}
        for name, port in zip(names, ports, strict=False)
    }
    limits = tmp_path_factory.mktemp("limits") / "limits"
    limits.write_text("HEDGEROW_MAX_SESSIONS=64\n")
    settings["gateway"]["LIMITS_FILE"] = str(limits)
    config = StackConfig(
        ROOT, models.target, tmp_path_factory.mktemp("data"), drafter=models.drafter, settings=settings
    )
    folder = tmp_path_factory.mktemp("prometheus")
    with (
        Stack(config) as stack,
        prometheus(folder, RULES, [f"127.0.0.1:{port}" for port in ports[:4]]) as scraping,
    ):
        asyncio.run(used(stack))
        yield Watched(stack, scraping)


async def used(stack: Stack) -> None:
    """For some twenty seconds: calls that end, a call that comes back, one that is refused, a verifier that dies."""
    loop = asyncio.get_running_loop()
    end, killed, after = loop.time() + 20, False, 0  # a busy machine takes long to bring a verifier back
    async with AsyncClient(stack.address("gateway")) as client:
        while loop.time() < end or after < 3:
            after += killed
            streams = [client.generate([1, 2, n], max_tokens=100, ignore_eos=True) for n in range(4)]
            results = await asyncio.gather(*(stream.result() for stream in streams))
            await client.resume(results[0].session_id).result()
            with pytest.raises(InvalidRequest):
                await client.generate("x", max_tokens=1 << 23).result()
            if not killed and loop.time() > end - 12:
                stream = client.generate([1, 2, 3], max_tokens=1000, ignore_eos=True)
                async for _ in stream:
                    if not killed:
                        await asyncio.to_thread(stack.kill, "verifier")
                    killed = True


def test_every_query_of_the_dashboard_returns_numbers(watched: Watched) -> None:
    empty = []
    for panel in json.loads(dashboard.text())["panels"]:
        for target in panel.get("targets", ()):
            text = target["expr"].replace("$__rate_interval", WINDOW).replace("$namespace", ".*")
            found = watched.prometheus.query(text)
            if not any(math.isfinite(float(each["value"][1])) for each in found):
                empty.append(f"{panel['title']}, {target['legendFormat']}: {text} gave {found}")
    assert not empty, "\n".join(empty)


def test_every_alert_reads_series_that_there_are(watched: Watched) -> None:
    missing = []
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        for rule in group["rules"]:
            watched.prometheus.query(rule["expr"])  # it is a query at all
            for selector in METRIC.findall(rule["expr"]):
                if not selector.startswith(NEVER) and not watched.prometheus.query(selector):
                    missing.append(f"{rule['alert']}: {selector}")
    assert not missing, "\n".join(missing)


def test_what_happened_fires_and_nothing_else_does(watched: Watched) -> None:
    """A verifier was killed and the collector is away; both are alerts, of which the second waits ten minutes."""
    loud = {"HedgerowFailovers", "HedgerowTracesNotTaken"}
    found = watched.prometheus.firing()
    assert found & loud == loud, found
    # the machine of a test may be slow
    assert found <= loud | {"HedgerowCommitsSlow", "HedgerowRedisSlow", "HedgerowDraftsMissed", "HedgerowTokensSlow"}, (
        found
    )


CERTIFICATES = """
rule_files: [{rules}]
evaluation_interval: 1h
tests:
  - interval: 1h
    input_series:
      - series: hedgerow_tls_expiry_seconds{{instance="a"}}
        values: 777600x240
    alert_rule_test:
      - {{eval_time: 40h, alertname: HedgerowCertificateExpires, exp_alerts: []}}
      - eval_time: 60h
        alertname: HedgerowCertificateExpires
        exp_alerts:
          - exp_labels: {{severity: critical, instance: a}}
            exp_annotations:
              summary: the certificate of a expires in 6d 12h 0m 0s
              runbook_url: docs/runbooks.md#hedgerowcertificateexpires
"""


def test_a_certificate_that_ends_in_seven_days_is_an_alert(tmp_path: Path) -> None:
    """One of nine days: quiet while it has more than seven, told from then on."""
    case = tmp_path / "case.yaml"
    case.write_text(CERTIFICATES.format(rules=RULES))
    done = subprocess.run([tool("promtool"), "test", "rules", str(case)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


GONE = """
rule_files: [{rules}]
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
      - series: hedgerow_gateway_verifiers{{instance="g", namespace="serving"}}
        values: 1x9 stale
      - series: hedgerow_verifier_steps_total{{instance="v", namespace="serving"}}
        values: 0+9x40
      - series: hedgerow_kvstore_redis_exchanges_total{{instance="k", namespace="serving"}}
        values: 0+9x40
    alert_rule_test:
      - {{eval_time: 14m, alertname: HedgerowServiceGone, exp_alerts: []}}
      - eval_time: 20m
        alertname: HedgerowServiceGone
        exp_alerts:
          - exp_labels: {{severity: critical, service: gateway}}
            exp_annotations:
              summary: "no gateway shows its metrics: none is there, or none is found"
              runbook_url: docs/runbooks.md#hedgerowservicegone
      - {{eval_time: 20m, alertname: HedgerowTargetDown, exp_alerts: []}}
      - {{eval_time: 20m, alertname: HedgerowNoVerifier, exp_alerts: []}}
"""


def test_a_service_without_a_pod_is_an_alert(tmp_path: Path) -> None:
    """The gateways are gone after nine minutes, and with them what `up` and their own series could tell."""
    case = tmp_path / "case.yaml"
    case.write_text(GONE.format(rules=RULES))
    done = subprocess.run([tool("promtool"), "test", "rules", str(case)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_takes_the_rules() -> None:
    done = subprocess.run([tool("promtool"), "check", "rules", str(RULES)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "rules found" in done.stdout
