"""The chart without a cluster: it renders for every profile, refuses what it does not know, keeps the rules."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.configuration import SERVICES
from hedgerow.rpc.config import from_env, overlaid
from services.gateway.config import GatewayConfig
from services.gateway.keys import Tenant, read_keys
from tests.system.golden import difference, golden
from tests.system.tools import (
    API_KEY,
    CHART,
    ROOT,
    SECRETS,
    VALUES,
    chosen,
    helm,
    named,
    pod_specs,
    render,
    template,
)

pytestmark = pytest.mark.system
EXTERNAL = ("redis.bundled=false", "secrets.redisUrl=redis+sentinel://u:p@s1:26379\\,s2:26379/mymaster")
VERIFIERS = "VERIFIER__"  # of the variables that `deploy.docker.together` gives to the verifier alone
SEVERAL = ("verifier.kind=LeaderWorkerSet", "verifier.groupSize=2", "verifier.config.tensor_parallel=4")
MATRIX: list[tuple[str, ...]] = [
    (),
    ("verifier.groups=3", "drafter.replicas=2", "tracing.endpoint=jaeger:4317"),
    ("verifier.kind=LeaderWorkerSet", "verifier.groups=2", "verifier.gpus=1,verifier.config.device=cuda"),
    ("drafter.mode=colocated", "metrics.serviceMonitor.enabled=true", "metrics.dashboards=true"),
    ("drafter.mode=none",),
    ("drafter.mode=in-process",),
    EXTERNAL,
    ("secrets.existingSecret=mine",),
    ("gateway.autoscaling.enabled=true", "gateway.replicas=1"),
    ("networkPolicy.enabled=false", "serviceAccount.create=false", "redis.storage.enabled=false"),
    ("networkPolicy.egress=false", "tls.enabled=true", "tls.existingSecret=certificates"),
    ("tls.certManager.enabled=true", "tls.certManager.issuer=ca", "tls.enabled=true", "tls.clientCerts=true"),
    ("weights.source=pvc", "weights.claimName=weights", "weights.convert.enabled=true", "weights.convert.args={k2.6}"),
    ("images.registry=registry.example.org/team", f"images.slim.digest=sha256:{'0' * 64}", "images.pullSecrets={pull}"),
    ("gateway.config.message_limit=67108864", "gateway.env.OTEL_SERVICE_NAME=gateway", "labels.team=serving"),
    ("apiKeys.enabled=true", f"apiKeys.keys=acme {API_KEY} concurrent=2", "gateway.limits.max_sessions=67108"),
    ("apiKeys.enabled=true", "apiKeys.existingSecret=keys", "gateway.limits.log_level=debug"),
    ("verifier.set=b", "previous[0].verifier.set=,previous[0].images.engine.tag=0.0.9", "verifier.groups=2"),
    ("verifier.set=a", "verifier.kind=LeaderWorkerSet", "previous[0].verifier.set=b", "previous[0].verifier.groups=3"),
    ("redis.bundled=false", "secrets.redisUrl=rediss://u:p@s:1/0", "redis.tls.caConfigMap=a", "redis.tls.certSecret=b"),
    ("tls.enabled=true", "tls.publicSecret=p", "tls.publicCa=true", "test.address=a.b:1", "tracing.existingSecret=t"),
    ("kvstore.extraVolumes[0].name=x,kvstore.extraVolumes[0].emptyDir.medium=Memory", "verifier.extraEnv[0].name=A"),
    (*SEVERAL, "verifier.groups=2"),
    (*SEVERAL, "drafter.mode=colocated", "verifier.set=b", "previous[0].verifier.set="),
    ("gateway.service.type=LoadBalancer", "gateway.priorityClassName=high", "verifier.spread=none"),
]
CASES = [(values, ()) for values in VALUES] + [("values-laptop", sets) for sets in MATRIX[1:]]
each_case = pytest.mark.parametrize(
    ("values", "sets"), CASES, ids=lambda case: case if isinstance(case, str) else ",".join(case)
)


@pytest.mark.parametrize("values", VALUES)
def test_lint_has_nothing_to_say(values: str) -> None:
    done = helm("lint", "--strict", str(CHART), "-f", str(CHART / f"{values}.yaml"))
    assert done.returncode == 0, done.stdout + done.stderr


@each_case
def test_every_service_accepts_the_variables_that_it_is_given(values: str, sets: tuple[str, ...]) -> None:
    """By the classes that the services read them with: a wrong name or value would stop the pod at its start."""
    objects = render(values, *sets)
    seen = set()
    for where, spec in pod_specs(objects).items():
        for container in spec["containers"]:
            for service, env in variables(container, spec, objects).items():
                from_env(SERVICES[service], env)
                seen.add(service)
                assert env["HEDGEROW_LISTEN"] != env["HEDGEROW_ADMIN_LISTEN"], where
    without = {"drafter.mode=none", "drafter.mode=in-process"} & set(sets)
    assert seen == set(SERVICES) - ({"drafter"} if without else set())


def variables(
    container: dict[str, Any], spec: dict[str, Any], objects: list[dict[str, Any]]
) -> dict[str, dict[str, str]]:
    """A container's HEDGEROW_* variables, by the service that reads them."""
    maps = {each["metadata"]["name"]: each["data"] for each in objects if each["kind"] == "ConfigMap"}
    if container.get("args", [""])[0] == "deploy.docker.together":
        volumes = {each["name"]: each for each in spec["volumes"]}
        mounted = {each["mountPath"]: volumes[each["name"]] for each in container["volumeMounts"]}
        base = {each["name"]: each["value"] for each in container.get("env", []) if "value" in each}
        own = {name.removeprefix(VERIFIERS): base[name] for name in base if name.startswith(VERIFIERS)}
        given = {"verifier": own, "drafter": {}}
        return {name: given[name] | settings(mounted[f"/etc/hedgerow/settings/{name}"], maps) for name in given}
    if not container.get("args", [""])[0].startswith("services."):
        return {}
    env: dict[str, str] = {}
    for source in container.get("envFrom", []):
        env |= maps[source["configMapRef"]["name"]]
    for each in container.get("env", []):
        label = "fieldRef" in each.get("valueFrom", {})
        env[each["name"]] = each.get("value", "1" if label else "redis://from-a-secret")
    return {container["args"][0].removeprefix("services."): env}


def settings(volume: dict[str, Any], maps: dict[str, dict[str, str]]) -> dict[str, str]:
    """The files of a mounted folder that are variables."""
    env: dict[str, str] = {}
    for source in volume.get("projected", {}).get("sources", [volume]):
        if "configMap" in source:
            env |= maps[source["configMap"]["name"]]
        for item in source.get("secret", {}).get("items", ()):
            env[item["path"]] = "from-a-secret-of-length"
    return env


@each_case
def test_pods_keep_the_rules(values: str, sets: tuple[str, ...]) -> None:
    for where, spec in pod_specs(render(values, *sets)).items():
        pod = spec["securityContext"]
        assert pod["runAsNonRoot"] is True, where
        assert pod["runAsUser"] >= 10000, where
        assert pod["seccompProfile"] == {"type": "RuntimeDefault"}, where
        assert spec["automountServiceAccountToken"] is False, where
        assert not any(spec.get(shared) for shared in ("hostNetwork", "hostPID", "hostIPC")), where
        for container in spec["containers"]:
            own = container["securityContext"]
            assert own["readOnlyRootFilesystem"] is True, where
            assert own["allowPrivilegeEscalation"] is False, where
            assert own["capabilities"] == {"drop": ["ALL"]}, where
            assert {"cpu", "memory"} <= container["resources"]["requests"].keys(), where
            assert "memory" in container["resources"]["limits"], where
            tag = container["image"].partition("@")[0].rpartition(":")[2]
            assert re.match(r"^[0-9]", tag), container["image"]
            if not where.startswith(("Job/", "Pod/")):
                assert {"livenessProbe", "readinessProbe"} <= container.keys(), where


@each_case
def test_probes_let_load_and_drain(values: str, sets: tuple[str, ...]) -> None:
    """Charts of others killed pods that loaded (kserve#5062) and calls in flight (vllm#24885)."""
    for where, spec in pod_specs(render(values, *sets)).items():
        for container in spec["containers"]:
            if not container.get("args", [""])[0].startswith(("services.", "deploy.")):
                continue
            live, start = container["livenessProbe"], container["startupProbe"]
            on_gpu = container["name"] == "verifier" and "nvidia.com/gpu" in container["resources"]["limits"]
            port = 7415 if on_gpu else 7412  # of the process without a device, where there is one
            assert live["grpc"] == {"port": port, "service": "live"}, "what loads or waits must not be killed"
            assert {container[f"{each}Probe"]["grpc"]["port"] for each in ("startup", "readiness")} == {port}, where
            assert live["failureThreshold"] * live["periodSeconds"] >= 60, where
            if "verifier" in where:
                assert start["failureThreshold"] * start["periodSeconds"] >= 180, where
            stop = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
            assert spec["terminationGracePeriodSeconds"] >= stop + 5, where


def test_the_grace_of_a_pod_covers_its_drain() -> None:
    objects = render("values", "gateway.grace=70", "gateway.preStopSeconds=20")
    assert pod_specs(objects)["Deployment/demo-hedgerow-gateway"]["terminationGracePeriodSeconds"] > 90
    assert named(objects, "ConfigMap", "-gateway")["data"]["HEDGEROW_GRACE"] == "70"


@each_case
def test_secrets_are_in_secrets_alone(values: str, sets: tuple[str, ...]) -> None:
    objects = render(values, *sets)
    for each in objects:
        if each["kind"] != "Secret":
            text = yaml.safe_dump(each)
            planted = (*SECRETS.values(), API_KEY)
            assert not [secret for secret in planted if secret in text], each["metadata"]["name"]
    if not any("existingSecret=mine" in each for each in sets):
        assert SECRETS["tenantSecret"] == named(objects, "Secret", "-secrets")["stringData"]["tenant-secret"]


def test_keys_and_limits_are_files_that_the_gateway_reads_and_that_change_without_a_restart(tmp_path: Path) -> None:
    sets = ("apiKeys.enabled=true", f"apiKeys.keys=acme {API_KEY} concurrent=2", "gateway.limits.max_sessions=67108")
    objects = render("values", *sets)
    limits = tmp_path / "limits"
    limits.write_text(named(objects, "ConfigMap", "-gateway-limits")["data"]["gateway"])
    config = GatewayConfig(verifier="v", kvstore="k", model_path=Path("m"))
    assert overlaid(config, limits).max_sessions == 67108
    keys = tmp_path / "keys"
    secret = named(objects, "Secret", "-api-keys")["stringData"]
    keys.write_text(secret["api-keys"])
    found = read_keys(keys)
    assert found.tenant(API_KEY) == Tenant("acme", concurrent=2)
    assert found.tenant(secret["test-key"]) == Tenant("helm-test", concurrent=4)
    pod = pod_specs(objects)["Deployment/demo-hedgerow-gateway"]
    data = named(objects, "ConfigMap", "-gateway")["data"]
    mounted = {each["mountPath"]: each for each in pod["containers"][0]["volumeMounts"]}
    for variable in ("HEDGEROW_LIMITS_FILE", "HEDGEROW_API_KEYS_FILE"):
        assert "subPath" not in mounted[str(Path(data[variable]).parent)], "such a file never changes"
    (tested,) = (spec for where, spec in pod_specs(objects).items() if where.startswith("Pod/"))
    (given,) = tested["containers"][0]["env"]
    assert given["valueFrom"]["secretKeyRef"] == {"name": "demo-hedgerow-api-keys", "key": "test-key"}
    other = render("values", sets[0], "apiKeys.keys=lab another-key-0123456789", "gateway.limits.max_sessions=1")
    annotations = [named(each, "Deployment", "-gateway")["spec"]["template"]["metadata"] for each in (objects, other)]
    assert annotations[0] == annotations[1], "pods are not restarted for it"


@pytest.mark.parametrize(("kind", "name"), [("StatefulSet", "verifier"), ("LeaderWorkerSet", "groups")])
def test_gateways_know_every_group_by_its_name(kind: str, name: str) -> None:
    settings = named(render("values", f"verifier.kind={kind}", "verifier.groups=2"), "ConfigMap", "-gateway")["data"]
    assert settings["HEDGEROW_VERIFIER"].split(",") == [
        f"demo-hedgerow-{name}-{group}.demo-hedgerow-{name}.serving.svc.cluster.local:7411" for group in (0, 1)
    ]


def test_alerts_link_to_where_the_runbooks_are_read() -> None:
    url = "https://docs.example.org/runbooks"
    for sets, begin in (((), "docs/runbooks.md#"), ((f"metrics.prometheusRule.runbooks={url}",), f"{url}#")):
        rule = named(render("values", "metrics.prometheusRule.enabled=true", *sets), "PrometheusRule")
        rules = [each for group in rule["spec"]["groups"] for each in group["rules"]]
        assert len(rules) > 20
        assert all(each["annotations"]["runbook_url"] == begin + each["alert"].lower() for each in rules)


def test_large_numbers_stay_whole() -> None:
    """Helm's numbers are floats: 67108864 would be written 6.7108864e+07."""
    data = named(render("values", "gateway.config.message_limit=67108864"), "ConfigMap", "-gateway")["data"]
    assert data["HEDGEROW_MESSAGE_LIMIT"] == "67108864"


def test_a_drained_node_takes_one_group_at_a_time() -> None:
    budget = named(render("values", "verifier.groups=4"), "PodDisruptionBudget", "-verifier")
    assert budget["spec"]["minAvailable"] == 3
    one = render("values", "verifier.groups=1", "gateway.replicas=1", "kvstore.replicas=1")
    assert not [each for each in one if each["kind"] == "PodDisruptionBudget"]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("gateway.replica=2", "replica"),
        ("nonsense=1", "nonsense"),
        ("gateway.config.max_session=5", "max_session"),
        ("gateway.config.max_sessions=0", "max_sessions"),
        ("gateway.config.listen=0.0.0.0:1", "listen"),
        ("gateway.config.tenant_secret=x", "tenant_secret"),
        ("kvstore.config.redis_url=x", "redis_url"),
        ("gateway.config.api_keys_file=x", "api_keys_file"),
        ("gateway.limits.lease_seconds=5", "lease_seconds"),
        ("gateway.limits.max_sessions=0", "max_sessions"),
        ("apiKeys.enabled=true", "apiKeys.keys"),
        ("apiKeys.key=x", "key"),
        ("gateway.env.HEDGEROW_LISTEN=x", "HEDGEROW_LISTEN"),
        ("images.slim.tag=latest", "tag"),
        ("images.slim.digest=sha256:abc", "digest"),
        ("verifier.kind=Deployment", "kind"),
        ("verifier.groupSize=2", "verifier.groupSize: 2 pods of a group need verifier.kind LeaderWorkerSet"),
        ("verifier.groupSize=17", "groupSize"),
        ("verifier.config.group_host=1", "group_host"),
        ("verifier.config.engine=cuda", "engine"),
        ("redis.bundled=false", "secrets.redisUrl"),
        ("weights.source=pvc", "weights.claimName"),
        ("redis.appendfsync=no", "appendfsync"),
    ],
)
def test_wrong_values_are_refused_by_name(given: str, why: str) -> None:
    done = template(*chosen("values-laptop", given))
    assert done.returncode != 0
    assert why in done.stderr, done.stderr


def test_secrets_of_an_installation_are_random_and_long() -> None:
    first, second = (named(render("values", secrets=False), "Secret", "-secrets")["stringData"] for _ in range(2))
    assert first["tenant-secret"] != second["tenant-secret"]
    assert min(len(first["tenant-secret"]), len(first["redis-password"])) >= 32
    assert first["redis-password"] not in first["users.acl"], "the server knows a hash"


@pytest.mark.parametrize("values", VALUES)
def test_the_render_is_the_reviewed_one(values: str) -> None:
    """Run `make golden` after a change, and read the difference."""
    path, now = golden(values)
    changed = difference(path.read_text(), now, path.name, "rendered")
    assert not changed, changed[:6000]


def test_schema_and_readme_are_fresh() -> None:
    done = subprocess.run(
        [sys.executable, "deploy/k8s/generate.py", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
