"""What Redis's replies mean: an error of Redis or of a script as one of ours."""

from __future__ import annotations

from typing import Any

from redis.exceptions import ResponseError

from hedgerow import errors
from hedgerow.rpc.logs import get_log
from services.kvstore.records import State, Status
from services.kvstore.runner import RETRY_AFTER

log = get_log(__name__)

# Error words of a Redis that cannot take writes now: a replica, a full disk or memory, a cluster without its primary.
PASSING = ("READONLY", "MISCONF", "OOM", "NOREPLICAS", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "LOADING", "BUSY")


def sound(reply: Any) -> Any:
    """The reply, where Redis answered, and not with an error."""
    if isinstance(reply, errors.HedgerowError):
        raise reply
    if isinstance(reply, ResponseError):
        raise refused("command", reply) from reply
    return reply


def refused(what: str, error: ResponseError) -> errors.HedgerowError:
    """Redis answered, with an error: of its state, of its data's version, or of ours."""
    text = str(error)
    if any(word in text for word in PASSING):
        return errors.Unavailable("redis", text, RETRY_AFTER)
    if is_newer(error):
        return errors.Unsupported("store", f"its data was written by another version: {text}")
    log.error("redis refused", what=what, why=text)
    return errors.Internal(f"the store refused {what}")


def is_newer(reply: Any) -> bool:
    """Whether a script found data of another version, and left it alone."""
    return isinstance(reply, ResponseError) and str(reply).startswith("FORMAT")


def refusal(session_id: str, status: Status, state: State, epoch: int = 0) -> errors.HedgerowError:
    """What a status other than OK means to the caller of a unary method."""
    if status == Status.EXPIRED:
        return errors.SessionExpired(session_id)
    if status in (Status.DELETED, Status.GONE):
        return errors.SessionDeleted(session_id)
    if status == Status.UNKNOWN or (status == Status.FORGOTTEN and state.epoch == 0):
        return errors.SessionUnknown(session_id)
    assert status in (Status.FENCED, Status.FORGOTTEN, Status.RACED), status
    return errors.Fenced(session_id, epoch, state.epoch)


def parse_info(raw: bytes) -> dict[str, str]:
    """The reply of INFO as fields."""
    pairs = (line.partition(":") for line in raw.decode().splitlines() if ":" in line)
    return {name: value for name, _, value in pairs}
