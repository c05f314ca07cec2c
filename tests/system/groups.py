"""What the controller of LeaderWorkerSets makes of one, where it is not there: its StatefulSets and its Service.

As its documentation has them: the leaders are a StatefulSet of the set's name; the workers of each are one of the
leader's name, numbered from 1; all are behind a headless Service of the set's name. Every container gets the leader's
address, the group's size and its own number, before its own variables.
"""

from __future__ import annotations

import copy
from typing import Any

API = "leaderworkerset.sigs.k8s.io"


def made_of(lws: dict[str, Any]) -> list[dict[str, Any]]:
    """The objects of every group of a LeaderWorkerSet."""
    name, space, spec = lws["metadata"]["name"], lws["metadata"]["namespace"], lws["spec"]
    group = spec["leaderWorkerTemplate"]
    labels = {f"{API}/name": name}
    service = {
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": name, "namespace": space},
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": labels},
    }  # fmt: skip
    leader = group.get("leaderTemplate", group["workerTemplate"])
    objects = [service]
    for number in range(spec["replicas"]):
        first = f"{name}-{number}"
        known = {"LWS_LEADER_ADDRESS": f"{first}.{name}.{space}", "LWS_GROUP_SIZE": str(group["size"])}
        objects.append(_set(lws, name if spec["replicas"] == 1 else first, leader, known, 0, 1))
        if group["size"] > 1:
            objects.append(_set(lws, first, group["workerTemplate"], known, 1, group["size"] - 1))
    return objects


def _set(
    lws: dict[str, Any], name: str, template: dict[str, Any], known: dict[str, str], start: int, replicas: int
) -> dict[str, Any]:
    """A StatefulSet of leaders or of one leader's workers. One worker: its number is the first."""
    pod, space = copy.deepcopy(template), lws["metadata"]["namespace"]
    chosen = {f"{API}/name": lws["metadata"]["name"], f"{API}/worker-index": str(start)}
    pod["metadata"]["labels"] |= chosen
    for container in pod["spec"]["containers"]:
        values = known | {"LWS_WORKER_INDEX": str(start)}
        container["env"] = [{"name": key, "value": value} for key, value in values.items()] + container.get("env", [])
    return {
        "apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": name, "namespace": space},
        "spec": {
            "serviceName": lws["metadata"]["name"], "replicas": replicas, "ordinals": {"start": start},
            "podManagementPolicy": "Parallel", "selector": {"matchLabels": chosen}, "template": pod,
        },
    }  # fmt: skip
