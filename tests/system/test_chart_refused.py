"""Values that contradict each other, or that no cluster would take, are refused by name and before anything is sent."""

from __future__ import annotations

import pytest

from tests.system.tools import CHART, KUBERNETES, chosen, helm, template

pytestmark = pytest.mark.system
PREVIOUS = "verifier.set=b,previous[0].images.engine.tag=latest,previous[0].verifier.set="


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("gateway.autoscaling.minReplicas=11", "gateway.autoscaling.minReplicas: 11 is more than maxReplicas, 10"),
        ("gateway.pdb.maxUnavailable=2", "gateway.pdb.maxUnavailable: 2 of 2 pods would leave none"),
        ("kvstore.pdb.maxUnavailable=3", "kvstore.pdb.maxUnavailable: 3 of 2 pods would leave none"),
        ("fullnameOverride=Upper", "'/fullnameOverride': 'Upper' does not match"),
        ("fullnameOverride=ends-", "'/fullnameOverride': 'ends-' does not match"),
        ("fullnameOverride=has.dot", "'/fullnameOverride': 'has.dot' does not match"),
        (f"fullnameOverride={'a' * 41}", "'/fullnameOverride'"),
        ("images.slim.tag=LATEST", 'images.slim.tag: "LATEST"'),
        ("images.engine.tag=Latest", 'images.engine.tag: "Latest"'),
        ("images.engine.tag=a/b", "'/images/engine/tag'"),
        (PREVIOUS, 'images.engine.tag of an entry of previous: "latest"'),
        ("gateway.resources.limits=null", "'/gateway/resources': missing property 'limits'"),
        ("verifier.resources.limits.memory=null", "'/verifier/resources/limits': missing property 'memory'"),
        ("redis.resources.requests.cpu=null", "'/redis/resources/requests': missing property 'cpu'"),
        ("drafter.resources=null", "'/drafter': missing property 'resources'"),
        ("gateway.limits=null", "'/gateway': missing property 'limits'"),
        ("tls=null", "missing property 'tls'"),
        ("redis.maxmemory=2Gi", "'/redis/maxmemory': '2Gi' does not match"),
        ("tracing.endpoint=otel", "'/tracing/endpoint': 'otel' does not match"),
        ("tracing.endpoint=https://otel", "'/tracing/endpoint'"),
        ("network.listenHost=::", "'/network/listenHost': '::' does not match"),
        ("network.listenHost=", "'/network/listenHost'"),
        ("gateway.env.HEDGEROW_X=a", "gateway.env: HEDGEROW_X is a setting"),
        ("gateway.env.a-b=a", "'/gateway/env': additional properties 'a-b' not allowed"),
        ("redis.extraEnv[0].name=HEDGEROW_X", "redis.extraEnv: HEDGEROW_X"),
        ("weights.convert.extraEnv[0].name=HEDGEROW_X", "weights.convert.extraEnv: HEDGEROW_X"),
        ("verifier.set=b,previous[0].verifier.set=,previous[0].verifier.env.HEDGEROW_X=a", "verifier.env: HEDGEROW_X"),
    ],
)
def test_what_cannot_be_is_refused_by_name(given: str, why: str) -> None:
    done = template(*chosen("values-laptop", given))
    assert done.returncode != 0
    assert why in done.stderr, done.stderr


@pytest.mark.parametrize(
    "given",
    [
        "gateway.autoscaling.minReplicas=10",
        "gateway.pdb.maxUnavailable=2,gateway.replicas=3",
        "gateway.pdb.maxUnavailable=2,gateway.pdb.enabled=false",
        "gateway.autoscaling.enabled=true,gateway.autoscaling.minReplicas=1",
        "fullnameOverride=a-1",
        "images.slim.tag=latest-2",
        "redis.maxmemory=2048k",
        "redis.maxmemory=64MB",
        "network.listenHost=[::]",
        "tracing.endpoint=https://otel.example.org:4317/",
    ],
)
def test_what_is_just_within_is_taken(given: str) -> None:
    done = template(*chosen("values-laptop", given))
    assert done.returncode == 0, done.stderr


def test_a_release_whose_name_begins_with_a_digit_is_refused() -> None:
    """A Service's name must begin with a letter: half of the release would be made, and no more."""
    done = helm("template", "1st", str(CHART), f"--kube-version={KUBERNETES}")
    assert done.returncode != 0
    assert '"1st-hedgerow" is no name for a Service' in done.stderr


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("apiKeys.keys=acme sha256:0", "apiKeys.keys: given, and apiKeys.enabled is false"),
        ("apiKeys.existingSecret=keys", "apiKeys.existingSecret: given, and apiKeys.enabled is false"),
        ("apiKeys.enabled=true,apiKeys.existingSecret=keys,apiKeys.keys=acme k", "apiKeys.keys: they would not count"),
        ("tls.clientCerts=true", "tls.clientCerts: it is for nothing while tls.enabled is false"),
        ("tls.existingSecret=mine", "tls.existingSecret: it is for nothing"),
        ("tls.certManager.enabled=true", "tls.certManager.enabled: it is for nothing"),
        ("tls.enabled=true,tls.existingSecret=mine,tls.certManager.enabled=true", 'tls.existingSecret: "mine" and'),
        ("secrets.redisUrl=redis://u:p@mine:6379/0", "secrets.redisUrl: it names your own Redis"),
        ("weights.hostPath=/models", "weights.hostPath: weights.source is bundled"),
        ("weights.claimName=models", "weights.claimName: weights.source is bundled"),
        ("weights.convert.enabled=true,weights.hostPath=/m", "weights.convert.enabled: weights.source is bundled"),
        ("weights.convert.enabled=true", "weights.convert needs weights.source"),
    ],
)
def test_what_somebody_counts_on_does_something_or_is_refused(given: str, why: str) -> None:
    """Keys without enabled left the gateways open; a Redis of one's own beside the bundled one stayed empty."""
    done = template(*chosen("values-laptop", given))
    assert done.returncode != 0
    assert why in done.stderr, done.stderr
