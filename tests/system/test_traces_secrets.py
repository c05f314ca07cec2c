"""Planted secrets are in no span: the Redis password, the tenants' secret, API keys, in calls that fail as well."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import redis

from hedgerow.cli.embedded_redis import EmbeddedRedis
from hedgerow.cli.supervisor import Stack, StackConfig
from hedgerow.client import AsyncClient, Retry
from hedgerow.errors import HedgerowError, Unauthenticated
from tests.polling import eventually
from tests.redis_groups import paused
from tests.stack import ROOT, Models
from tests.system.jaeger import jaeger

pytestmark = pytest.mark.system
PASSWORD, TENANT_SECRET = "planted-redis-password", "planted-tenant-secret"
KEY, WRONG = "planted-api-key-of-acme-0123456789", "planted-api-key-of-nobody-987654"
SERVICES = ("gateway", "verifier", "drafter", "kvstore")


async def test_no_secret_is_in_a_span(tiny: Models, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"acme {KEY}\n")
    keys.chmod(0o600)
    with jaeger(tmp_path) as collector, EmbeddedRedis(tmp_path / "redis") as store:
        with redis.Redis.from_url(store.url) as admin:
            admin.config_set("requirepass", PASSWORD)
        settings = {name: {"OTLP_ENDPOINT": collector.endpoint, "TRACE_STEPS": "1"} for name in SERVICES}
        settings["gateway"] |= {"TENANT_SECRET": TENANT_SECRET, "API_KEYS_FILE": str(keys)}
        url = store.url.replace("redis://", f"redis://default:{PASSWORD}@")
        config = StackConfig(
            ROOT, tiny.target, tmp_path / "data", drafter=tiny.drafter, redis_url=url, settings=settings
        )
        with Stack(config) as stack:
            address = stack.address("gateway")
            async with AsyncClient(address, api_key=KEY, retry=Retry.never()) as client:
                await client.generate([1, 2, 3], max_tokens=20, ignore_eos=True, idempotency_key="k").result()
                with paused(store), pytest.raises(HedgerowError):
                    await client.generate([1, 2, 4], max_tokens=20, deadline=1.0).result()
            async with AsyncClient(address, api_key=WRONG, retry=Retry.never()) as client:
                with pytest.raises(Unauthenticated):
                    await client.generate([1, 2, 5], max_tokens=2).result()
            stack.send("kvstore", signal.SIGTERM)
            eventually(lambda: all(collector.traces(name) for name in SERVICES), 30, "spans of all")
        spans = [span for name in SERVICES for each in collector.traces(name) for span in each.spans]
    assert any(span.failed for span in spans), "one that failed is among them"
    told = json.dumps([[span.name, span.tags, span.events] for span in spans], default=str)
    assert len(spans) > 20
    assert not [secret for secret in (PASSWORD, TENANT_SECRET, KEY, WRONG) if secret in told]
