"""API keys: the file, who a call is of, and what a tenant may have at once."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import pytest

from hedgerow.errors import HedgerowError, InvalidRequest, Overloaded, Unauthenticated
from hedgerow.rpc import telemetry
from hedgerow.rpc.config import ConfigError
from services.gateway.access import Access, caller, tenant_of
from services.gateway.keys import Keys, Tenant, read_keys
from services.gateway.quotas import Quotas

PLAIN, OTHER = "plain-key-0123456789", "other-key-0123456789"
HASH = hashlib.sha256(OTHER.encode()).hexdigest()


def written(folder: Path, text: str) -> Path:
    path = folder / "keys"
    path.write_text(text)
    return path


def read(folder: Path, text: str) -> Keys:
    return read_keys(written(folder, text))


def bearer(key: str, **more: str) -> Mapping[str, str]:
    return {"authorization": f"Bearer {key}"} | {name.replace("_", "-"): value for name, value in more.items()}


def test_a_key_is_known_as_it_is_and_by_its_hash(tmp_path: Path) -> None:
    keys = read(tmp_path, f"# ours\n\nacme {PLAIN}\n  lab\tsha256:{HASH.upper()}  \n")
    assert len(keys) == 2
    assert keys.tenant(PLAIN) == Tenant("acme")
    assert keys.tenant(OTHER) == Tenant("lab")
    for wrong in ("", PLAIN[:-1], PLAIN + "x", HASH, f"sha256:{HASH}", PLAIN.upper(), "é" * 20):
        assert keys.tenant(wrong) is None


def test_limits_are_the_tenants_whichever_line_has_them(tmp_path: Path) -> None:
    keys = read(tmp_path, f"acme {PLAIN} concurrent=3 max_priority=-5\nacme sha256:{HASH} requests_per_minute=60\n")
    assert keys.tenant(PLAIN) == keys.tenant(OTHER) == Tenant("acme", 3, 60, -5)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("acme", "line 2: this is not allowed: must be TENANT KEY [LIMIT=NUMBER ...]"),
        (
            f"{'t' * 129} {OTHER}",
            "line 2: tenant: this is not allowed: must be printable ASCII, at most 128 characters",
        ),
        ("acme secret", "line 2: key: this is not allowed: must be 16 to 256 printable ASCII characters"),
        ("acme " + "s" * 257, "line 2: key: this is not allowed: must be 16 to 256 printable ASCII characters"),
        ("acme sha256:secret", "line 2: key: this is not allowed: behind sha256: must be 64 hexadecimal digits"),
        (f"acme {PLAIN}", "line 2: key: this is not allowed: it is that of line 1"),
        (f"acme {OTHER} secret", "line 2: a word behind the key is not allowed: must be LIMIT=NUMBER with one of conc"),
        (f"acme {OTHER} a=1", "line 2: a word behind the key is not allowed: must be LIMIT=NUMBER with one of concurr"),
        (f"acme {OTHER} concurrent=secret", "line 2: concurrent: this is not allowed: must be a whole number in [1, 1"),
        (f"acme {OTHER} concurrent=0", "line 2: concurrent: 0 is not allowed: must be a whole number in [1, 1000000]"),
        (f"acme {OTHER} max_priority=101", "line 2: max_priority: 101 is not allowed: must be a whole number in [-100"),
        (f"lab {OTHER} concurrent=3", "line 2: concurrent: 3 is not allowed: this tenant's is 2 on another line"),
    ],
)
def test_a_line_that_is_wrong_is_named_with_its_field_and_limit_and_no_key(
    tmp_path: Path, line: str, told: str
) -> None:
    path = written(tmp_path, f"lab {PLAIN} concurrent=2\n{line}\n")
    with pytest.raises(ConfigError) as refused:
        read_keys(path)
    assert str(refused.value).startswith(f"{path}, {told}")
    assert not [word for word in ("secret", PLAIN, OTHER) if word in str(refused.value)]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "the file is not allowed: must be one that can be read: No such file or directory"),
        (b"", "the file is not allowed: must have a key"),
        (b"# nothing\n", "the file is not allowed: must have a key"),
        (b"acme s\xffcret", "the file is not allowed: must be text in UTF-8"),
        (b"#" * (16 * 1024 * 1024 + 1), "the file is not allowed: must have at most 16777216 bytes"),
    ],
    ids=["missing", "empty", "comments", "binary", "large"],
)
def test_a_file_that_is_wrong_as_a_whole_is_named(tmp_path: Path, content: bytes | None, told: str) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        read_keys(path)
    assert str(refused.value) == f"{path}: {told}"


@pytest.mark.parametrize(
    ("metadata", "why", "told"),
    [
        ({}, "missing", "no API key came with the call"),
        ({"authorization": "secret"}, "malformed", "another form"),
        ({"authorization": "Basic secret"}, "malformed", "another form"),
        ({"authorization": "Bearer "}, "malformed", "another form"),
        ({"authorization": f"Bearer {PLAIN}, Bearer {OTHER}"}, "malformed", "once"),
        ({"authorization": "Bearer secret"}, "unknown", "none that this gateway knows"),
    ],
)
def test_a_call_without_a_key_that_is_known_is_refused_and_nothing_of_it_repeated(
    tmp_path: Path, metadata: Mapping[str, str], why: str, told: str
) -> None:
    access = Access(lambda: read(tmp_path, f"acme {PLAIN}"))
    before = telemetry.value("hedgerow_gateway_unauthenticated_total", reason=why)
    with pytest.raises(Unauthenticated, match=told) as refused:
        access.admit(metadata)
    assert not [word for word in ("secret", PLAIN) if word in str(refused.value) + str(refused.value.metadata)]
    assert telemetry.value("hedgerow_gateway_unauthenticated_total", reason=why) == before + 1


def test_with_keys_the_tenant_is_the_keys(tmp_path: Path) -> None:
    access = Access(lambda: read(tmp_path, f"acme {PLAIN}\nlab {OTHER}"))
    for metadata, tenant in ((bearer(PLAIN), "acme"), (bearer(OTHER, hedgerow_tenant="lab"), "lab")):
        access.admit(metadata)
        assert (caller().name, tenant_of(""), tenant_of(tenant)) == (tenant, tenant, tenant)
    access.admit({"authorization": f"bearer {PLAIN}"})
    assert caller().name == "acme"
    for call in (lambda: access.admit(bearer(PLAIN, hedgerow_tenant="lab")), lambda: tenant_of("lab")):
        with pytest.raises(InvalidRequest) as refused:
            call()
        assert refused.value.field in ("hedgerow-tenant", "tenant")


def test_without_keys_the_metadata_is_believed_and_a_key_is_not_looked_at() -> None:
    access = Access(None)
    access.admit(bearer("whatever", hedgerow_tenant="acme"))
    assert (caller(), tenant_of("")) == (Tenant("acme"), "acme")
    access.admit({})
    assert (caller(), tenant_of("named")) == (Tenant(""), "named")
    with pytest.raises(HedgerowError, match="hedgerow-tenant: '129 bytes'"):
        access.admit({"hedgerow-tenant": "t" * 129})


def test_as_many_calls_of_a_tenant_at_once_as_it_may_have() -> None:
    alone = {"acme": 0}
    quotas, tenant = Quotas(lambda name: alone[name]), Tenant("acme", concurrent=2)
    quotas.generate(tenant)
    with quotas.reading(tenant):
        quotas.generate(tenant)
        alone["acme"] = 1  # a session that its client left to itself
        with pytest.raises(Overloaded, match=r"tenant acme, in requests at once, is full: 2 of 2") as refused:
            quotas.generate(tenant)
        assert refused.value.retry_after == 1.0
        with quotas.reading(tenant), quotas.reading(tenant):
            pass  # a Resume is let in: it goes on with what began within the limit
        alone["acme"] = 0
        quotas.generate(tenant)
        quotas.generate(Tenant("other"))
    alone["acme"] = 1
    quotas.generate(tenant)


def test_as_many_requests_a_minute_and_the_rest_when_it_is_their_time() -> None:
    now = [100.0]
    quotas, tenant = Quotas(lambda name: 0, lambda: now[0]), Tenant("acme", requests_per_minute=3)
    for _ in range(3):
        quotas.spend(tenant)
    with pytest.raises(Overloaded, match="requests a minute, is full: 3 of 3") as refused:
        quotas.spend(tenant)
    assert refused.value.retry_after == pytest.approx(20.0)
    now[0] += 20.0
    quotas.generate(tenant)
    with pytest.raises(Overloaded):
        quotas.generate(tenant)
    quotas.spend(Tenant("other", requests_per_minute=1))
    now[0] += 3600.0
    for _ in range(3):
        quotas.spend(tenant)
    with pytest.raises(Overloaded):
        quotas.spend(tenant)


def test_a_priority_is_the_tenants_at_most() -> None:
    quotas = Quotas(lambda name: 0)
    assert [quotas.priority(Tenant("a"), asked) for asked in (-100, 0, 100)] == [-100, 0, 100]
    low = Tenant("a", max_priority=-5)
    assert [quotas.priority(low, asked) for asked in (-100, -5, 0)] == [-100, -5, -5]
    for asked in (-4, 1):
        with pytest.raises(InvalidRequest, match=f"priority: {asked} is not allowed: at most -5, the tenant's"):
            quotas.priority(low, asked)
