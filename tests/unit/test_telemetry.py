"""Metrics by name, with labels that nobody outside decides."""

from __future__ import annotations

import asyncio
import time

import pytest

from hedgerow.rpc import telemetry
from hedgerow.rpc.config import ConfigError
from hedgerow.rpc.exposition import CONNECTIONS, Exposition

# Metrics


def test_a_metric_is_made_once_and_only_under_a_name_of_the_house() -> None:
    made = telemetry.counter("hedgerow_test_made", "Made.")
    assert telemetry.counter("hedgerow_test_made", "Made.") is made
    with pytest.raises(AssertionError, match="is a Counter"):
        telemetry.gauge("hedgerow_test_made", "Made.")
    for name in ("made", "hedgerow_test", "hedgerow_Test_made", "hedgerow_test_made-up"):
        with pytest.raises(AssertionError, match="is not hedgerow_"):
            telemetry.counter(name, "Not made.")


def test_every_series_is_there_at_zero_and_an_unknown_value_is_other() -> None:
    """A label value from outside would make a series each: memory of this process and of Prometheus."""
    made = telemetry.counter("hedgerow_test_labels", "Labels.", {"status": ("ok", "gap"), "kind": ("a",)})
    assert telemetry.value("hedgerow_test_labels_total", status="gap", kind="a") == 0
    for n in range(1000):
        made.add(1, f"client-{n}", "a")
    made.add(2, "ok", "a")
    assert telemetry.value("hedgerow_test_labels_total", status="other", kind="a") == 1000
    assert telemetry.value("hedgerow_test_labels_total", status="ok", kind="a") == 2
    with pytest.raises(AssertionError, match="series"):
        telemetry.counter("hedgerow_test_many", "Many.", {"a": [str(n) for n in range(300)]})


def test_a_tally_is_a_histogram_of_whole_numbers() -> None:
    tally = telemetry.tally("hedgerow_test_tally", "Tally.", 3)
    for number in (0, 1, 1, 2, 3, 7):
        tally.count(number)
    buckets = [telemetry.value("hedgerow_test_tally_bucket", le=le) for le in ("0.0", "1.0", "2.0", "+Inf")]
    assert buckets == [1, 3, 4, 6]
    assert telemetry.value("hedgerow_test_tally_sum") == 14
    assert telemetry.value("hedgerow_test_tally_count") == 6


def test_numbers_that_others_keep_are_read_when_somebody_looks() -> None:
    kept, by = [0], {"x": 1.0}
    telemetry.watch("hedgerow_test_kept", "Kept.", lambda: kept[0])
    telemetry.watch("hedgerow_test_by", "By.", lambda: by, "why", goes_down=True)
    telemetry.watch("hedgerow_test_broken", "Broken.", lambda: 1 / 0)
    kept[0], by["y"] = 5, 2.0
    assert telemetry.value("hedgerow_test_kept_total") == 5
    assert (telemetry.value("hedgerow_test_by", why="x"), telemetry.value("hedgerow_test_by", why="y")) == (1, 2)
    telemetry.watch("hedgerow_test_kept", "Kept.", lambda: 7)
    assert telemetry.value("hedgerow_test_kept_total") == 7


def test_counting_is_cheap() -> None:
    """A verifier's step counts about thirty times, and a step is a millisecond."""
    counter, tally = telemetry.counter("hedgerow_test_cheap", "Cheap."), telemetry.tally("hedgerow_test_cheapt", "C", 9)
    histogram = telemetry.histogram("hedgerow_test_cheaph", "Cheap.")
    best = 1.0
    for _ in range(5):
        begun = time.perf_counter()
        for _ in range(1000):
            counter.add(3)
            histogram.observe(0.01)
            tally.count(4)
        best = min(best, (time.perf_counter() - begun) / 1000)
    assert best < 10e-6, f"{best * 1e6:.1f} us for three"


# The endpoint


async def asked(port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    answer = await reader.read()
    writer.close()
    return answer


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        (b"GET /metrics HTTP/1.1", b"200"),
        (b"GET /metrics?x=1 HTTP/1.0", b"200"),
        (b"GET / HTTP/1.1", b"404"),
        (b"POST /metrics HTTP/1.1", b"405"),
        (b"nonsense", b"400"),
        (b"GET /metrics SMTP", b"400"),
    ],
)
async def test_the_endpoint_answers_one_thing_only(request_line: bytes, status: bytes) -> None:
    telemetry.counter("hedgerow_test_seen", "Seen.").add(3)
    endpoint = Exposition()
    await endpoint.start("127.0.0.1:0")
    answer = await asked(endpoint.port, request_line + b"\r\nHost: x\r\n\r\n")
    assert answer.split()[1] == status
    assert (b"\nhedgerow_test_seen_total " in answer) == (status == b"200")
    await endpoint.stop()


async def test_openmetrics_is_served_to_whoever_asks_for_it() -> None:
    endpoint = Exposition()
    await endpoint.start("127.0.0.1:0")
    answer = await asked(
        endpoint.port, b"GET /metrics HTTP/1.1\r\nAccept: application/openmetrics-text; version=1.0.0\r\n\r\n"
    )
    assert b"application/openmetrics-text" in answer
    assert answer.endswith(b"# EOF\n")
    await endpoint.stop()


async def test_a_request_is_bounded_in_size_number_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hedgerow.rpc.exposition.SECONDS", 0.2)
    endpoint = Exposition()
    await endpoint.start("127.0.0.1:0")
    assert await asked(endpoint.port, b"GET /metrics HTTP/1.1\r\n" + b"X: y\r\n" * 5000 + b"\r\n") == b""
    silent = [await asyncio.open_connection("127.0.0.1", endpoint.port) for _ in range(CONNECTIONS + 1)]
    assert [await asyncio.wait_for(reader.read(), 5) for reader, _ in silent] == [b""] * len(silent)
    for _, writer in silent:
        writer.close()
    assert (await asked(endpoint.port, b"GET /metrics HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 200 OK")
    await endpoint.stop()


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1:x", "127.0.0.1:99999", "256.0.0.1:0"])
async def test_an_address_that_cannot_be_stops_the_start_with_its_variable(address: str) -> None:
    with pytest.raises(ConfigError) as refused:
        await Exposition().start(address)
    assert refused.value.variable == "HEDGEROW_METRICS_ADDRESS"
