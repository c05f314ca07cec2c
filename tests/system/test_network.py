"""Who may reach whom: computed from the rendered NetworkPolicies, for every profile, against the one table there is."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.system.reach import Pod, Reach, pods_of, selected
from tests.system.tools import VALUES, pod_specs, render

pytestmark = pytest.mark.system
PORTS = (7411, 7412, 7413, 7415, 7421, 7422, 7423, 6379, 22)
# By port: who may call whom. Ports 7412 and 7415 are for the node's probes, which no policy holds.
CALLS = {
    7411: {("gateway", "verifier"), ("gateway", "kvstore"), ("verifier", "drafter"), ("test", "gateway")},
    6379: {("kvstore", "redis")},
}
STRANGER = Pod("stranger", {"app": "other"})
ELSEWHERE = Pod("elsewhere", {"app": "client"}, "apps")
SCRAPER = Pod("scraper", {"app": "prometheus"}, "monitoring")
OUTSIDERS = (STRANGER, ELSEWHERE, SCRAPER)


def reached(objects: list[dict[str, Any]]) -> set[tuple[str, str, int]]:
    """(caller, called, port), for every pod of the release, one of another release, and some that are none of it."""
    reach, pods = Reach(objects), pods_of(objects)
    neighbour = dataclasses.replace(
        pods["gateway"], name="neighbour", labels={**pods["gateway"].labels, "app.kubernetes.io/instance": "second"}
    )
    callers = [*pods.values(), neighbour, *OUTSIDERS]
    return {
        (caller.name, called.name, port)
        for caller in callers
        for called in pods.values()
        for port in PORTS
        if caller is not called and called.name != "test" and reach.may(caller, called, port)
    }


def expected(objects: list[dict[str, Any]], *, clients: set[str], scrapers: set[str]) -> set[tuple[str, str, int]]:
    """The table, as far as its pods are there. A pod of the release calls what it must, and nothing else."""
    pods = set(pods_of(objects))
    found = {(one, other, port) for port, pairs in CALLS.items() for one, other in pairs if {one, other} <= pods}
    found |= {(client, "gateway", 7411) for client in clients}
    ports = dict.fromkeys(pods - {"redis", "test"}, (7413,))
    if "drafter" not in pods and "drafter" in str(objects):
        ports["verifier"] = (7413, 7423)
    return found | {(one, name, port) for one in scrapers for name, open_ in ports.items() for port in open_}


EVERYBODY = {"stranger", "elsewhere", "scraper", "neighbour", "test"}


@pytest.mark.parametrize("values", VALUES)
def test_each_service_is_reached_by_those_that_call_it(values: str) -> None:
    objects = render(values)
    pods = pods_of(objects)
    assert {"gateway", "verifier", "kvstore", "redis", "test"} <= set(pods)
    # `neighbour` is another release's gateway: its own policies hold what it may send, and are not rendered here.
    assert reached(objects) == expected(objects, clients=EVERYBODY, scrapers=EVERYBODY)


def test_clients_and_scrapers_can_be_named() -> None:
    sets = (
        "networkPolicy.clients[0].namespaceSelector.matchLabels.kubernetes\\.io/metadata\\.name=apps",
        "networkPolicy.scrapers[0].namespaceSelector.matchLabels.kubernetes\\.io/metadata\\.name=monitoring",
    )
    objects = render("values", *sets)
    assert reached(objects) == expected(objects, clients={"elsewhere", "test"}, scrapers={"scraper"})


def test_nothing_leaves_but_names_and_what_was_opened() -> None:
    def leaves(*sets: str) -> dict[str, set[int]]:
        objects = render("values", *sets)
        reach, pods = Reach(objects), pods_of(objects)
        assert all(reach.may_leave(pod, 53, "UDP") for name, pod in pods.items() if name != "redis")
        ports = (1, 53, 443, 4317, 6379, 26379)
        services = {name: pod for name, pod in pods.items() if name != "test"}
        return {name: {port for port in ports if reach.may_leave(pod, port)} for name, pod in services.items()}

    names = {"gateway": {53}, "verifier": {53}, "kvstore": {53}, "drafter": {53}, "redis": set[int]()}
    assert leaves() == names
    traced = {name: ports | {4317} if name != "redis" else ports for name, ports in names.items()}
    for endpoint in ("jaeger:4317", "http://jaeger:4317/", "[fd00::1]:4317"):
        assert leaves(f"tracing.endpoint={endpoint}") == traced, endpoint
    outside = leaves("redis.bundled=false", "secrets.redisUrl=redis://u:p@elsewhere:6379/0")
    assert outside == {
        **{name: {53} for name in ("gateway", "verifier", "drafter")},
        "kvstore": {1, 53, 443, 4317, 6379, 26379},
    }


def test_a_drafter_that_only_an_old_set_has_is_held_too() -> None:
    new = ("drafter.mode=colocated", "verifier.set=b")
    objects = render("values", *new, "previous[0].drafter.mode=deployment,previous[0].verifier.set=")
    held = {
        each["metadata"]["labels"]["app.kubernetes.io/component"] for each in objects if each["kind"] == "NetworkPolicy"
    }
    assert held == {"gateway", "verifier", "kvstore", "drafter", "redis"}
    (verifier,) = (
        each for each in objects if each["metadata"]["name"].endswith("-verifier") and each["kind"] == "NetworkPolicy"
    )
    assert {port["port"] for rule in verifier["spec"]["ingress"] for port in rule["ports"]} == {7411, 7413, 7423}


def test_without_policies_everybody_reaches_everything() -> None:
    """That the table above can fail: without one it does."""
    objects = render("values", "networkPolicy.enabled=false")
    assert len(reached(objects)) > len(expected(objects, clients=EVERYBODY, scrapers=EVERYBODY))
    assert ("stranger", "redis", 6379) in reached(objects)


def test_each_policy_selects_its_pods_and_no_other() -> None:
    objects = render("values")
    pods = pods_of(objects)
    for policy in (each for each in objects if each["kind"] == "NetworkPolicy"):
        component = policy["metadata"]["labels"]["app.kubernetes.io/component"]
        found = [name for name, pod in pods.items() if selected(policy["spec"]["podSelector"], pod.labels)]
        assert found == [component]


@pytest.mark.parametrize("kind", ["PodDisruptionBudget", "HorizontalPodAutoscaler", "Service"])
def test_what_selects_or_scales_finds_what_it_means(kind: str) -> None:
    objects = render("values", "gateway.autoscaling.enabled=true", "verifier.groups=2", "kvstore.replicas=2")
    pods = pods_of(objects)
    workloads = {f"{each['kind']}/{each['metadata']['name']}" for each in objects if "template" in each.get("spec", {})}
    found = [each for each in objects if each["kind"] == kind]
    assert found
    for each in found:
        spec = each["spec"]
        if kind == "HorizontalPodAutoscaler":
            target = spec["scaleTargetRef"]
            assert f"{target['kind']}/{target['name']}" in workloads
            assert 1 <= spec["minReplicas"] < spec["maxReplicas"]
            assert spec["metrics"]
            continue
        selector = spec["selector"] if kind == "PodDisruptionBudget" else {"matchLabels": spec["selector"]}
        names = {name for name, pod in pods.items() if selected(selector, pod.labels)}
        component = each["metadata"]["labels"].get("app.kubernetes.io/component")
        if each["metadata"]["name"].endswith("-metrics"):  # by the name of the port, which others do not have
            (port,) = spec["ports"]
            having = {
                where.rpartition("-")[2]
                for where, pod in pod_specs(objects).items()
                if any(port["targetPort"] == had["name"] for had in pod["containers"][0].get("ports", ()))
            }
            assert having == {"gateway", "verifier", "kvstore", "drafter"}
        else:
            assert names == {component}, each["metadata"]["name"]
