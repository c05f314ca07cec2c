"""A service process of `hedgerow.rpc`: errors, health, ports, drain."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import pytest_asyncio
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from hedgerow import errors
from hedgerow.rpc import health_list, probe
from hedgerow.rpc.channel import open_channel
from tests.echo_service import SERVICE
from tests.kvstore_calls import error_of, outcome_of
from tests.polling import eventually, soon
from tests.redis_servers import Service

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
FAILING = (b"invalid", b"overloaded", b"bug", b"cancelled")
METHODS = ("UnaryUnary", "UnaryStream", "UnaryWritten", "StreamUnary", "StreamStream")


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One service for the tests that leave it as it was."""
    ready = tmp_path_factory.mktemp("echo") / "ready"
    ready.touch()
    service = Service("tests.echo_service", ready_file=ready, max_concurrent_rpcs=20, message_limit=1 << 20)
    yield service
    service.stop()


@pytest.fixture
def starting(tmp_path: Path) -> Iterator[Service]:
    """A service of its own that is not ready until tmp_path / "ready" is there."""
    service = Service("tests.echo_service", ready_file=tmp_path / "ready", grace=30)
    yield service
    service.stop()


@pytest_asyncio.fixture
async def channel(echo: Service) -> AsyncIterator[grpc.aio.Channel]:
    async with open_channel(f"127.0.0.1:{echo.port}") as opened:
        yield opened


async def call(channel: grpc.aio.Channel, method: str, order: bytes) -> list[bytes]:
    """Every answer of one call of any kind."""
    path = f"/{SERVICE}/{method}"
    if method == "UnaryUnary":
        return [await channel.unary_unary(path)(order, timeout=5)]
    if method in ("StreamUnary", "StreamStream"):
        running: Any = (channel.stream_unary if method == "StreamUnary" else channel.stream_stream)(path)(timeout=5)
        await running.write(order)
        if order not in FAILING:  # a write that meets the end of its call hides the call's status
            await running.write(order)
            await running.done_writing()
        return [await running] if method == "StreamUnary" else [answer async for answer in running]
    return [answer async for answer in channel.unary_stream(path)(order, timeout=5)]


def health(channel: grpc.aio.Channel) -> Any:
    return health_pb2_grpc.HealthStub(channel)


def check(service: str = "") -> health_pb2.HealthCheckRequest:
    return health_pb2.HealthCheckRequest(service=service)


async def test_methods_of_every_kind_answer_through_the_interceptor(channel: grpc.aio.Channel) -> None:
    answers = {method: await call(channel, method, b"x") for method in METHODS}
    assert answers == {
        "UnaryUnary": [b"x"],
        "UnaryStream": [b"first", b"x"],
        "UnaryWritten": [b"first", b"x"],
        "StreamUnary": [b"x,x"],
        "StreamStream": [b"x", b"x"],
    }


@pytest.mark.parametrize("method", METHODS)
async def test_our_errors_keep_their_reason_and_data(channel: grpc.aio.Channel, method: str) -> None:
    invalid = await error_of(call(channel, method, b"invalid"))
    assert isinstance(invalid, errors.InvalidRequest)
    assert (invalid.field, invalid.value, invalid.limit) == ("top_p", "1.5", "in (0, 1]")
    full = await error_of(call(channel, method, b"overloaded"))
    assert isinstance(full, errors.Overloaded)
    assert (full.retry_after, full.metadata["queued"], full.metadata["limit"]) == (0.25, "212", "200")


@pytest.mark.parametrize("method", METHODS)
async def test_a_bug_leaks_nothing_to_the_caller_and_all_to_the_log(
    channel: grpc.aio.Channel, echo: Service, method: str
) -> None:
    error = await error_of(call(channel, method, b"bug"))
    assert isinstance(error, errors.Internal)
    assert "hunter2" not in str(error) + str(error.metadata)
    told = error.metadata["error_id"]
    await soon(lambda: any(told in line for line in echo.log))  # the log comes over a pipe of its own
    (line,) = [line for line in echo.log if told in line]
    assert "hunter2" in line
    assert f"method=/{SERVICE}/{method}" in line


@pytest.mark.parametrize("method", METHODS)
async def test_raised_cancelled_error_does_not_hang_the_client(channel: grpc.aio.Channel, method: str) -> None:
    """grpc/grpc#29248: a handler that lets a CancelledError out leaves its client waiting for ever."""
    began = time.monotonic()
    assert isinstance(await error_of(call(channel, method, b"cancelled")), errors.Internal)
    assert time.monotonic() - began < 20


async def test_clients_own_cancel_and_deadline_are_told_as_such(channel: grpc.aio.Channel) -> None:
    waiting = channel.unary_unary(f"/{SERVICE}/UnaryUnary")
    late = await error_of(waiting(b"wait 5", timeout=0.1))
    assert isinstance(late, errors.DeadlineExceeded)
    running = waiting(b"wait 5")
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert await call(channel, "UnaryUnary", b"still well") == [b"still well"]


UNREADABLE = {
    "grpc.health.v1.Health/Check": b"\x0a\x01\xff",  # a service's name that is not UTF-8
    "grpc.health.v1.Health/Watch": b"\x0a\x05ab",  # cut short
    "grpc.reflection.v1.ServerReflection/ServerReflectionInfo": b"\xff" * 9,
}


@pytest.mark.parametrize("method", UNREADABLE)
async def test_a_request_that_cannot_be_read_is_its_senders_mistake(echo: Service, method: str) -> None:
    """It was UNKNOWN, "Unexpected <class 'google.protobuf.message.DecodeError'>", and a traceback in the log."""
    sent, lines = UNREADABLE[method], len(echo.log)
    async with open_channel(f"127.0.0.1:{echo.admin_port}") as admin:
        if "Info" in method:
            error = await error_of(admin.stream_stream(f"/{method}")(iter([sent]), timeout=5).read())
        elif "Watch" in method:
            error = await error_of(admin.unary_stream(f"/{method}")(sent, timeout=5).read())
        else:
            error = await error_of(admin.unary_unary(f"/{method}")(sent, timeout=5))
    assert isinstance(error, errors.InvalidRequest)
    assert (error.field, error.value) == ("request", f"'{len(sent)} bytes'")
    assert "UTF-8" in error.limit
    assert not any("Traceback" in line or "DecodeError" in line for line in echo.log[lines:])


async def test_unknown_method_and_absent_peer_have_errors_of_ours(channel: grpc.aio.Channel) -> None:
    assert isinstance(await error_of(channel.unary_unary(f"/{SERVICE}/None")(b"")), errors.Unsupported)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        async with open_channel(f"127.0.0.1:{taken.getsockname()[1]}") as nobody:
            error = await error_of(nobody.unary_unary(f"/{SERVICE}/UnaryUnary")(b""))
    assert isinstance(error, errors.Unavailable)
    assert error.retry_after == 1.0


async def test_calls_and_messages_are_bounded(channel: grpc.aio.Channel) -> None:
    big = await error_of(call(channel, "UnaryUnary", bytes(2 << 20)))
    assert isinstance(big, errors.Internal), "nothing is overloaded: the same message again would be as large"
    assert "2097152 vs. 1048576" in big.message
    calls = [asyncio.create_task(outcome_of(call(channel, "UnaryUnary", b"wait 0.5"))) for _ in range(30)]
    outcomes = await asyncio.gather(*calls)
    kinds = [type(outcome) for outcome in outcomes]
    assert set(kinds) == {list, errors.Overloaded}
    assert kinds.count(list) == 20
    assert await call(channel, "UnaryUnary", b"again") == [b"again"]


async def test_quiet_call_outlives_keepalive_pings(echo: Service) -> None:
    """With the option name that is often seen, the server ended such channels after four pings: "too many pings"."""
    async with open_channel(f"127.0.0.1:{echo.port}", keepalive=0.2, keepalive_timeout=5) as eager:
        assert await eager.unary_unary(f"/{SERVICE}/UnaryUnary")(b"wait 2") == b"wait 2"


async def test_a_peer_that_is_stopped_breaks_its_calls(starting: Service, tmp_path: Path) -> None:
    """It keeps its connections and answers nothing; without `ping_timeout_ms` a call waited for as long as it slept."""
    (tmp_path / "ready").touch()
    async with open_channel(f"127.0.0.1:{starting.port}", keepalive=1, keepalive_timeout=1) as eager:
        waiting = asyncio.create_task(error_of(eager.unary_unary(f"/{SERVICE}/UnaryUnary")(b"wait 30")))
        await soon(lambda: eager.get_state() is grpc.ChannelConnectivity.READY)
        starting.process.send_signal(signal.SIGSTOP)
        try:
            assert isinstance(await asyncio.wait_for(waiting, 20), errors.Unavailable)
        finally:
            starting.process.send_signal(signal.SIGCONT)


async def test_health_check_and_list_name_every_service(channel: grpc.aio.Channel) -> None:
    for name in ("", SERVICE):
        assert (await health(channel).Check(check(name))).status == SERVING
    assert isinstance(await error_of(health(channel).Check(check("other"))), errors.NotFound)
    watch = health(channel).Watch(check("other"))
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    watch.cancel()
    list_all = channel.unary_unary(
        "/grpc.health.v1.Health/List", health_list.Request.SerializeToString, health_list.Response.FromString
    )
    answer = await list_all(health_list.Request())
    assert {name: each.status for name, each in answer.statuses.items()} == {"": SERVING, SERVICE: SERVING}


async def test_reflection_and_channelz_are_on_the_admin_port_only(channel: grpc.aio.Channel, echo: Service) -> None:
    async def services(on: grpc.aio.Channel, version: str) -> Any:
        reflect = on.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            reflection_pb2.ServerReflectionRequest.SerializeToString,
            reflection_pb2.ServerReflectionResponse.FromString,
        )
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        (answer,) = [answer async for answer in reflect(iter([request]))]
        return answer.list_services_response.service

    async with open_channel(f"127.0.0.1:{echo.admin_port}") as admin:
        for version in ("v1", "v1alpha"):
            names = {service.name for service in await services(admin, version)}
            assert {SERVICE, "grpc.health.v1.Health"} < names
        channelz = channelz_pb2_grpc.ChannelzStub(admin)
        assert len((await channelz.GetServers(channelz_pb2.GetServersRequest())).server) == 2
        assert (await health(admin).Check(check())).status == SERVING
    public = channel.unary_unary("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")
    assert isinstance(await error_of(public(b"")), errors.Unsupported)


async def test_health_follows_the_checks_and_watchers_are_told(starting: Service, tmp_path: Path) -> None:
    port, admin = starting.bound()
    ready = tmp_path / "ready"
    async with open_channel(f"127.0.0.1:{port}") as channel:
        watch = health(channel).Watch(check(SERVICE), wait_for_ready=True)
        assert (await watch.read()).status == NOT_SERVING
        assert starting.lines == []
        for _ in range(2):
            ready.touch()
            assert (await watch.read()).status == SERVING
            ready.unlink()
            assert (await watch.read()).status == NOT_SERVING
        watch.cancel()
    assert starting.lines == [f"ready echo {port} admin={admin}"], "said once, at the first SERVING"
    assert "ready is missing" in starting.text


def test_a_start_that_takes_long_says_what_it_waits_for(starting: Service) -> None:
    starting.bound()
    eventually(lambda: 'event="not ready yet"' in starting.text, what="a reminder")
    (said,) = [line for line in starting.log if "not ready yet" in line]
    assert said.endswith('seconds=1 why="file: ready is missing"')


async def test_sigterm_lets_calls_in_flight_end_and_refuses_new_ones(starting: Service, tmp_path: Path) -> None:
    (tmp_path / "ready").touch()
    port = starting.port
    async with open_channel(f"127.0.0.1:{port}") as channel, open_channel(f"127.0.0.1:{port}") as other:
        watch = health(channel).Watch(check())
        assert (await watch.read()).status == SERVING
        running = asyncio.create_task(call(channel, "UnaryStream", b"wait 1"))
        await call(other, "UnaryUnary", b"x")
        began = time.monotonic()
        starting.process.send_signal(signal.SIGTERM)
        assert (await watch.read()).status == NOT_SERVING
        assert isinstance(await error_of(watch.read()), errors.Unavailable)
        await soon(lambda: "event=draining" in starting.text)
        assert isinstance(await error_of(call(other, "UnaryUnary", b"new")), errors.Unavailable)
        assert await running == [b"first", b"wait 1"]
    assert starting.wait() == 0
    assert time.monotonic() - began < 12, "it ends with its last call, not with its grace"


async def test_calls_longer_than_the_grace_are_ended(tmp_path: Path) -> None:
    (tmp_path / "ready").touch()
    service = Service("tests.echo_service", ready_file=tmp_path / "ready", grace=3)
    async with open_channel(f"127.0.0.1:{service.port}") as channel:
        running = asyncio.create_task(outcome_of(channel.unary_unary(f"/{SERVICE}/UnaryUnary")(b"wait 60")))
        await call(channel, "UnaryUnary", b"x")
        service.process.send_signal(signal.SIGTERM)
        assert isinstance(await running, errors.HedgerowError)
    assert service.wait() == 0


async def test_second_signal_ends_the_process_at_once(starting: Service, tmp_path: Path) -> None:
    (tmp_path / "ready").touch()
    async with open_channel(f"127.0.0.1:{starting.port}") as channel:
        running = asyncio.create_task(outcome_of(channel.unary_unary(f"/{SERVICE}/UnaryUnary")(b"wait 60")))
        await call(channel, "UnaryUnary", b"x")
        starting.process.send_signal(signal.SIGTERM)
        await soon(lambda: "event=draining" in starting.text)
        starting.process.send_signal(signal.SIGTERM)
        assert isinstance(await running, errors.Unavailable)
    assert starting.wait() == -signal.SIGTERM


def test_taken_port_ends_the_process_with_the_variable(echo: Service, tmp_path: Path) -> None:
    """With SO_REUSEPORT, gRPC's default, two processes would share the port and each get some of the calls."""
    service = Service("tests.echo_service", ready_file=tmp_path / "ready", listen=f"127.0.0.1:{echo.port}")
    assert service.wait() != 0
    assert "HEDGEROW_LISTEN" in service.text


async def test_liveness_is_an_answer_and_readiness_what_it_says(starting: Service, tmp_path: Path) -> None:
    """A probe that restarts must not end what loads, waits for a peer or drains (kserve#5062, odh-kserve#1161)."""
    address = f"127.0.0.1:{starting.bound()[0]}"
    async with open_channel(address) as channel:
        alive = await health(channel).Check(check("live"), timeout=5)
        ready = await health(channel).Check(check(), timeout=5)
    assert (alive.status, ready.status) == (SERVING, NOT_SERVING)
    assert (probe.main([address, "--live"]), probe.main([address])) == (0, 1)
    (tmp_path / "ready").touch()
    await soon(lambda: probe.main([address]) == 0)
    assert probe.main(["127.0.0.1:1", "--live", "--timeout", "1"]) == 1


@pytest.mark.parametrize("named", [False, True])
async def test_a_hangup_reads_files_again_and_ends_nothing(tmp_path: Path, *, named: bool) -> None:
    """By default the signal ends a process; `systemctl reload` sends it, also where there is no file."""
    limits, ready = tmp_path / "limits", tmp_path / "ready"
    ready.touch()
    limits.write_text("HEDGEROW_TRACE_RATIO=0.5\n")
    service = Service("tests.echo_service", ready_file=ready, grace=1, **({"limits_file": limits} if named else {}))
    try:
        async with open_channel(f"127.0.0.1:{service.port}") as channel:
            waiting = asyncio.create_task(call(channel, "UnaryUnary", b"wait 0.5"))
            assert await call(channel, "UnaryUnary", b"x") == [b"x"]
            service.process.send_signal(signal.SIGHUP)
            assert await waiting == [b"wait 0.5"]
            if named:
                await soon(lambda: "taken again" in service.text, what="an answer to SIGHUP")
            assert service.process.poll() is None
    finally:
        service.stop()
