"""Errors to statuses and back."""

from __future__ import annotations

from typing import ClassVar

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2, status_pb2

from hedgerow import errors
from hedgerow.rpc import status

SAMPLES: list[tuple[errors.HedgerowError, grpc.StatusCode]] = [
    (errors.InvalidRequest("top_p", 1.5, "in (0, 1]"), grpc.StatusCode.INVALID_ARGUMENT),
    (errors.NotFound("model", "x"), grpc.StatusCode.NOT_FOUND),
    (errors.SessionUnknown("s"), grpc.StatusCode.NOT_FOUND),
    (errors.SessionExpired("s"), grpc.StatusCode.NOT_FOUND),
    (errors.SessionDeleted("s"), grpc.StatusCode.NOT_FOUND),
    (errors.AlreadyExists("session", "s"), grpc.StatusCode.ALREADY_EXISTS),
    (errors.Unsupported("n", "not yet"), grpc.StatusCode.UNIMPLEMENTED),
    (errors.Overloaded("queue", 5, 4, 0.5), grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.Unavailable("redis", "gone", 0.25), grpc.StatusCode.UNAVAILABLE),
    (errors.Fenced("s", 1, 2), grpc.StatusCode.ABORTED),
    (errors.Cancelled("by the caller"), grpc.StatusCode.CANCELLED),
    (errors.DeadlineExceeded("late"), grpc.StatusCode.DEADLINE_EXCEEDED),
    (errors.LostSuffix("lost", metadata={"stored": "ab", "yours": "cd"}), grpc.StatusCode.DATA_LOSS),
    (errors.InvariantViolation("two tokens at 5"), grpc.StatusCode.INTERNAL),
    (errors.Internal("oops"), grpc.StatusCode.INTERNAL),
    (errors.KeyConflict("sampling.seed", "s"), grpc.StatusCode.ABORTED),
    (errors.SessionFailed("s"), grpc.StatusCode.FAILED_PRECONDITION),
    (errors.Unauthenticated("no API key"), grpc.StatusCode.UNAUTHENTICATED),
]


def rpc_error(
    code: grpc.StatusCode, details: str | None, trailers: tuple[tuple[str, bytes], ...] = ()
) -> grpc.aio.AioRpcError:
    metadata = grpc.aio.Metadata(*trailers)
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, details, None)


@pytest.mark.parametrize(("error", "code"), SAMPLES, ids=lambda value: getattr(value, "reason", None))
def test_error_comes_back_as_it_went(error: errors.HedgerowError, code: grpc.StatusCode) -> None:
    wire = status.to_wire(error)
    assert wire.code == code
    back = status.from_rpc_error(rpc_error(*wire))
    assert type(back) is type(error)
    assert vars(back) == vars(error) | ({"value": repr(error.value)} if hasattr(error, "value") else {})
    assert str(back) == str(error)


@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK])
def test_foreign_status_is_told_by_its_code(code: grpc.StatusCode) -> None:
    expected = next((kind for row, kind in status.TABLE if row is code), errors.Internal)
    for details in ("from elsewhere", None):
        error = status.from_rpc_error(rpc_error(code, details))
        assert type(error) is expected
        assert error.message == (details or code.name)


def test_details_carry_what_other_languages_look_for() -> None:
    details = {}
    for error in (SAMPLES[0][0], SAMPLES[1][0], SAMPLES[7][0]):
        for packed in status.to_status(error).details:
            details.setdefault(packed.type_url.rpartition(".")[2], packed)
    info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    retry, resource = error_details_pb2.RetryInfo(), error_details_pb2.ResourceInfo()
    for message in (info, bad, retry, resource):
        assert details[message.DESCRIPTOR.name].Unpack(message)
    assert (info.reason, info.domain) == ("INVALID_REQUEST", "hedgerow")
    assert (bad.field_violations[0].field, bad.field_violations[0].description) == ("top_p", "in (0, 1]")
    assert retry.retry_delay.ToMilliseconds() == 500
    assert (resource.resource_type, resource.resource_name) == ("model", "x")


def test_unknown_reason_falls_back_to_the_code_and_keeps_the_data() -> None:
    class QuotaUsedUp(errors.Overloaded):
        reason: ClassVar[str] = "QUOTA_USED_UP"

    back = status.from_rpc_error(rpc_error(*status.to_wire(QuotaUsedUp("quota", 9, 8, 3.0))))
    assert type(back) is errors.Overloaded
    assert (back.metadata["queued"], back.retry_after) == ("9", 3.0)


def test_reason_of_another_domain_is_not_ours() -> None:
    foreign = status_pb2.Status(code=grpc.StatusCode.UNAVAILABLE.value[0], message="m")
    foreign.details.add().Pack(error_details_pb2.ErrorInfo(reason="FENCED", domain="example.org"))
    assert type(status.from_status(foreign)) is errors.Unavailable


@pytest.mark.parametrize("junk", [b"\xff\xff\xff", status_pb2.Status(code=5).SerializeToString()])
def test_details_that_are_broken_or_contradict_the_code_are_ignored(junk: bytes) -> None:
    error = status.from_rpc_error(rpc_error(grpc.StatusCode.ABORTED, "m", ((status.DETAILS_KEY, junk),)))
    assert type(error) is errors.Fenced


def test_status_fits_into_a_header_however_long_the_error() -> None:
    long = errors.LostSuffix("x" * 100_000, metadata={"stored": "y" * 100_000, "yours": "z" * 100_000})
    wire = status.to_wire(long)
    assert len(wire.details) + len(wire.trailers[0][1]) < 4096
    assert type(status.from_rpc_error(rpc_error(*wire))) is errors.LostSuffix


def test_every_error_has_one_code_and_every_code_leads_to_one_error() -> None:
    kinds = [kind for _, kind in status.TABLE]
    assert len(kinds) == len(set(kinds))
    ours = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.HedgerowError)}
    assert ours - set(kinds) == {errors.HedgerowError}
    assert set(status.KIND_OF_CODE) == {code for code, _ in status.TABLE}


def test_call_that_broke_while_it_was_written_is_unavailable() -> None:
    """grpc.aio says INTERNAL where a write meets the end of its call; the peer's own status is lost."""
    error = status.from_rpc_error(rpc_error(grpc.StatusCode.INTERNAL, "Internal error from Core"))
    assert type(error) is errors.Unavailable
    assert error.retry_after == 1.0


def test_message_that_a_peer_does_not_take_is_no_overload() -> None:
    """gRPC says RESOURCE_EXHAUSTED, and callers were told to try again in a second."""
    text = "SERVER: Received message larger than max (5000005 vs. 4194304)"
    error = status.from_rpc_error(rpc_error(grpc.StatusCode.RESOURCE_EXHAUSTED, text))
    assert type(error) is errors.Internal
    assert error.retry_after is None
    busy = status.from_rpc_error(rpc_error(grpc.StatusCode.RESOURCE_EXHAUSTED, "Concurrent RPC limit exceeded!"))
    assert type(busy) is errors.Overloaded
