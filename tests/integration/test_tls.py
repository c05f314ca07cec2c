"""TLS between real processes: who is refused and how that is told, and streams that outlive their certificates."""

from __future__ import annotations

import asyncio
import re
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc.aio
import pytest

from hedgerow import errors
from hedgerow.certificates import Tls, Watched
from hedgerow.rpc.channel import open_channel
from hedgerow.rpc.status import from_rpc_error
from tests.certificates import Authority, Files, copied, put
from tests.echo_service import SERVICE
from tests.kvstore_calls import error_of
from tests.polling import eventually
from tests.redis_servers import Service
from tests.stack import Models

SOON = 15.0  # seconds in which a call that cannot succeed has failed


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("other"), "other")


@pytest.fixture
def files(authority: Authority, tmp_path: Path) -> Files:
    """The service's own, which a test may change."""
    return copied(authority.issue("service"), tmp_path / "files")


@pytest.fixture
def echo(files: Files, tmp_path: Path) -> Iterator[Service]:
    (tmp_path / "ready").touch()
    service = Service(
        "tests.echo_service", ready_file=tmp_path / "ready", grace=2, metrics_address="127.0.0.1:0", **files.settings()
    )
    assert service.port
    yield service
    service.stop()


def watched(files: Files) -> Watched:
    return Watched(Tls(files.ca, files.cert, files.key))


async def asked(port: int, tls: Watched | None, host: str = "127.0.0.1") -> bytes:
    async with open_channel(f"{host}:{port}", tls) as channel:
        answer: bytes = await channel.unary_unary(f"/{SERVICE}/UnaryUnary")(b"x", timeout=SOON)
        return answer


async def refusal(port: int, tls: Watched | None, host: str = "127.0.0.1") -> str:
    """What a call is told, soon."""
    began = time.monotonic()
    error = await error_of(asked(port, tls, host))
    assert isinstance(error, errors.Unavailable)
    assert time.monotonic() - began < SOON
    return error.message


async def test_both_sides_show_certificates_on_both_ports(echo: Service, files: Files, authority: Authority) -> None:
    client = watched(authority.issue("client"))
    for host in ("127.0.0.1", "localhost"):
        assert await asked(echo.port, client, host) == b"x"
    async with open_channel(f"127.0.0.1:{echo.admin_port}", client) as admin:
        assert await admin.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=SOON) == b"\x08\x01"


async def test_who_does_not_fit_is_refused_at_once_and_told_why(
    echo: Service, authority: Authority, other: Authority
) -> None:
    ours = authority.issue("ours")
    for port in (echo.port, echo.admin_port):
        assert "may want TLS, or another certificate" in await refusal(port, None)
        assert "may want TLS, or another certificate" in await refusal(port, Watched(Tls(ours.ca)))
        stranger = other.issue("stranger")
        shown = Watched(Tls(ours.ca, stranger.cert, stranger.key))
        assert "may want TLS, or another certificate" in await refusal(port, shown)
    assert "of no authority that is known here" in await refusal(echo.port, watched(other.issue("away")))


async def test_the_name_of_the_server_is_checked(authority: Authority, tmp_path: Path) -> None:
    elsewhere = authority.issue("elsewhere", hosts="DNS:verifier.example")
    service = Service("tests.echo_service", ready_file=tmp_path / "never", **elsewhere.settings())
    try:
        port, _ = service.bound()
        assert "is not for its address" in await refusal(port, watched(authority.issue("client")))
    finally:
        service.stop()


async def test_tls_against_a_plain_port_is_told(authority: Authority, tmp_path: Path) -> None:
    service = Service("tests.echo_service", ready_file=tmp_path / "never")
    try:
        port, _ = service.bound()
        assert "the peer speaks no TLS" in await refusal(port, watched(authority.issue("client")))
    finally:
        service.stop()


async def test_a_stream_outlives_its_certificates_and_new_connections_use_the_new_ones(
    echo: Service, files: Files, authority: Authority, other: Authority, tmp_path: Path
) -> None:
    """Server, client and authority change at once, in the middle of a stream, and nothing is opened anew by us."""
    mine = copied(authority.issue("client"), tmp_path / "mine")
    async with open_channel(f"127.0.0.1:{echo.port}", watched(mine)) as channel:
        ask = channel.unary_unary(f"/{SERVICE}/UnaryUnary")
        stream = channel.stream_stream(f"/{SERVICE}/StreamStream")()
        await stream.write(b"before")
        assert await stream.read() == b"before"
        put(other.issue("service"), files)
        put(other.issue("client"), mine)
        for word in (b"during", b"still"):
            await stream.write(word)
            assert await asyncio.wait_for(stream.read(), SOON) == word
            assert await ask(word, timeout=SOON) == word, "the same channel, over a new connection"
        assert "of no authority" in await refusal(echo.port, watched(authority.issue("late")))
        await stream.done_writing()
        assert await stream.read() == grpc.aio.EOF
        assert (await stream.code()) is grpc.StatusCode.OK
        assert await ask(b"after", timeout=SOON) == b"after"


async def test_new_files_that_do_not_fit_change_nothing_but_the_log(
    echo: Service, files: Files, authority: Authority
) -> None:
    client = watched(authority.issue("client"))
    put(files._replace(key=authority.issue("another").key), files)  # at once: half a key is another thing to tell
    for _ in range(3):
        assert await asked(echo.port, client) == b"x"
    eventually(lambda: "are not taken" in echo.text)
    (said,) = [line for line in echo.log if "are not taken" in line]
    assert "variable=HEDGEROW_TLS_KEY" in said
    assert str(files.cert) in said


async def test_many_connections_while_certificates_change(echo: Service, files: Files, authority: Authority) -> None:
    """gRPC asks for certificates in threads of its own, which need the interpreter: nothing may wait for itself."""
    pool = [authority.issue(f"service-{number}") for number in range(4)]
    client = watched(authority.issue("client"))
    for files_now in pool:
        put(files_now, files)
        assert await asyncio.gather(*(asked(echo.port, client) for _ in range(40))) == [b"x"] * 40


def test_metrics_are_served_over_tls_and_follow_the_files(echo: Service, files: Files, other: Authority) -> None:
    echo.bound()
    (line,) = [line for line in echo.log if "event=metrics" in line]
    url = f"https://127.0.0.1:{line.rpartition('port=')[2]}/metrics"

    def scrape(trusts: Path, shows: Files | None) -> str:
        context = ssl.create_default_context(cafile=trusts)
        if shows is not None:
            context.load_cert_chain(shows.cert, shows.key)
        with urllib.request.urlopen(url, timeout=SOON, context=context) as answer:
            text: str = answer.read().decode()
            return text

    first = scrape(files.ca, files)
    assert "process_cpu_seconds_total" in first
    expiry = float(re.search(r"^hedgerow_tls_expiry_seconds (\S+)", first, re.MULTILINE)[1])  # type: ignore[index]
    assert 29 < (expiry - time.time()) / 86400 < 31
    with pytest.raises((urllib.error.URLError, OSError)):
        scrape(files.ca, None)
    first_ca = files.ca.read_bytes()
    put(other.issue("metrics"), files)
    assert "process_cpu_seconds_total" in scrape(files.ca, files)
    old = files.ca.with_name("old.crt")
    old.write_bytes(first_ca)
    with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
        scrape(old, files)


async def test_the_admin_port_can_be_left_plain_for_a_kubelet(authority: Authority, tmp_path: Path) -> None:
    (tmp_path / "ready").touch()
    service = Service(
        "tests.echo_service", ready_file=tmp_path / "ready", tls_admin="false", **authority.issue("it").settings()
    )
    try:
        async with open_channel(f"127.0.0.1:{service.admin_port}") as admin:
            assert await admin.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=SOON) == b"\x08\x01"
        await refusal(service.port, None)
    finally:
        service.stop()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"tls_cert": "/nowhere/tls.crt"}, "HEDGEROW_TLS_CERT: /nowhere/tls.crt is not allowed: a file that can be"),
        ({"tls_key": ""}, "HEDGEROW_TLS_KEY: None is not allowed: a file, because cert is given"),
        ({"tls_ca": ""}, "HEDGEROW_TLS_CA: nothing is not allowed: it must be set, or HEDGEROW_TLS_CLIENT_CERTS to"),
        (
            {"tls_cert": "", "tls_key": ""},
            "HEDGEROW_TLS_CERT: nothing is not allowed: it must be set, because HEDGEROW",
        ),
        ({"tls_peer_cert": "/nowhere/peer.crt"}, "HEDGEROW_TLS_PEER_KEY"),
        (
            {"tls_client_certs": "maybe"},
            "HEDGEROW_TLS_CLIENT_CERTS: 'maybe' is not allowed: must be one of true, false",
        ),
    ],
)
def test_what_is_wrong_at_the_start_ends_it_with_the_variable_and_the_file(
    wrong: dict[str, str], said: str, authority: Authority, tmp_path: Path
) -> None:
    settings = authority.issue("start").settings() | wrong
    service = Service("services.kvstore", redis_url="redis://127.0.0.1:1/0", **settings)
    try:
        assert service.wait() != 0
        assert said in service.text
    finally:
        service.stop()


def test_a_service_whose_peer_shows_the_wrong_certificate_says_so_and_goes_on_trying(
    authority: Authority, other: Authority, tiny: Models
) -> None:
    """In its log and its health: which variable, which file, which peer."""
    ours = other.issue("gateway")
    kvstore = Service("services.kvstore", redis_url="redis://127.0.0.1:1/0", **authority.issue("kvstore").settings())
    gateway = None
    try:
        where = f"127.0.0.1:{kvstore.bound()[0]}"
        gateway = Service("services.gateway", verifier=where, kvstore=where, model_path=tiny.target, **ours.settings())
        eventually(lambda: "not ready yet" in gateway.text, 20)
        (said,) = [line for line in gateway.log if "not ready yet" in line][:1]
        assert "the peer's certificate is of no authority that is known here" in said
        assert f"HEDGEROW_TLS_CA, {ours.ca}" in said
    finally:
        for service in (gateway, kvstore):
            if service is not None:
                service.stop()


def test_the_words_of_a_peer_that_is_merely_away_stay_as_they_are() -> None:
    error = grpc.aio.AioRpcError(
        grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "failed to connect: Connection refused"
    )
    assert from_rpc_error(error).message == "failed to connect: Connection refused"
