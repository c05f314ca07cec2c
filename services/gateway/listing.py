"""The sessions that run here, page by page: numbers about them, none of their text."""

from __future__ import annotations

from collections.abc import Mapping
from heapq import nsmallest

from hedgerow.errors import InvalidRequest
from services.gateway.limits import KEY_BYTES, check_bytes
from services.gateway.session import Session

MOST, USUAL = 1000, 100
"""Sessions of one page."""


def most(limit: int) -> int:
    """Sessions of a page for which `limit` was asked. Raises InvalidRequest."""
    if limit > MOST:
        raise InvalidRequest("limit", limit, f"in [0, {MOST}]")
    return limit or USUAL


def page(sessions: Mapping[str, Session], tenant: str, limit: int, cursor: str) -> tuple[list[Session], str]:
    """At most `limit` (0: USUAL) of the tenant's sessions, by id, behind `cursor`; and the next cursor, "" at the end.

    Each that runs from the first page to the last is in one of them, and in one only. Raises InvalidRequest.
    """
    wanted = most(limit)
    check_bytes("cursor", cursor, KEY_BYTES)
    behind = (name for name, each in sessions.items() if name > cursor and each.record.tenant == tenant)
    found = nsmallest(wanted + 1, behind)
    return [sessions[name] for name in found[:wanted]], found[wanted - 1] if len(found) > wanted else ""
