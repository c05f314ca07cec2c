"""A kvstore on a Redis over TLS: authority, client certificate, an ACL user that may do what is needed and no more."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from hedgerow.rpc import probe
from hedgerow.v1 import kvstore_pb2 as pb
from hedgerow.v1.common_pb2 import FinishReason
from tests.certificates import Authority, Files, copied, put
from tests.kvstore_calls import Gateway, Session, gateway_on
from tests.polling import eventually
from tests.redis_servers import Service
from tests.tls_redis import PASSWORD, USER, TlsRedis, fronted_redis, tls_redis

LOG = list(range(100, 110))


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def client(authority: Authority) -> Files:
    return authority.issue("kvstore")


@pytest.fixture(params=[tls_redis, fronted_redis])
def server(tmp_path: Path, authority: Authority, request: pytest.FixtureRequest) -> Iterator[TlsRedis]:
    with request.param(tmp_path, authority) as running:
        yield running


def files(client: Files) -> dict[str, object]:
    return {"redis_tls_ca": client.ca, "redis_tls_cert": client.cert, "redis_tls_key": client.key}


async def test_every_call_works_over_tls_with_the_documented_rights_alone(server: TlsRedis, client: Files) -> None:
    kvstore = Service("services.kvstore", redis_url=server.url, redis_timeout=20, grace=1, **files(client))
    try:
        async with gateway_on(kvstore.port) as gateway:
            await use(gateway)
        with server.admin() as admin:
            denied = [(entry["object"], entry["context"]) for entry in admin.acl_log()]
        denied = [each for each in denied if each[0] != "client|setinfo"]  # a courtesy of redis-py; Redis 7.0 lacks it
        assert not denied, f"deploy/redis.acl lacks {denied}"
        with user(server, client) as same:
            for refused in ("FLUSHALL", "KEYS *", "CONFIG GET *", "GET other", "ACL LIST"):
                with pytest.raises(redis.exceptions.NoPermissionError):
                    same.execute_command(*refused.split())
    finally:
        kvstore.stop()
    assert PASSWORD not in kvstore.text


def user(server: TlsRedis, client: Files) -> redis.Redis:
    """A client of ours with the kvstore's rights."""
    shown = {"ssl_certfile": str(client.cert), "ssl_keyfile": str(client.key)}
    return redis.Redis.from_url(server.url, ssl_ca_certs=str(client.ca), **shown)


async def use(gateway: Gateway) -> None:
    """Every call of the service."""
    stub, session = gateway.stub, await gateway.create(Session(), ttl_ms=60_000)
    of = {"session_id": session.session_id}
    assert (await gateway.status(session.entry(LOG, 0, 5)))[0] == "OK"
    assert list((await gateway.get(session)).tokens) == LOG[:5]
    tail = stub.Tail(pb.TailRequest(**of))
    assert list((await tail.read()).tokens) == LOG[:5]
    tail.cancel()
    watch = stub.WatchCancels(pb.WatchCancelsRequest(owner=session.owner))
    assert (await watch.read()).session_ids == []
    await stub.RenewOwner(pb.RenewOwnerRequest(owner=session.owner, ttl_ms=5000))
    await stub.MarkCancel(pb.MarkCancelRequest(**of))
    assert (await watch.read()).session_ids == [session.session_id]
    watch.cancel()
    await stub.ListExpired(pb.ListExpiredRequest(limit=10))
    listed = await stub.ListSessions(pb.KvStoreServiceListSessionsRequest(tenant="t"))
    assert session.session_id in [each.summary.session_id for each in listed.sessions]
    lease = (await stub.AcquireLease(pb.AcquireLeaseRequest(**of, birth=session.birth, owner=b"o" * 16))).lease
    assert lease.epoch == 2
    await stub.ReleaseLease(pb.ReleaseLeaseRequest(**of, lease=lease, birth=session.birth))
    lease = (await stub.AcquireLease(pb.AcquireLeaseRequest(**of, birth=session.birth, owner=b"p" * 16))).lease
    closing = pb.CloseSessionRequest(
        **of, lease=lease, birth=session.birth, finish_reason=FinishReason.FINISH_REASON_STOP
    )
    await stub.CloseSession(closing)
    await stub.PutPrefixes(pb.PutPrefixesRequest(verifier="v:1", block_hashes=[b"h" * 16], ttl_ms=1000))
    await stub.FindPrefix(pb.FindPrefixRequest(block_hashes=[b"h" * 16]))
    assert (await stub.DeleteSession(pb.KvStoreServiceDeleteSessionRequest(**of))).existed


def test_new_certificates_are_taken_without_a_restart(
    server: TlsRedis, client: Files, authority: Authority, tmp_path: Path
) -> None:
    """The authority, Redis' certificate and the kvstore's change; connections that broke are made anew."""
    mine = copied(client, tmp_path / "mine")
    kvstore = Service("services.kvstore", redis_url=server.url, grace=1, **files(mine))
    try:
        assert kvstore.port
        other = Authority(tmp_path / "other", "other")
        put(other.issue("redis"), server.files)
        put(other.issue("kvstore"), mine)
        with server.admin() as admin:
            for name, path in zip(("cert", "key", "ca-cert"), server.files, strict=True):
                if server.front is None:  # it looks by itself
                    admin.config_set(f"tls-{name}-file", str(path))
            admin.client_kill_filter(_type="normal", user=USER)
        eventually(lambda: exchanges_again(kvstore), 10)
    finally:
        kvstore.stop()


def exchanges_again(kvstore: Service) -> bool:
    """SERVING, asked now."""
    return probe.main([f"127.0.0.1:{kvstore.admin_port}"]) == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"redis_tls_ca": "/nowhere/ca.crt"},
            "HEDGEROW_REDIS_TLS_CA: /nowhere/ca.crt is not allowed: a file that can be",
        ),
        ({"redis_tls_key": ""}, "HEDGEROW_REDIS_TLS_KEY: None is not allowed: a file, because cert is given"),
        ({"redis_url": "redis://h:s3cret@127.0.0.1:1/0"}, "HEDGEROW_REDIS_URL: the value is not allowed: a rediss://"),
    ],
)
def test_what_is_wrong_with_the_files_ends_the_start(change: dict[str, str], said: str, client: Files) -> None:
    settings = {"redis_url": "rediss://h:s3cret@127.0.0.1:1/0", **files(client), **change}
    kvstore = Service("services.kvstore", **settings)
    try:
        assert kvstore.wait() != 0
        assert said in kvstore.text
        assert "s3cret" not in kvstore.text
    finally:
        kvstore.stop()


@pytest.mark.parametrize("case", ["authority", "no certificate", "password"])
def test_a_redis_that_does_not_fit_is_said_why_and_not_the_password(
    case: str, server: TlsRedis, client: Files, tmp_path: Path
) -> None:
    given, url = files(client), server.url
    if case == "authority":
        given["redis_tls_ca"] = Authority(tmp_path / "away", "away").cert
    elif case == "no certificate":
        given = {"redis_tls_ca": client.ca}
    else:
        url = url.replace(PASSWORD, f"{PASSWORD}-but-wrong")
    why = {
        "authority": "certificate verify failed",
        "no certificate": "redis is unavailable",
        "password": "invalid username",
    }
    kvstore = Service("services.kvstore", redis_url=url, grace=1, **given)
    try:
        eventually(lambda: "not ready yet" in kvstore.text)
        assert why[case] in kvstore.text
    finally:
        kvstore.stop()
    assert PASSWORD not in kvstore.text
