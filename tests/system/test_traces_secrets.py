"""Planted secrets are in no span, no line of the log at its most talkative, and no metric: the Redis password, the
tenants' secret, API keys, prompts, stop strings, keys of idempotency, in calls that fail as well."""

from __future__ import annotations

import json
import signal
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import redis

from hedgerow.cli.embedded_redis import EmbeddedRedis
from hedgerow.cli.ports import free_ports
from hedgerow.cli.supervisor import Stack, StackConfig
from hedgerow.client import AsyncClient, Retry
from hedgerow.errors import HedgerowError, Unauthenticated
from tests.polling import eventually
from tests.redis_groups import paused
from tests.stack import ROOT, Models
from tests.system.jaeger import Span, jaeger

pytestmark = pytest.mark.system
PASSWORD, TENANT_SECRET = "planted-redis-password", "planted-tenant-secret"
KEY, WRONG = "planted-api-key-of-acme-0123456789", "planted-api-key-of-nobody-987654"
PROMPT, STOP, IDEMPOTENCY = "planted prompt", "planted stop string", "planted-idempotency-key"
PLANTED = (PASSWORD, TENANT_SECRET, KEY, WRONG, PROMPT, STOP, IDEMPOTENCY)
SERVICES = ("gateway", "verifier", "drafter", "kvstore")


async def test_no_secret_is_in_a_span_a_log_or_a_metric(tiny: Models, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"acme {KEY}\n")
    keys.chmod(0o600)
    with jaeger(tmp_path) as collector, EmbeddedRedis(tmp_path / "redis") as store:
        with redis.Redis.from_url(store.url) as admin:
            admin.config_set("requirepass", PASSWORD)
        ports = dict(zip(SERVICES, free_ports(4), strict=True))
        settings: dict[str, dict[str, Any]] = {
            name: {
                "OTLP_ENDPOINT": collector.endpoint, "TRACE_STEPS": "1", "LOG_LEVEL": "debug", "LOG_FORMAT": "json",
                "METRICS_ADDRESS": f"127.0.0.1:{port}",
            }
            for name, port in ports.items()
        }  # fmt: skip
        settings["gateway"] |= {"TENANT_SECRET": TENANT_SECRET, "API_KEYS_FILE": str(keys)}
        url = store.url.replace("redis://", f"redis://default:{PASSWORD}@")
        config = StackConfig(
            ROOT, tiny.target, tmp_path / "data", drafter=tiny.drafter, redis_url=url, settings=settings
        )
        with Stack(config) as stack:
            address = stack.address("gateway")
            async with AsyncClient(address, api_key=KEY, retry=Retry.never()) as client:
                whole = await client.generate(
                    PROMPT, max_tokens=20, ignore_eos=True, idempotency_key=IDEMPOTENCY, stop=[STOP]
                ).result()
                with pytest.raises(HedgerowError):
                    await client.generate(PROMPT, max_tokens=1 << 23, stop=[STOP]).result()
                with paused(store), pytest.raises(HedgerowError):
                    await client.generate([1, 2, 4], max_tokens=20, deadline=1.0).result()
            async with AsyncClient(address, api_key=WRONG, retry=Retry.never()) as client:
                with pytest.raises(Unauthenticated):
                    await client.generate([1, 2, 5], max_tokens=2).result()
            metrics = [read(port) for port in ports.values()]
            stack.send("kvstore", signal.SIGTERM)
            eventually(lambda: all(collector.traces(name) for name in SERVICES), 30, "spans of all")
            logs = {name: stack.logs(name) for name in SERVICES}
        spans = [span for name in SERVICES for each in collector.traces(name) for span in each.spans]
    assert any(span.failed for span in spans), "one that failed is among them"
    told = json.dumps([[span.name, span.tags, span.events] for span in spans], default=str)
    assert len(spans) > 20
    assert all("hedgerow_" in text for text in metrics)
    for where in (told, str(logs), str(metrics)):
        assert not [secret for secret in PLANTED if secret in where]
    lines = [json.loads(line) for each in logs.values() for line in each if line.startswith("{")]
    assert {line["service"] for line in lines} == set(SERVICES)
    leaf = next(s for s in spans if s.name == "attachment" and s.tags["hedgerow.session.id"] == whole.session_id)
    (ended,) = (line for line in lines if line["event"] == "a sequence ended" and line["session"] == whole.session_id)
    assert ended["trace"] == leaf.trace, "from a line of the log to its trace"
    steps = {span.tags["hedgerow.step_id"] for span in spans if span.name == "step" and leaf.trace in linked(span)}
    assert ended["step"] in steps, "and to its step"


def linked(span: Span) -> set[str]:
    return {trace for trace, _ in span.links}


def read(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return str(answer.read().decode())
