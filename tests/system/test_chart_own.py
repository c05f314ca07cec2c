"""What operators bring themselves: volumes and variables, a Redis with its authority, a public certificate, headers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deploy.configuration import SERVICES
from hedgerow.rpc.config import from_env
from tests.system.test_chart import variables
from tests.system.tools import chosen, pod_specs, render, template

pytestmark = pytest.mark.system
WORKLOADS = {
    "gateway": "Deployment/demo-hedgerow-gateway",
    "verifier": "StatefulSet/demo-hedgerow-verifier",
    "drafter": "Deployment/demo-hedgerow-drafter",
    "kvstore": "Deployment/demo-hedgerow-kvstore",
    "redis": "StatefulSet/demo-hedgerow-redis",
    "weights.convert": "Job/demo-hedgerow-convert",
}
YOURS = ("redis.bundled=false", "secrets.redisUrl=rediss://u:p@store:6379/0")
PUBLIC = ("tls.publicSecret=public", "test.address=chat.example.org:443")


def container(objects: list[dict[str, Any]], workload: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Its first one, and its pod."""
    spec = pod_specs(objects)[WORKLOADS[workload]]
    return spec["containers"][0], spec


def mounted(objects: list[dict[str, Any]], workload: str, path: str) -> dict[str, Any]:
    """The volume that a container has there."""
    made, spec = container(objects, workload)
    (mount,) = (each for each in made["volumeMounts"] if each["mountPath"] == path)
    (volume,) = (each for each in spec["volumes"] if each["name"] == mount["name"])
    return dict(volume)


def settings(objects: list[dict[str, Any]], service: str) -> Any:
    """As the service reads them: refused there, refused here."""
    made, spec = container(objects, service)
    return from_env(SERVICES[service], variables(made, spec, objects)[service])


@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_workload_takes_variables_and_volumes_of_ones_own(workload: str) -> None:
    objects = render(
        "values",
        *("weights.convert.enabled=true", "weights.source=pvc", "weights.claimName=weights"),
        f"{workload}.extraEnv[0].name=KEY,{workload}.extraEnv[0].valueFrom.secretKeyRef.name=own",
        f"{workload}.extraEnv[0].valueFrom.secretKeyRef.key=k",
        f"{workload}.extraVolumes[0].name=own,{workload}.extraVolumes[0].configMap.name=own",
        f"{workload}.extraVolumeMounts[0].name=own,{workload}.extraVolumeMounts[0].mountPath=/own",
    )
    given, _ = container(objects, workload)
    assert {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "own", "key": "k"}}} in given["env"]
    assert mounted(objects, workload, "/own")["configMap"] == {"name": "own"}
    having = {where for where, spec in pod_specs(objects).items() if "'own'" in str(spec)}
    assert having == {WORKLOADS[workload]}


@pytest.mark.parametrize(("kind", "name"), [("caSecret", "secretName"), ("caConfigMap", "name")])
def test_the_authority_of_ones_own_redis_comes_from_an_object(kind: str, name: str) -> None:
    objects = render("values", *YOURS, f"redis.tls.{kind}=authorities", "redis.tls.caKey=root.pem")
    config = settings(objects, "kvstore")
    volume = mounted(objects, "kvstore", str(config.redis_tls_ca.parent))
    (source,) = (each for key, each in volume.items() if key != "name")
    assert source[name] == "authorities"
    assert source["items"] == [{"key": "root.pem", "path": config.redis_tls_ca.name}]
    assert config.redis_tls_cert is None, "the services' certificate is not shown to it"


def test_the_kvstore_shows_ones_own_redis_a_certificate() -> None:
    objects = render("values", *YOURS, "redis.tls.certSecret=client")
    config = settings(objects, "kvstore")
    assert (config.redis_tls_cert.name, config.redis_tls_key.name) == ("tls.crt", "tls.key")
    assert mounted(objects, "kvstore", str(config.redis_tls_cert.parent))["secret"]["secretName"] == "client"


def test_a_collectors_headers_come_from_a_secret_alone() -> None:
    objects = render("values", "tracing.endpoint=collector:4317", "tracing.existingSecret=collector")
    for service in SERVICES:
        made, _ = container(objects, service)
        (given,) = (each for each in made["env"] if each["name"].startswith("OTEL_"))
        assert given["name"] == "OTEL_EXPORTER_OTLP_HEADERS"
        assert given["valueFrom"] == {"secretKeyRef": {"name": "collector", "key": "headers"}}


def test_gateways_show_clients_a_public_certificate_and_services_the_other() -> None:
    before, objects = render("values"), render("values", *PUBLIC)
    config, other = settings(objects, "gateway"), settings(before, "gateway")
    assert (config.tls_peer_cert, config.tls_peer_key) == (other.tls_cert, other.tls_key)
    assert config.tls_ca == other.tls_ca
    assert config.tls_cert != other.tls_cert
    assert mounted(objects, "gateway", str(config.tls_cert.parent))["secret"]["secretName"] == "public"
    for service in set(SERVICES) - {"gateway"}:
        assert settings(objects, service) == settings(before, service)
        assert container(objects, service) == container(before, service)


@pytest.mark.parametrize(
    ("sets", "ca"),
    [((), "/etc/ssl/certs/ca-certificates.crt"), (("tls.publicCa=true",), "/etc/hedgerow/public/ca.crt")],
)
def test_helm_test_believes_what_clients_do(sets: tuple[str, ...], ca: str) -> None:
    (spec,) = (spec for where, spec in pod_specs(render("values", *PUBLIC, *sets)).items() if where.startswith("Pod/"))
    (made,) = spec["containers"]
    assert f"--tls-ca={ca}" in made["args"]
    assert "--address=chat.example.org:443" in made["args"]
    folders = [each["mountPath"] for each in made["volumeMounts"]]
    assert str(Path(ca).parent) in folders or not sets


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("gateway.extraEnv[0].name=HEDGEROW_LISTEN", "gateway.extraEnv: HEDGEROW_LISTEN is a setting"),
        ("kvstore.extraEnv[0].value=x", "missing property 'name'"),
        ("verifier.env.OTEL_EXPORTER_OTLP_HEADERS=key=x", "tracing.existingSecret names a Secret"),
        ("gateway.extraEnv[0].name=OTEL_EXPORTER_OTLP_HEADERS,gateway.extraEnv[0].value=x", "tracing.existingSecret"),
        ("drafter.env.OTEL_EXPORTER_OTLP_ENDPOINT=x", "tracing.endpoint says where spans go"),
        ("redis.tls.caSecret=x", "redis.bundled is true"),
        (f"{','.join(YOURS)},redis.tls.caSecret=x,redis.tls.caConfigMap=y", "one is enough"),
        ("tls.publicSecret=x,tls.enabled=true", "test.address must be HOST:PORT"),
        ("tls.publicSecret=x,test.address=a:1", "tls.enabled is false"),
        ("tls.publicCa=true", "tls.publicSecret must name"),
    ],
)
def test_what_would_do_nothing_or_show_a_secret_is_refused(given: str, why: str) -> None:
    done = template(*chosen("values-laptop", given))
    assert done.returncode != 0
    assert why in done.stderr, done.stderr
