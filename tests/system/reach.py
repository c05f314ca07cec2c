"""Who may reach whom, by the NetworkPolicies of a render: what a cluster that enforces them would let through.

Rules as Kubernetes has them: a pod that no policy selects for a direction is open in it; else one rule of one policy
must match peer and port. A connection needs the sender's egress and the receiver's ingress.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

RELEASE_NAMESPACE = "serving"
NAMESPACE_LABEL = "kubernetes.io/metadata.name"


@dataclass(frozen=True)
class Pod:
    """One that there is, or might be."""

    name: str
    labels: Mapping[str, str]
    namespace: str = RELEASE_NAMESPACE


def pods_of(objects: Sequence[dict[str, Any]]) -> dict[str, Pod]:
    """One pod of each workload, by the component's name."""
    pods = {}
    for each in objects:
        spec = each.get("spec", {})
        if each["kind"] == "LeaderWorkerSet":
            template = spec["leaderWorkerTemplate"]["workerTemplate"]
        elif each["kind"] == "Pod":
            template = each
        else:
            template = spec.get("template")
        if template is not None:
            labels = template["metadata"]["labels"]
            component = labels["app.kubernetes.io/component"]
            pods[component] = Pod(component, labels)
    return pods


class Reach:
    """The policies of a render."""

    def __init__(self, objects: Sequence[dict[str, Any]]) -> None:
        self._policies = [each for each in objects if each["kind"] == "NetworkPolicy"]

    def may(self, source: Pod, to: Pod, port: int, protocol: str = "TCP") -> bool:
        """Whether a connection comes through."""
        return self._allowed("Egress", source, to, port, protocol) and self._allowed(
            "Ingress", to, source, port, protocol
        )

    def may_leave(self, source: Pod, port: int, protocol: str = "TCP") -> bool:
        """Whether a connection to anywhere outside the cluster leaves."""
        return self._allowed("Egress", source, None, port, protocol)

    def _allowed(self, direction: str, pod: Pod, peer: Pod | None, port: int, protocol: str) -> bool:
        key, side = direction.lower(), "from" if direction == "Ingress" else "to"
        mine = [
            policy
            for policy in self._policies
            if policy["metadata"]["namespace"] == pod.namespace
            and direction in policy["spec"]["policyTypes"]
            and selected(policy["spec"]["podSelector"], pod.labels)
        ]
        rules = [(policy, rule) for policy in mine for rule in policy["spec"].get(key, ())]
        return not mine or any(
            _port(rule.get("ports"), port, protocol) and _peer(rule.get(side), peer, policy["metadata"]["namespace"])
            for policy, rule in rules
        )


def _port(ports: Sequence[dict[str, Any]] | None, port: int, protocol: str) -> bool:
    return not ports or any(each["port"] == port and each["protocol"] == protocol for each in ports)


def _peer(peers: Sequence[dict[str, Any]] | None, peer: Pod | None, namespace: str) -> bool:
    if not peers:
        return True
    if peer is None:
        return any("ipBlock" in each for each in peers)
    for each in peers:
        assert each.keys() <= {"podSelector", "namespaceSelector", "ipBlock"}, each
        if "ipBlock" in each:
            continue
        where = {NAMESPACE_LABEL: peer.namespace}
        there = (
            selected(each["namespaceSelector"], where) if "namespaceSelector" in each else peer.namespace == namespace
        )
        if there and selected(each.get("podSelector", {}), peer.labels):
            return True
    return False


def selected(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a label selector takes these; the empty one takes all."""
    assert selector.keys() <= {"matchLabels", "matchExpressions"}, selector
    for each in selector.get("matchExpressions", ()):
        here = labels.get(each["key"])
        fits = {
            "In": here in each.get("values", ()), "NotIn": here not in each.get("values", ()),
            "Exists": here is not None, "DoesNotExist": here is None,
        }  # fmt: skip
        if not fits[each["operator"]]:
            return False
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())
