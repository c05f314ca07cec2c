"""The stack with TLS on every hop, Redis among them: exact through a rotation, closed to strangers, silent."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import grpc.aio
import psutil
import pytest

from hedgerow.certificates import Watched
from hedgerow.cli.ports import free_ports
from hedgerow.cli.supervisor import Stack, StackConfig
from hedgerow.client import AsyncClient, Retry, Tls
from hedgerow.errors import HedgerowError, InvalidRequest, Unavailable
from hedgerow.rpc.channel import open_channel
from tests.certificates import Authority, Files, copied, put
from tests.stack import ROOT, Models, Plain, engine_sampling
from tests.tls_redis import PASSWORD, TlsRedis, tls_redis

SERVICES = ("gateway", "verifier", "drafter", "kvstore")
TENANT_SECRET = "hunter2-and-a-half-of-it"
PROMPT = [1, 2, 3, 4, 5]
TOKENS = 1500


class Secured(NamedTuple):
    """A stack, its Redis, and everybody's files, in starting order."""

    stack: Stack
    redis: TlsRedis
    authority: Authority
    files: dict[str, Files]
    metrics: dict[str, str]


@pytest.fixture(scope="module")
def secured(tiny: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("secured")
    authority, ports = Authority(folder / "ca"), free_ports(len(SERVICES))
    files = {name: copied(authority.issue(name), folder / name) for name in (*SERVICES, "redis-client")}
    metrics = {name: f"127.0.0.1:{next(ports)}" for name in SERVICES}
    settings = {
        name: {f"{key}".upper(): str(value) for key, value in files[name].settings().items()}
        | {"METRICS_ADDRESS": metrics[name]}
        for name in SERVICES
    }
    settings["gateway"]["TENANT_SECRET"] = TENANT_SECRET
    mine = files["redis-client"]
    settings["kvstore"] |= {
        "REDIS_TLS_CA": str(mine.ca), "REDIS_TLS_CERT": str(mine.cert), "REDIS_TLS_KEY": str(mine.key)
    }  # fmt: skip
    with tls_redis(folder, authority) as redis:
        config = StackConfig(
            ROOT,
            tiny.target,
            folder / "data",
            drafter=tiny.drafter,
            redis_url=redis.url,
            log_level="debug",
            grace=3,
            settings=settings,
        )
        with Stack(config) as stack:
            yield Secured(stack, redis, authority, files, metrics)


def client_of(secured: Secured, **options: object) -> AsyncClient:
    return AsyncClient(secured.stack.address("gateway"), tls=Tls(secured.authority.cert), **options)


async def test_a_stream_is_exact_through_a_change_of_every_certificate_and_restarts(
    secured: Secured, tiny_plain: Plain, tmp_path: Path
) -> None:
    """All change in the middle of a stream; then every service behind the gateway restarts with the new ones."""
    new = {name: secured.authority.issue(f"{name}-2") for name in secured.files}
    async with client_of(secured) as client:
        tokens, options = list[int](), {"max_tokens": TOKENS, "ignore_eos": True, "temperature": 0.8, "seed": 7}
        stream = client.generate(PROMPT, **options)
        async for chunk in stream:
            tokens += chunk.tokens
            if len(tokens) >= 20:
                break
        for name, files in secured.files.items():
            put(new[name], files)
        for name in ("kvstore", "drafter", "verifier"):
            secured.stack.terminate(name)
        async for chunk in stream:
            tokens += chunk.tokens
        assert stream.started is not None
        assert "the verifier's stream broke" in "\n".join(secured.stack.logs("gateway")), "it was over too early"
        assert tokens == tiny_plain.tokens(PROMPT, engine_sampling(stream.started.sampling))
    for name in ("kvstore", "drafter", "verifier"):
        await asyncio.to_thread(secured.stack.wait_ready, name)
        assert secured.stack.starts(name) == 2


async def test_no_port_is_open_without_tls_and_none_behind_the_gateway_without_a_certificate(secured: Secured) -> None:
    for name in SERVICES:
        for address in (secured.stack.address(name), secured.stack.admin_address(name)):
            assert await refused(address, None), f"{name}, {address} speaks without TLS"
            anonymous = await refused(address, Watched(Tls(secured.authority.cert)))
            assert anonymous == (name != "gateway"), f"{name}, {address}"


async def refused(address: str, tls: Watched | None) -> bool:
    async with open_channel(address, tls) as channel:
        try:
            await channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=5)
        except grpc.aio.AioRpcError as error:
            return error.code() is grpc.StatusCode.UNAVAILABLE
        return False


async def test_the_sdk_says_what_is_wrong(secured: Secured, tmp_path: Path) -> None:
    address, away = secured.stack.address("gateway"), Authority(tmp_path, "away")

    async def said(tls: Tls | bool) -> str:
        async with AsyncClient(address, tls=tls, retry=Retry.never()) as client:
            with pytest.raises(Unavailable) as caught:
                await client.models()
            return str(caught.value)

    assert f"of no authority that is known here (tls.ca: {away.cert}" in await said(Tls(away.cert))
    assert "of no authority that is known here (tls.ca: the usual ones" in await said(True)
    assert "it may want TLS, or another certificate (this client uses no TLS)" in await said(False)
    with pytest.raises(InvalidRequest) as missing:
        AsyncClient(address, tls=Tls("/nowhere/ca.crt"))
    assert (missing.value.field, missing.value.value) == ("tls.ca", "/nowhere/ca.crt")


def test_the_command_line_over_tls(secured: Secured, tmp_path: Path) -> None:
    def hedgerow(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "hedgerow.cli", "models", "--address", secured.stack.address("gateway")]
        return subprocess.run([*command, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)

    good = hedgerow("--tls-ca", str(secured.authority.cert))
    assert (good.returncode, good.stderr) == (0, "")
    assert "ready" in good.stdout
    away = Authority(tmp_path, "away").cert
    for arguments, status, said in (
        ((), 3, "it may want TLS, or another certificate"),
        (("--tls",), 3, "of no authority that is known here"),
        (("--tls-ca", str(away)), 3, f"tls.ca: {away}"),
        (("--tls-ca", "/nowhere/ca.crt"), 2, "--tls-ca: '/nowhere/ca.crt' is not allowed: a file that can be read"),
        (
            ("--tls-cert", str(secured.files["gateway"].cert)),
            2,
            "--tls-key: 'None' is not allowed: a file, because cert",
        ),
    ):
        ended = hedgerow(*arguments)
        assert (ended.returncode, said in ended.stderr) == (status, True), ended.stderr


def test_status_over_tls_with_a_certificate(secured: Secured) -> None:
    mine = secured.files["gateway"]
    shown = ("--tls-ca", mine.ca, "--tls-cert", mine.cert, "--tls-key", mine.key)
    admin = [secured.stack.admin_address(name) for name in SERVICES]
    command = [sys.executable, "-m", "hedgerow.cli", "status", *admin, *map(str, shown)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stdout
    assert [line.split()[2] for line in ended.stdout.splitlines()[1:]] == ["serving"] * 4


async def test_no_secret_is_in_logs_metrics_errors_or_arguments(secured: Secured) -> None:
    """Planted: the Redis password, the tenants' secret, a private key. Errors that a client sees are made, too."""
    stack = secured.stack
    keys = [files.key.read_text().splitlines()[1] for files in secured.files.values()]
    secrets = (PASSWORD, TENANT_SECRET, *keys)
    seen: dict[str, str] = {}
    errors = []
    async with client_of(secured, retry=Retry.never()) as client:
        with secured.redis.admin() as admin:  # what Redis says of a lost user must not say its password
            admin.execute_command("ACL", "SETUSER", "hedgerow", "off")
            admin.client_kill_filter(_type="normal", user="hedgerow")
            for ask in (client.get_session("none"), client.complete(PROMPT, max_tokens=2, timeout=2)):
                try:
                    await ask
                except HedgerowError as error:
                    errors.append(f"{error} {error.metadata}")
            admin.execute_command("ACL", "SETUSER", "hedgerow", "on")
    assert len(errors) == 2
    seen["errors"] = "\n".join(errors)
    files = secured.files["verifier"]
    context = ssl.create_default_context(cafile=files.ca)
    context.load_cert_chain(files.cert, files.key)
    for name in SERVICES:
        await asyncio.to_thread(stack.wait_ready, name)
        url = f"https://{secured.metrics[name]}/metrics"
        with await asyncio.to_thread(urllib.request.urlopen, url, None, 10, context=context) as answer:
            seen[f"{name} metrics"] = answer.read().decode()
        seen[f"{name} log"] = "\n".join(stack.logs(name))
        seen[f"{name} arguments"] = " ".join(psutil.Process(stack.pid(name)).cmdline())
    for where, text in seen.items():
        assert text, f"{where} is empty: nothing was looked at"
        assert not [secret for secret in secrets if secret in text], where
    assert "hedgerow_gateway" in seen["gateway metrics"]


def test_up_takes_a_folder_of_certificates(tmp_path: Path) -> None:
    """Looked at before anything starts; which hop uses which is tested above."""
    command = [sys.executable, "-m", "hedgerow.cli", "up", "--tls", str(tmp_path), "--data", str(tmp_path / "data")]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert "--tls: " in ended.stderr
    assert "a file that can be read: No such file or directory" in ended.stderr
