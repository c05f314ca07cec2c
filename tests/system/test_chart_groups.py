"""Verifier groups of several pods, and what changes when groups become of another kind."""

from __future__ import annotations

from typing import Any

import pytest

from hedgerow.rpc.config import from_env
from services.verifier.config import VerifierServiceConfig
from services.verifier.group import split_of
from tests.system.groups import made_of
from tests.system.reach import Pod, Reach
from tests.system.test_chart import SEVERAL, variables
from tests.system.tools import chosen, named, pod_specs, render, template

pytestmark = pytest.mark.system
LWS, STS = "verifier.kind=LeaderWorkerSet", "verifier.kind=StatefulSet"


def group(objects: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = named(objects, "LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]
    return found


def container(pod: dict[str, Any]) -> dict[str, Any]:
    (found,) = pod["spec"]["containers"]
    return dict(found)


@pytest.mark.parametrize("mode", ["deployment", "colocated"])
def test_leader_and_workers_are_hosts_of_one_group(mode: str) -> None:
    """By the services' own class and check: 4 ranks on 2 hosts; one joins the other by the controller's address."""
    objects = render("values", *SEVERAL, f"drafter.mode={mode}")
    specs = {where.partition(", ")[2]: spec for where, spec in pod_specs(objects).items() if "LeaderWorkerSet" in where}
    assert specs.keys() == {"", "workers"}
    for which, spec in specs.items():
        (made,) = spec["containers"]
        config = from_env(VerifierServiceConfig, variables(made, spec, objects)["verifier"])
        assert split_of(config) == (4, 2)
        assert config.group_host == (which == "workers")
        assert config.group_listen == "0.0.0.0:7414"
        assert config.group_leader == ("$(LWS_LEADER_ADDRESS).svc.cluster.local:7414" if which else None)
    assert group(objects)["size"] == 2


def test_a_worker_calls_its_leader_by_a_name_of_the_certificate() -> None:
    """What the controller and the kubelet make of it; the shorter name that the controller gives is in none."""
    objects = render(
        "values", *SEVERAL, "verifier.groups=3", "tls.certManager.enabled=true", "tls.certManager.issuer=ca"
    )
    (names,) = [each["spec"]["dnsNames"] for each in objects if each["kind"] == "Certificate"]
    (lws,) = [each for each in objects if each["kind"] == "LeaderWorkerSet"]
    called = set()
    for pod in made_of(lws):
        if pod["kind"] == "StatefulSet":
            (made,) = pod["spec"]["template"]["spec"]["containers"]
            env = {each["name"]: each.get("value", "") for each in made["env"]}
            if "HEDGEROW_GROUP_LEADER" in env:
                given = env["HEDGEROW_GROUP_LEADER"].replace("$(LWS_LEADER_ADDRESS)", env["LWS_LEADER_ADDRESS"])
                called.add(given.removesuffix(":7414"))
    assert len(called) == 3
    for name in called:
        assert f"*.{name.partition('.')[2]}" in names, name


def test_only_the_leader_has_the_drafter_and_its_port() -> None:
    made = group(render("values", *SEVERAL, "drafter.mode=colocated", "metrics.serviceMonitor.enabled=true"))
    leader, worker = container(made["leaderTemplate"]), container(made["workerTemplate"])
    assert leader["args"][0] == "deploy.docker.together"
    assert worker["args"] == ["services.verifier"]
    names = [{port["name"] for port in each["ports"]} for each in (leader, worker)]
    assert names == [{"grpc", "admin", "metrics", "drafter-metrics", "group"}, {"grpc", "admin", "metrics"}]


def test_a_worker_waits_for_its_leader_as_long_as_that_takes() -> None:
    """Its readiness is its part in the group; no probe kills one whose leader's pod is pending."""
    made = group(render("values", *SEVERAL))
    leader, worker = container(made["leaderTemplate"]), container(made["workerTemplate"])
    assert (leader["startupProbe"]["grpc"]["service"], worker["startupProbe"]["grpc"]["service"]) == ("", "live")
    assert worker["readinessProbe"] == leader["readinessProbe"]
    assert worker["livenessProbe"] == leader["livenessProbe"]
    assert made["restartPolicy"] == "None", "the processes join again by themselves"


def test_the_group_s_secret_is_in_a_secret_and_kept() -> None:
    objects = render("values", *SEVERAL)
    assert named(objects, "Secret", "-secrets")["stringData"]["group-secret"] == "planted-group-secret"
    assert "planted-group-secret" not in str([each for each in objects if each["kind"] != "Secret"])
    assert "group-secret" not in named(render("values"), "Secret", "-secrets")["stringData"]
    random = [named(render("values", *SEVERAL, secrets=False), "Secret", "-secrets") for _ in range(2)]
    assert len({each["stringData"]["group-secret"] for each in random}) == 2
    assert template(*chosen("values", *SEVERAL, "secrets.groupSecret=short")).returncode != 0


@pytest.mark.parametrize("sets", [SEVERAL, ()], ids=["several", "one"])
def test_ranks_reach_each_other_and_nobody_else_does(sets: tuple[str, ...]) -> None:
    """At any port where groups are of several pods: gloo and NCCL take what the system gives them."""
    objects = render("values", *sets)
    labels = named(objects, "NetworkPolicy", "-verifier")["spec"]["podSelector"]["matchLabels"]
    one, other = Pod("one", labels), Pod("other", labels)
    reach = Reach(objects)
    assert all(reach.may(one, other, port) == bool(sets) for port in (7414, 40_000))
    for component in ("gateway", "drafter", "kvstore", "redis"):
        caller = Pod(component, labels | {"app.kubernetes.io/component": component})
        assert not any(reach.may(caller, other, port) for port in (7414, 40_000)), component
    assert not reach.may(Pod("stranger", {}, "elsewhere"), other, 7414)


@pytest.mark.parametrize(
    ("sets", "least"),
    [
        ((), None),
        (SEVERAL, None),
        ((*SEVERAL, "verifier.groups=2"), 3),
        (("verifier.groups=3",), 2),
        (("verifier.set=b", "previous[0].verifier.set=,previous[0].verifier.groups=1"), 1),
    ],
    ids=["one", "one of several pods", "two of several", "three", "two sets"],
)
def test_a_drain_takes_one_group_at_a_time_and_never_waits_for_the_only_one(
    sets: tuple[str, ...], least: int | None
) -> None:
    """With one group a budget would let nothing go, ever: it goes, and its sessions wait for it."""
    budgets = [each for each in render("values", *sets) if each["kind"] == "PodDisruptionBudget"]
    found = [each["spec"] for each in budgets if each["metadata"]["name"].endswith("-verifier")]
    assert [each["minAvailable"] for each in found] == ([] if least is None else [least])
    assert all(each["unhealthyPodEvictionPolicy"] == "AlwaysAllow" for each in found), "the rest of a group that went"


def test_kinds_have_names_of_their_own() -> None:
    """The controller of LeaderWorkerSets makes a Service of each one's name, which Helm could neither take over nor
    leave: nothing of the chart has a name of the other kind."""
    both = [render("values", kind) for kind in (LWS, STS)]
    lws = named(both[0], "LeaderWorkerSet")["metadata"]["name"]
    names = {(each["kind"], each["metadata"]["name"]) for objects in both for each in objects}
    assert ("Service", lws) not in names
    assert ("StatefulSet", lws) not in names, "the controller makes one of its name, too"


@pytest.mark.parametrize(("new", "old"), [(LWS, "StatefulSet"), (STS, "LeaderWorkerSet")])
def test_sets_of_two_kinds_stand_beside_each_other(new: str, old: str) -> None:
    objects = render("values", new, "verifier.set=b", f"previous[0].verifier.set=,previous[0].verifier.kind={old}")
    known = named(objects, "ConfigMap", "-gateway")["data"]["HEDGEROW_VERIFIER"].split(",")
    made = [name.partition(".")[0] for name in known]
    workloads = {each["metadata"]["name"] for each in objects if each["kind"] in ("StatefulSet", "LeaderWorkerSet")}
    assert {name.removesuffix("-0") for name in made} <= workloads
    services = {each["metadata"]["name"] for each in objects if each["kind"] == "Service"}
    for name in known:
        service = name.split(".")[1]
        of_controller = "-groups" in service
        assert (service in services) != of_controller, (
            "the chart makes those of StatefulSets, the controller the others"
        )
    certified = [each for each in known if not covered(each.rpartition(":")[0], objects)]
    assert not certified


def covered(host: str, objects: list[dict[str, Any]]) -> bool:
    """By a wildcard that the chart's certificate has."""
    made = template(*chosen("values", "tls.certManager.enabled=true", "tls.certManager.issuer=ca"))
    return f"*.{host.partition('.')[2]}" in made.stdout and bool(objects)


def test_a_colocated_drafter_keeps_what_is_its_own() -> None:
    own = (
        "drafter.env.NAME=drafts", "drafter.podAnnotations.team=trees", "verifier.podAnnotations.team=targets",
        "drafter.podAnnotations.drafts=yes", "drafter.extraEnv[0].name=TOKEN",
        "drafter.extraEnv[0].valueFrom.secretKeyRef.name=mine", "drafter.extraEnv[0].valueFrom.secretKeyRef.key=token",
        "drafter.extraVolumes[0].name=more", "drafter.extraVolumes[0].emptyDir.medium=Memory",
        "drafter.extraVolumeMounts[0].name=more", "drafter.extraVolumeMounts[0].mountPath=/more",
    )  # fmt: skip
    pod = named(render("values", "drafter.mode=colocated", *own), "StatefulSet", "-verifier")["spec"]["template"]
    env = {each["name"]: each for each in container(pod)["env"]}
    assert env["DRAFTER__NAME"]["value"] == "drafts"
    assert env["DRAFTER__TOKEN"]["valueFrom"] == {"secretKeyRef": {"name": "mine", "key": "token"}}
    assert (pod["metadata"]["annotations"]["team"], pod["metadata"]["annotations"]["drafts"]) == ("targets", "yes")
    assert {"name": "more", "emptyDir": {"medium": "Memory"}} in pod["spec"]["volumes"]
    assert {"name": "more", "mountPath": "/more"} in container(pod)["volumeMounts"]


def test_a_drafter_in_the_verifier_s_process_is_no_other_process() -> None:
    objects = render("values", "drafter.mode=in-process", "model.drafterPath=/models/drafter")
    (made,) = pod_specs(objects)["StatefulSet/demo-hedgerow-verifier"]["containers"]
    assert made["args"] == ["services.verifier"]
    spec = pod_specs(objects)["StatefulSet/demo-hedgerow-verifier"]
    config = from_env(VerifierServiceConfig, variables(made, spec, objects)["verifier"])
    assert (config.drafter, str(config.drafter_path)) == ("in-process", "/models/drafter")
    assert not [each for each in objects if each["metadata"]["name"].endswith("-drafter")]


@pytest.mark.parametrize(
    ("sets", "why"),
    [
        (("verifier.groupSize=2",), "need verifier.kind LeaderWorkerSet and its controller"),
        ((LWS, "verifier.groupSize=2"), "verifier.config.tensor_parallel, 1, must be a multiple of 2"),
        ((*SEVERAL, "verifier.config.device=cuda"), "must be 1 where verifier.config.device is cuda"),
        ((LWS, "verifier.groupSize=2", "verifier.config.tensor_parallel=3"), "tensor_parallel, 3, must be a multiple"),
        (("verifier.set=b", "previous[0].verifier.set=,previous[0].verifier.groupSize=2"), "need verifier.kind"),
    ],
)
def test_what_cannot_be_is_refused(sets: tuple[str, ...], why: str) -> None:
    done = template(*chosen("values", *sets))
    assert done.returncode != 0
    assert why in done.stderr, done.stderr
