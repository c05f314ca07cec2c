"""google.rpc.Status details to the error taxonomy. The server's table is in hedgerow.rpc.status, which is not here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]  # its stubs shadow it

from hedgerow import errors
from hedgerow.errors import HedgerowError

DOMAIN, DETAILS_KEY = "hedgerow", "grpc-status-details-bin"
# How gRPC tells of a connection or a server that went away in the middle of a call, where it does not say UNAVAILABLE.
BROKEN = re.compile(r"RST_STREAM|GOAWAY|Stream removed|Socket closed|Connection reset|Broken pipe", re.IGNORECASE)
BROKEN_CODES = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
NOT_CONNECTED = re.compile(r"failed to connect|errors resolving", re.IGNORECASE)
TOO_LARGE = re.compile(r"message larger than max \((\d+) vs\. (\d+)\)")


def _family(kind: type[HedgerowError]) -> Iterator[type[HedgerowError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _family(child)


# Of the taxonomy alone: a program may hold classes of its own below it, with the reason of their base.
REASONS = {kind.reason: kind for kind in _family(HedgerowError) if kind.__module__ == errors.__name__}
CODES: Mapping[grpc.StatusCode, type[HedgerowError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidRequest,
    grpc.StatusCode.NOT_FOUND: errors.NotFound,
    grpc.StatusCode.ALREADY_EXISTS: errors.AlreadyExists,
    grpc.StatusCode.UNIMPLEMENTED: errors.Unsupported,
    grpc.StatusCode.UNAUTHENTICATED: errors.Unauthenticated,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.Overloaded,
    grpc.StatusCode.ABORTED: errors.Fenced,
    grpc.StatusCode.CANCELLED: errors.Cancelled,
    grpc.StatusCode.FAILED_PRECONDITION: errors.SessionFailed,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
    grpc.StatusCode.DATA_LOSS: errors.LostSuffix,
}


def decode(error: grpc.aio.AioRpcError, address: str, within: float | None = None) -> HedgerowError:
    """The error that the gateway at `address` sent; where none came from it, what the code says. Never raises.

    `within`: the call's own limit in seconds, which gRPC does not name when it is over.
    An error without `metadata["reason"]` was not sent by a gateway: its outcome is unknown, unless `never_sent` says
    that there was no connection.
    """
    status = _status(error)
    if status is None:
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and within is not None:
            return errors.DeadlineExceeded(f"no end within {within:.3g} s", metadata={"timeout": within})
        return _unsent(error, address)
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    retry_after = None
    for detail in status.details:
        if not detail.Unpack(info) and detail.Unpack(retry):
            retry_after = retry.retry_delay.ToNanoseconds() / 1e9
    kind = REASONS.get(info.reason) or CODES.get(error.code(), errors.Internal)
    return _build(kind, status.message, {**info.metadata, "reason": info.reason}, retry_after)


def never_sent(error: HedgerowError) -> bool:
    """Whether there was no connection over which the call could have been sent."""
    return error.metadata.get("connected") == "no"


def _status(error: grpc.aio.AioRpcError) -> status_pb2.Status | None:
    trailers = cast("Iterable[tuple[str, str | bytes]]", error.trailing_metadata() or ())
    for key, value in trailers:
        if key == DETAILS_KEY and isinstance(value, bytes):
            try:
                return status_pb2.Status.FromString(value)
            except DecodeError:
                return None
    return None


def _unsent(error: grpc.aio.AioRpcError, address: str) -> HedgerowError:
    text = error.details() or error.code().name
    if (larger := TOO_LARGE.search(text)) is not None:  # for gRPC an exhausted resource, but it will never fit
        if "CLIENT: Received" in text:
            return errors.Unsupported("answer", f"its {larger[1]} bytes are more than the {larger[2]} of this client")
        return errors.InvalidRequest("request", f"{larger[1]} bytes", f"at most {larger[2]} bytes")
    # A call that this side cancelled raises no status: CANCELLED is a server that is being stopped.
    away = error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    if away or (error.code() in BROKEN_CODES and BROKEN.search(text)):
        gone = errors.Unavailable(f"gateway at {address}", text, retry_after=0.0)
        if NOT_CONNECTED.search(text):
            gone.metadata["connected"] = "no"
        return gone
    return _build(CODES.get(error.code(), errors.Internal), text, {}, None)


def _build(
    kind: type[HedgerowError], text: str, metadata: Mapping[str, str], retry_after: float | None
) -> HedgerowError:
    error = kind.__new__(kind)  # the classes' own constructors make up messages; this one came over the wire
    HedgerowError.__init__(error, text, metadata=metadata, retry_after=retry_after)
    if isinstance(error, errors.InvalidRequest):
        error.field, error.value = metadata.get("field", ""), metadata.get("value", "")
        error.limit = metadata.get("limit", "")
    return error


def is_gone(error: HedgerowError) -> bool:
    """Whether the store has nothing of the session, not even that it once was: it has lost it."""
    lost = isinstance(error, errors.LostSuffix) and error.metadata.get("stored_digest") == ""
    return lost or isinstance(error, errors.SessionUnknown)
