"""Lists of running sessions: whose they are, and pages."""

from __future__ import annotations

import secrets
from types import SimpleNamespace
from typing import Any

import pytest

from hedgerow.errors import InvalidRequest
from services.gateway.listing import page


def sessions(count: int, tenant: str = "t") -> dict[str, Any]:
    names = [secrets.token_hex(8) for _ in range(count)]
    return {name: SimpleNamespace(id=name, record=SimpleNamespace(tenant=tenant)) for name in names}


def test_pages_hold_each_session_once_and_no_other_tenants() -> None:
    mine, others = sessions(25), sessions(25, "u")
    cursor, found, pages = "", [], 0
    while pages == 0 or cursor:
        some, cursor = page(mine | others, "t", 10, cursor)
        found += [each.id for each in some]
        pages += 1
    assert found == sorted(mine)
    assert pages == 3
    assert page(others, "t", 10, "") == ([], "")


def test_a_full_last_page_is_the_last() -> None:
    assert page(sessions(10), "t", 10, "")[1] == ""


def test_limits_are_named() -> None:
    with pytest.raises(InvalidRequest, match=r"limit: 1001 is not allowed: in \[0, 1000\]"):
        page({}, "", 1001, "")
    with pytest.raises(InvalidRequest, match="cursor"):
        page({}, "", 1, "x" * 10_000)
