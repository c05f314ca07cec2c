"""What an operator reads, watches and waits for: notes, alerts under any name, renders that stay the same."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.system.tools import CHART, KUBERNETES, ROOT, chosen, helm, named, pod_specs, render, tool

pytestmark = pytest.mark.system
# Of everything that the chart would make at random, one's own.
OWN = (
    "secrets.existingSecret=mine",
    "tls.existingSecret=certificates",
    "apiKeys.enabled=true",
    "apiKeys.existingSecret=keys",
)
DOWN = """
rule_files: [{rules}]
tests:
  - interval: 1m
    input_series:
      - {{series: 'up{{job="{job}", namespace="serving", instance="a"}}', values: 0x10}}
      - {{series: 'process_start_time_seconds{{job="{job}", instance="b"}}', values: 1 2 3 4 5 6 7 8 9 10}}
      - {{series: 'process_open_fds{{job="{job}", instance="c"}}', values: 90x10}}
      - {{series: 'process_max_fds{{job="{job}", instance="c"}}', values: 100x10}}
      - {{series: 'hedgerow_gateway_verifiers{{job="{job}"}}', values: 1x10}}
      - {{series: 'hedgerow_verifier_steps_total{{job="{job}"}}', values: 0x10}}
      - {{series: 'hedgerow_kvstore_redis_exchanges_total{{job="{job}"}}', values: 0x10}}
    promql_expr_test:
      - expr: count by (alertname) (ALERTS{{alertstate="firing"}})
        eval_time: 9m
        exp_samples:
          - {{labels: '{{alertname="HedgerowTargetDown"}}', value: 1}}
          - {{labels: '{{alertname="HedgerowRestarts"}}', value: 1}}
          - {{labels: '{{alertname="HedgerowFilesShort"}}', value: 1}}
"""


def notes(folder: Path, *sets: str) -> str:
    """What helm prints after an installation: `helm template` leaves it out, so that it becomes an object here."""
    chart = folder / "chart"
    shutil.copytree(CHART, chart)
    text = (chart / "templates" / "NOTES.txt").read_text()
    (chart / "templates" / "_notes.tpl").write_text('{{- define "notes" -}}\n' + text + "{{- end }}\n")
    shown = 'kind: Notes\nmetadata: {name: notes}\ntext: {{ include "notes" . | toJson }}\n'
    (chart / "templates" / "notes.yaml").write_text(shown)
    words = ["--namespace=serving", f"--kube-version={KUBERNETES}", "--show-only=templates/notes.yaml"]
    done = helm("template", "demo", str(chart), *words, *(word for each in sets for word in ("--set", each)))
    assert done.returncode == 0, done.stderr
    return str(yaml.safe_load(done.stdout)["text"])


def test_notes_name_every_file_that_a_client_needs(tmp_path: Path) -> None:
    for number, (sets, wanted) in enumerate(
        [
            (("tls.enabled=false",), set[str]()),
            ((), {"ca"}),
            (("tls.clientCerts=true",), {"ca", "cert", "key"}),
            (("tls.publicSecret=public", "tls.publicCa=true", "test.address=a.b:1"), {"ca"}),
            (("tls.publicSecret=public", "test.address=a.b:1"), set[str]()),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        said = notes(folder, *sets)
        (command,) = (line for line in said.splitlines() if "hedgerow generate" in line)
        assert set(re.findall(r"--tls-(\w+)", command)) == wanted, said
        assert (" --tls " in f"{command} ") == (len(sets) == 2), command
        for file in re.findall(r"--tls-\w+ (\S+)", command):
            assert re.search(rf"[> ]{file}\b.*$", said.replace(command, ""), re.M), f"how to get {file}"


def test_notes_say_how_the_store_is_operated(tmp_path: Path) -> None:
    said = notes(tmp_path)
    (words,) = re.findall(r"exec -i (\S+) -c (\S+) -- hedgerow-store", said)
    spec = pod_specs(render("values"))["StatefulSet/demo-hedgerow-redis"]
    assert words[0] == "demo-hedgerow-redis-0"
    assert words[1] in {each["name"] for each in spec["containers"]}


def test_a_larger_volume_is_asked_for_by_names_that_the_chart_makes() -> None:
    """docs/operations.md, of a release `hedgerow`: the claim, the set, the value."""
    page = (ROOT / "docs" / "operations.md").read_text()
    (block,) = (each for each in re.findall(r"```\n(.*?)```", page, re.S) if "patch pvc" in each)
    sizes = re.findall(r'"storage":"(\w+)"|redis\.storage\.size=(\w+)', block)
    (size,) = {first or second for first, second in sizes}
    store = named(render("values", "fullnameOverride=hedgerow", f"redis.storage.size={size}"), "StatefulSet", "-redis")
    (claim,) = store["spec"]["volumeClaimTemplates"]
    assert claim["spec"]["resources"]["requests"]["storage"] == size
    name = store["metadata"]["name"]
    assert set(re.findall(r" pvc (\S+)", block)) == {f"{claim['metadata']['name']}-{name}-0"}
    assert re.findall(r"delete statefulset (\S+) --cascade=orphan", block) == [name]


def test_alerts_find_their_series_whatever_the_objects_are_called(tmp_path: Path) -> None:
    """The operator takes the job from the Service's label that jobLabel names, else from the Service's name."""
    sets = ("fullnameOverride=inference", "metrics.serviceMonitor.enabled=true", "metrics.prometheusRule.enabled=true")
    objects = render("values", *sets)
    service = named(objects, "Service", "-metrics")["metadata"]
    monitor = named(objects, "ServiceMonitor")["spec"]
    assert "hedgerow" not in service["name"]
    assert monitor["selector"]["matchLabels"].items() <= service["labels"].items()
    rules, case = tmp_path / "rules.yaml", tmp_path / "case.yaml"
    rules.write_text(json.dumps({"groups": named(objects, "PrometheusRule")["spec"]["groups"]}))
    job = service["labels"].get(monitor.get("jobLabel", ""), service["name"])
    for each, passes in ((job, True), (service["name"], False)):
        case.write_text(DOWN.format(rules=rules, job=each))
        command = [tool("promtool"), "test", "rules", str(case)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert (done.returncode == 0) == passes, f"job {each}: {done.stdout}{done.stderr}"


def test_with_secrets_of_ones_own_a_render_is_always_the_same() -> None:
    """Argo CD and Flux render without a cluster to look at: what is random there would be new each time."""
    first, second = (render("values", *OWN, secrets=False) for _ in range(2))
    assert first == second
    assert not [each for each in first if each["kind"] == "Secret"]


@pytest.mark.parametrize("left", OWN[:2])
def test_a_secret_that_the_chart_makes_is_new_in_each_render(left: str) -> None:
    """That the test above can fail."""
    first, second = (render("values", *(each for each in OWN if each != left), secrets=False) for _ in range(2))
    assert first != second


@pytest.mark.parametrize(("seconds", "deadline"), [(60, 600), (600, 900), (3000, 3300)])
def test_a_rollout_of_gateways_has_not_failed_while_weights_load(seconds: int, deadline: int) -> None:
    """They are ready when a verifier is. What is past its deadline is degraded to whoever watches the rollout."""
    objects = render("values", f"verifier.startupSeconds={seconds}")
    spec: dict[str, Any] = named(objects, "Deployment", "-gateway")["spec"]
    assert spec["progressDeadlineSeconds"] == deadline
    start = pod_specs(objects)["StatefulSet/demo-hedgerow-verifier"]["containers"][0]["startupProbe"]
    assert start["periodSeconds"] * start["failureThreshold"] < deadline


def test_an_old_sets_weights_count_too() -> None:
    old = "previous[0].verifier.set=,previous[0].verifier.startupSeconds=5000"
    objects = render("values", "verifier.set=b", old)
    assert named(objects, "Deployment", "-gateway")["spec"]["progressDeadlineSeconds"] == 5300


def test_the_stores_operator_is_known_to_its_pod_alone() -> None:
    objects = render("values", secrets=False)
    secret = named(objects, "Secret", "-secrets")["stringData"]
    assert len(secret["operator-password"]) >= 32
    users = dict(line.split()[1:3] for line in secret["users.acl"].splitlines())
    assert users == {"default": "off", "hedgerow": "on", "operator": "on"}
    assert secret["operator-password"] not in secret["users.acl"], "the server knows a hash"
    for where, spec in pod_specs(objects).items():
        assert ("operator-password" in str(spec)) == where.endswith("-redis"), where


@pytest.mark.parametrize(
    ("secret", "restarted"),
    [("redisPassword", {"kvstore"}), ("operatorPassword", set[str]()), ("tenantSecret", {"gateway"})],
)
def test_another_secret_restarts_those_that_are_given_it(secret: str, restarted: set[str]) -> None:
    """And never the store: its passwords are loaded."""

    def metadata(value: str) -> dict[str, Any]:
        others = dict.fromkeys(("redisPassword", "operatorPassword", "tenantSecret"), "fixed")
        sets = (f"secrets.{name}={each}" for name, each in (others | {secret: value}).items())
        objects = render("values", *sets, secrets=False)
        return {
            each["metadata"]["name"].rpartition("-")[2]: each["spec"]["template"]["metadata"]
            for each in objects
            if each["kind"] in ("Deployment", "StatefulSet")
        }

    one, other = metadata("one"), metadata("two")
    assert {name for name in one if one[name] != other[name]} == restarted


def test_a_password_s_checksum_is_salted() -> None:
    """Pods' text is read by more people than Secrets are: who guesses a password there guesses for one release."""
    weak = chosen("values", "redis.bundled=false", "secrets.redisUrl=redis://u:hunter2@store:6379/0")
    seen = []
    for place in ("serving", "elsewhere"):
        done = helm("template", "demo", str(CHART), f"--namespace={place}", f"--kube-version={KUBERNETES}", *weak)
        seen.append(set(re.findall(r"checksum/secrets: (\w+)", done.stdout)))
    assert [len(each) for each in seen] == [2, 2], "the gateway's and the kvstore's"
    assert not seen[0] & seen[1]


def test_a_drafter_s_metrics_are_scraped_where_only_an_old_set_has_it_colocated() -> None:
    old = "verifier.set=b,previous[0].verifier.set=,previous[0].drafter.mode=colocated"
    for sets, wanted in (((old,), True), (("verifier.set=b",), False)):
        objects = render("values", "metrics.serviceMonitor.enabled=true", *sets)
        ports = {each["port"] for each in named(objects, "Service", "-metrics")["spec"]["ports"]}
        scraped = {each["port"] for each in named(objects, "ServiceMonitor")["spec"]["endpoints"]}
        assert (7423 in ports, "drafter-metrics" in scraped) == (wanted, wanted)


def test_a_secret_of_ones_own_may_lack_the_operator() -> None:
    """One of before there was any: the store starts, and nobody operates it."""
    spec = pod_specs(render("values", "secrets.existingSecret=mine"))["StatefulSet/demo-hedgerow-redis"]
    (volume,) = (each["secret"] for each in spec["volumes"] if each["name"] == "acl")
    assert volume["optional"] is True
