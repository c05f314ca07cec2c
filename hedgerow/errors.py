"""The error taxonomy. No grpc here: `hedgerow.rpc.status` maps it to codes, once, in both directions.

HedgerowError
 +- InvalidRequest      a field's value is out of its limits                 never retry as it is
 +- NotFound            no such session or model                             never retry as it is
 |   +- SessionUnknown   no session of this id was ever here, or it is long gone
 |   +- SessionExpired   its retention is over
 |   +- SessionDeleted   somebody deleted it, or it is another one of the same id
 +- AlreadyExists       the id is taken                                      never retry as it is
 +- KeyConflict         the idempotency key belongs to another request       never retry as it is
 +- SessionFailed       the session has ended with an error                  never retry as it is
 +- Unsupported         a valid request that this version does not serve     never retry as it is
 +- Unauthenticated     no API key came with the call, or none that is known  never retry as it is
 +- Overloaded          a bounded queue is full                              retry after `retry_after`
 +- Unavailable         a peer or a resource is not there now                retry after `retry_after`
 +- Fenced              another owner holds the session                      resume, do not repeat
 +- Cancelled           the caller's wish
 +- DeadlineExceeded    the caller's deadline passed
 +- LostSuffix          the store's log and the client's differ              never retry
 +- InvariantViolation  a promise is broken: loud, never hidden              never retry
 +- Internal            a fault of this program
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar


class HedgerowError(Exception):
    """Base of everything that this project raises on purpose.

    `reason` is the UPPER_SNAKE_CASE name on the wire; `metadata` are the error's fields as text; `retry_after` is in
    seconds, None where a retry cannot help.
    """

    reason: ClassVar[str] = "INTERNAL"

    def __init__(
        self, message: str, *, metadata: Mapping[str, object] | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.metadata = {key: str(value) for key, value in (metadata or {}).items()}
        self.retry_after = retry_after


def printable(text: str) -> str:
    """A name from outside as a message shows it: what steers a terminal or breaks a line or a log is spelled out."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class InvalidRequest(HedgerowError):
    """`field` has the value `value`, which breaks `limit`."""

    reason = "INVALID_REQUEST"

    def __init__(self, field: str, value: object, limit: str) -> None:
        shown = repr(value) if len(repr(value)) <= 80 else repr(value)[:77] + "..."
        super().__init__(
            f"{field}: {shown} is not allowed: {limit}", metadata={"field": field, "value": shown, "limit": limit}
        )
        self.field, self.value, self.limit = field, value, limit


class NotFound(HedgerowError):
    """There is no `kind` named `name`."""

    reason = "NOT_FOUND"

    def __init__(self, kind: str, name: str) -> None:
        super().__init__(f"no {kind} {name!r}", metadata={"kind": kind, "name": name})


class SessionUnknown(NotFound):
    """No session of this id is known, nor a trace of one."""

    reason = "SESSION_UNKNOWN"

    def __init__(self, session_id: str) -> None:
        super().__init__("session", session_id)


class SessionExpired(NotFound):
    """The session's retention is over; its tombstone is still there."""

    reason = "SESSION_EXPIRED"

    def __init__(self, session_id: str) -> None:
        super().__init__("session", session_id)


class SessionDeleted(NotFound):
    """The session was deleted, or this id belongs to another session now."""

    reason = "SESSION_DELETED"

    def __init__(self, session_id: str) -> None:
        super().__init__("session", session_id)


class AlreadyExists(HedgerowError):
    """A `kind` named `name` is there already."""

    reason = "ALREADY_EXISTS"

    def __init__(self, kind: str, name: str) -> None:
        super().__init__(f"{kind} {name!r} exists", metadata={"kind": kind, "name": name})


class KeyConflict(HedgerowError):
    """The idempotency key belongs to a request whose `field` has another value."""

    reason = "IDEMPOTENCY_CONFLICT"

    def __init__(self, field: str, session_id: str) -> None:
        super().__init__(
            f"idempotency_key: session {session_id} was started under it with another {field}",
            metadata={"field": field, "session_id": session_id},
        )

    @property
    def field(self) -> str:
        """The field that differs, as the protos name it."""
        return self.metadata.get("field", "")


class SessionFailed(HedgerowError):
    """The session has ended with an error, which was told when it did."""

    reason = "SESSION_FAILED"

    def __init__(self, session_id: str) -> None:
        super().__init__(
            f"session {session_id} has ended with an error; start another, under another idempotency key",
            metadata={"session_id": session_id},
        )


class Unsupported(HedgerowError):
    """A request that is well formed but not served by this version."""

    reason = "UNSUPPORTED"

    def __init__(self, field: str, what: str) -> None:
        super().__init__(f"{field}: {what}", metadata={"field": field})


class Unauthenticated(HedgerowError):
    """Who calls is not known; `why` never repeats what the caller sent."""

    reason = "UNAUTHENTICATED"

    def __init__(self, why: str) -> None:
        super().__init__(why)


class Overloaded(HedgerowError):
    """A bounded queue is full."""

    reason = "OVERLOADED"

    def __init__(self, what: str, queued: int, limit: int, retry_after: float) -> None:
        super().__init__(
            f"{what} is full: {queued} of {limit}",
            metadata={"what": what, "queued": queued, "limit": limit},
            retry_after=retry_after,
        )


class Unavailable(HedgerowError):
    """A peer or a resource is not there now."""

    reason = "UNAVAILABLE"

    def __init__(self, what: str, why: str, retry_after: float = 1.0) -> None:
        super().__init__(f"{what} is unavailable: {why}", metadata={"what": what}, retry_after=retry_after)


class Fenced(HedgerowError):
    """Another owner holds the session."""

    reason = "FENCED"

    def __init__(self, session_id: str, epoch: int, held: int) -> None:
        super().__init__(
            f"session {session_id}: epoch {epoch} is fenced by epoch {held}",
            metadata={"session_id": session_id, "epoch": epoch, "held": held},
            retry_after=0.1,
        )


class Cancelled(HedgerowError):
    """The caller's wish."""

    reason = "CANCELLED"


class DeadlineExceeded(HedgerowError):
    """The caller's deadline passed."""

    reason = "DEADLINE_EXCEEDED"


class LostSuffix(HedgerowError):
    """The store's log does not contain what the client was given."""

    reason = "LOST_SUFFIX"


class InvariantViolation(HedgerowError):
    """A promise is broken. Ends the session loudly."""

    reason = "INVARIANT_VIOLATION"


class Internal(HedgerowError):
    """A fault of this program."""

    reason = "INTERNAL"
