"""What the SDK takes from the environment where an argument is not given."""

from __future__ import annotations

import os

API_KEY = "HEDGEROW_API_KEY"


def api_key(given: str | None) -> str:
    """As given; else the environment's; "": none."""
    return os.environ.get(API_KEY, "") if given is None else given
