"""TLS in the chart: certificates for the names that are dialled, on every hop to the store."""

from __future__ import annotations

import base64
import subprocess
from urllib.parse import urlsplit

import pytest

from deploy.configuration import SERVICES
from tests.system.test_chart import EXTERNAL
from tests.system.tools import named, pod_specs, render, tool

pytestmark = pytest.mark.system


def test_a_certificate_is_for_the_names_that_are_dialled() -> None:
    objects = render("values", "verifier.groups=2")
    data = named(objects, "Secret", "-tls")["data"]
    text = subprocess.run(
        [tool("openssl"), "x509", "-noout", "-ext", "subjectAltName"],
        input=base64.b64decode(data["tls.crt"]), capture_output=True, check=True,
    ).stdout.decode()  # fmt: skip
    held = {each.strip().removeprefix("DNS:") for line in text.splitlines()[1:] for each in line.split(",")}
    maps = [each["data"] for each in objects if each["kind"] == "ConfigMap"]
    peers = [
        each
        for data in maps
        for key in ("VERIFIER", "KVSTORE", "DRAFTER")
        for each in data.get(f"HEDGEROW_{key}", "").split(",")
    ]
    url = urlsplit(named(objects, "Secret", "-secrets")["stringData"]["redis-url"])
    assert url.scheme == "rediss"
    for name in (*(peer.rpartition(":")[0] for peer in peers if peer), str(url.hostname)):
        assert name in held or f"*.{name.partition('.')[2]}" in held, name
    assert "IP Address:127.0.0.1" in held


def test_services_show_certificates_to_each_other_and_probes_need_none() -> None:
    objects = render("values")
    for service in SERVICES:
        data = named(objects, "ConfigMap", f"-{service}")["data"]
        assert data["HEDGEROW_TLS_CLIENT_CERTS"] == ("false" if service == "gateway" else "true")
        assert data["HEDGEROW_TLS_ADMIN"] == "false", "the kubelet's probes have no certificate"


def test_the_bundled_store_speaks_no_plain_text_outside_its_pod() -> None:
    objects = render("values")
    pod = pod_specs(objects)["StatefulSet/demo-hedgerow-redis"]
    store, front = pod["containers"]
    assert "--port 0" in store["args"]
    assert "ports" not in store
    assert front["args"][0] == "hedgerow.rpc.front"
    socket = next(each.partition(" ")[2] for each in store["args"] if each.startswith("--unixsocket "))
    assert front["args"][2] == socket
    data = named(objects, "ConfigMap", "-kvstore")["data"]
    assert [data[f"HEDGEROW_REDIS_TLS_{each}"] for each in ("CERT", "KEY", "CA")] == front["args"][3:]
    for sets in (("tls.enabled=false",), EXTERNAL):
        others = render("values", *sets)
        assert "HEDGEROW_REDIS_TLS_CA" not in named(others, "ConfigMap", "-kvstore")["data"]
