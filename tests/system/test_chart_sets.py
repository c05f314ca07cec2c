"""Sets of verifier groups: what an upgrade leaves stays as it was, beside the new. test_cluster_sets.py runs it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.system.tools import chosen, named, render, template

pytestmark = pytest.mark.system
OLD = ("images.engine.tag=0.0.9", "model.path=/app/models/older", "verifier.groups=2", "verifier.config.max_waiting=7")
LEFT = ",".join(f"previous[0].{each}" for each in ("verifier.set=", *OLD))  # helm loses an empty text that is the last
ADDRESS = "demo-hedgerow-verifier{0}-{1}.demo-hedgerow-verifier{2}.serving.svc.cluster.local:7411"


def of_kind(objects: list[dict[str, Any]], kind: str) -> dict[str, dict[str, Any]]:
    """By name."""
    return {each["metadata"]["name"]: each for each in objects if each["kind"] == kind}


@pytest.mark.parametrize("mode", ["deployment", "colocated"])
def test_what_an_upgrade_leaves_is_as_it_was(mode: str) -> None:
    before = render("values-laptop", f"drafter.mode={mode}", *OLD)
    after = render("values-laptop", f"drafter.mode={mode}", "verifier.set=b", LEFT)
    old, kept = (of_kind(each, "StatefulSet")["demo-hedgerow-verifier"]["spec"] for each in (before, after))
    assert kept == old | {"updateStrategy": {"type": "OnDelete"}}
    for kind in ("ConfigMap", "Deployment", "Service"):
        for service in ("verifier", "drafter"):
            one, other = (of_kind(each, kind).get(f"demo-hedgerow-{service}") for each in (before, after))
            assert one == other, (kind, service)
    new = of_kind(after, "StatefulSet")["demo-hedgerow-verifier-b"]["spec"]
    assert new["template"]["spec"]["containers"][0]["image"] == "hedgerow-cpu:0.1.0"
    assert new["serviceName"] == kept["serviceName"], "one certificate is for both"
    assert new["selector"] != kept["selector"]
    assert new["updateStrategy"] == {"type": "RollingUpdate"}


def test_new_sessions_get_the_new_set_and_running_ones_find_the_old() -> None:
    settings = named(render("values-laptop", "verifier.set=b", LEFT), "ConfigMap", "-gateway")["data"]
    known = [ADDRESS.format("-b", 0, ""), ADDRESS.format("", 0, ""), ADDRESS.format("", 1, "")]
    assert settings["HEDGEROW_VERIFIER"].split(",") == known


def test_each_set_has_its_own_drafter() -> None:
    objects = render("values-laptop", "verifier.set=a", LEFT + ",previous[0].drafter.mode=none")
    assert set(of_kind(objects, "Deployment")) & {"demo-hedgerow-drafter", "demo-hedgerow-drafter-a"} == {
        "demo-hedgerow-drafter-a"
    }
    maps = of_kind(objects, "ConfigMap")
    drafter = maps["demo-hedgerow-verifier-a"]["data"]["HEDGEROW_DRAFTER"]
    assert drafter == "demo-hedgerow-drafter-a.serving.svc.cluster.local:7411"
    assert "HEDGEROW_DRAFTER" not in maps["demo-hedgerow-verifier"]["data"]


def test_groups_of_leader_worker_sets_stay_too() -> None:
    objects = render("values", "verifier.kind=LeaderWorkerSet", "verifier.set=a", LEFT)
    old = of_kind(objects, "LeaderWorkerSet")["demo-hedgerow-groups"]["spec"]
    assert old["rolloutStrategy"]["rollingUpdateConfiguration"]["partition"] == old["replicas"] == 2
    settings = named(objects, "ConfigMap", "-gateway")["data"]
    known = [ADDRESS.format("-a", 0, "-a"), ADDRESS.format("", 0, ""), ADDRESS.format("", 1, "")]
    assert settings["HEDGEROW_VERIFIER"].split(",") == [each.replace("verifier", "groups") for each in known]


def test_a_drained_node_takes_one_group_of_all_sets_at_a_time() -> None:
    objects = render("values-laptop", "verifier.set=b", LEFT)
    budget = named(objects, "PodDisruptionBudget", "-verifier")["spec"]
    assert budget["minAvailable"] == 2
    pods = [each["spec"]["template"] for name, each in of_kind(objects, "StatefulSet").items() if "verifier" in name]
    assert len(pods) == 2
    assert all(budget["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items() for pod in pods)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (("previous[0].verifier.set=,previous[0].verifier.groups=1",), "is taken"),
        (("verifier.set=b", "previous[0].verifier.set=b"), "is taken"),
        (("verifier.set=c",), "set"),
        (("verifier.set=b", "previous[0].verifier.groups=1"), "set"),
        (("verifier.set=b", "previous[0].verifier.set=,previous[0].verifier.group=1"), "group"),
        (("verifier.set=b", "previous[0].verifier.set=,previous[0].gateway.replicas=1"), "gateway"),
    ],
)
def test_wrong_sets_are_refused(given: tuple[str, ...], why: str) -> None:
    done = template(*chosen("values-laptop", *given))
    assert done.returncode != 0
    assert why in done.stderr, done.stderr


def test_the_convert_job_goes_where_the_weights_are_read() -> None:
    """From a private registry it had no right to its image, and of a hostPath it filled another node's disk."""
    objects = render(
        "values",
        "weights.convert.enabled=true", "weights.source=hostPath", "weights.hostPath=/models",
        "images.pullSecrets[0]=registry", "verifier.nodeSelector.gpu=h200", "verifier.tolerations[0].key=gpu",
    )  # fmt: skip
    (job,) = (each for each in objects if each["kind"] == "Job")
    pod = job["spec"]["template"]["spec"]
    assert (pod["imagePullSecrets"], pod["nodeSelector"], pod["tolerations"]) == (
        [{"name": "registry"}], {"gpu": "h200"}, [{"key": "gpu"}],
    )  # fmt: skip
