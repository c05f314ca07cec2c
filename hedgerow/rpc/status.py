"""Errors <-> google.rpc.Status: the one table, both directions.

On the wire an error is a gRPC code, a message, and in `grpc-status-details-bin`: `ErrorInfo` (reason, domain
"hedgerow", metadata), `RetryInfo` where a retry can help, `BadRequest.field_violations` for input, `ResourceInfo` for
what was not found.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, cast

import grpc
import grpc.aio
from google.protobuf import any_pb2, message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from hedgerow import errors
from hedgerow.errors import HedgerowError
from hedgerow.rpc import tls

DOMAIN = "hedgerow"
DETAILS_KEY = "grpc-status-details-bin"
# Trailers share a header budget of 8 KiB at many proxies, so what a message may carry is bounded.
MESSAGE_LIMIT, VALUE_LIMIT = 1024, 256
# What grpc.aio says, with the code INTERNAL, of a call that ended while a message was being written to it.
WRITE_MET_END = "Internal error from Core"
TOO_LARGE = "message larger than max"

# First row of a code is what a bare code means when its sender was not ours.
TABLE: tuple[tuple[grpc.StatusCode, type[HedgerowError]], ...] = (
    (grpc.StatusCode.INVALID_ARGUMENT, errors.InvalidRequest),
    (grpc.StatusCode.NOT_FOUND, errors.NotFound),
    (grpc.StatusCode.NOT_FOUND, errors.SessionUnknown),
    (grpc.StatusCode.NOT_FOUND, errors.SessionExpired),
    (grpc.StatusCode.NOT_FOUND, errors.SessionDeleted),
    (grpc.StatusCode.ALREADY_EXISTS, errors.AlreadyExists),
    (grpc.StatusCode.UNIMPLEMENTED, errors.Unsupported),
    (grpc.StatusCode.UNAUTHENTICATED, errors.Unauthenticated),
    (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.Overloaded),
    (grpc.StatusCode.UNAVAILABLE, errors.Unavailable),
    (grpc.StatusCode.ABORTED, errors.Fenced),
    (grpc.StatusCode.ABORTED, errors.KeyConflict),
    (grpc.StatusCode.FAILED_PRECONDITION, errors.SessionFailed),
    (grpc.StatusCode.CANCELLED, errors.Cancelled),
    (grpc.StatusCode.DEADLINE_EXCEEDED, errors.DeadlineExceeded),
    (grpc.StatusCode.DATA_LOSS, errors.LostSuffix),
    (grpc.StatusCode.INTERNAL, errors.Internal),
    (grpc.StatusCode.INTERNAL, errors.InvariantViolation),
)
CODE_OF = {kind: code for code, kind in TABLE}
KIND_OF_CODE = dict(reversed(TABLE))
KIND_OF_REASON = {kind.reason: kind for _, kind in TABLE}


class Wire(NamedTuple):
    """What `ServicerContext.abort` takes."""

    code: grpc.StatusCode
    details: str
    trailers: tuple[tuple[str, bytes], ...]


def code_of(error: HedgerowError) -> grpc.StatusCode:
    """The gRPC code of an error; a class without a row of its own has its base's."""
    return next((CODE_OF[kind] for kind in type(error).__mro__ if kind in CODE_OF), grpc.StatusCode.INTERNAL)


def to_status(error: HedgerowError) -> status_pb2.Status:
    """The error with all its details."""
    metadata = {key: value[:VALUE_LIMIT] for key, value in error.metadata.items()}
    details: list[message.Message] = [
        error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata)
    ]
    if error.retry_after is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(int(error.retry_after * 1e9))
        details.append(retry)
    if isinstance(error, errors.InvalidRequest):
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=error.limit)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, errors.NotFound):
        kind, name = metadata.get("kind", ""), metadata.get("name", "")
        details.append(error_details_pb2.ResourceInfo(resource_type=kind, resource_name=name))
    status = status_pb2.Status(code=code_of(error).value[0], message=error.message[:MESSAGE_LIMIT])
    for detail in details:
        status.details.add().Pack(detail)
    return status


def to_wire(error: HedgerowError) -> Wire:
    """The arguments of `ServicerContext.abort`."""
    status = to_status(error)
    return Wire(code_of(error), status.message, ((DETAILS_KEY, status.SerializeToString()),))


def from_status(status: status_pb2.Status) -> HedgerowError:
    """The error that `to_status` wrote. An unknown reason gives the class of the code, with the sender's metadata."""
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    retry_after = None
    for detail in status.details:
        if not _unpack(detail, info) and _unpack(detail, retry):
            retry_after = retry.retry_delay.ToNanoseconds() / 1e9
    kind = KIND_OF_REASON.get(info.reason) if info.domain == DOMAIN else None
    return _build(kind or _kind_of_number(status.code), status.message, dict(info.metadata), retry_after)


def from_rpc_error(error: grpc.aio.AioRpcError) -> HedgerowError:
    """What a call to a peer raised, as an error of ours. Never raises.

    A peer that is not there, whose connection broke or whose answer carries no details, is told by the code alone.
    """
    trailers = cast("Iterable[tuple[str, str | bytes]]", error.trailing_metadata() or ())
    for key, value in trailers:
        if key == DETAILS_KEY and isinstance(value, bytes):
            try:
                status = status_pb2.Status.FromString(value)
            except message.DecodeError:
                break
            if status.code == error.code().value[0]:
                return from_status(status)
    kind = KIND_OF_CODE.get(error.code(), errors.Internal)
    if error.details() == WRITE_MET_END:
        kind = errors.Unavailable
    if TOO_LARGE in (error.details() or ""):  # no overload: it will not fit later either
        kind = errors.Internal
    retry_after = 1.0 if issubclass(kind, errors.Unavailable | errors.Overloaded) else None
    text = error.details() or error.code().name
    return _build(kind, tls.explained(text) if kind is errors.Unavailable else text, {}, retry_after)


def _unpack(detail: any_pb2.Any, into: message.Message) -> bool:
    try:
        return detail.Unpack(into)
    except message.DecodeError:
        return False


def _kind_of_number(number: int) -> type[HedgerowError]:
    return next((kind for code, kind in TABLE if code.value[0] == number), errors.Internal)


def _build(
    kind: type[HedgerowError], text: str, metadata: Mapping[str, str], retry_after: float | None
) -> HedgerowError:
    error = kind.__new__(kind)  # the classes' own constructors make up messages; this one came over the wire
    HedgerowError.__init__(error, text, metadata=metadata, retry_after=retry_after)
    if isinstance(error, errors.InvalidRequest):
        error.field, error.value = metadata.get("field", ""), metadata.get("value", "")
        error.limit = metadata.get("limit", "")
    return error
