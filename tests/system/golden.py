"""Writes the renders that test_chart.py compares with: `make golden`, then read the difference.

Of the chart's defaults there is what they change in the laptop's render: the whole would be that one again.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from tests.system.tools import VALUES, chosen, template

FOLDER = Path(__file__).parent / "golden"
LAPTOP = "values-laptop"


def rendered(values: str) -> str:
    """The chart's text, without the certificates that it makes anew each time."""
    done = template(*chosen(values))
    assert done.returncode == 0, done.stderr
    return re.sub(r"^(  (?:tls\.crt|tls\.key|ca\.crt): ).+$", r"\1made", done.stdout, flags=re.M)


def golden(values: str) -> tuple[Path, str]:
    """Where the reviewed text of a file of values is, and what it would be now."""
    now = rendered(values)
    if values != "values":
        return FOLDER / f"{values}.yaml", now
    return FOLDER / "values.diff", difference(rendered(LAPTOP), now, LAPTOP, values)


def difference(before: str, after: str, name: str, other: str) -> str:
    """A unified diff; empty where they are the same."""
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), name, other, lineterm="", n=1)
    return "".join(f"{line}\n" for line in lines)


if __name__ == "__main__":
    for values in VALUES:
        path, text = golden(values)
        path.write_text(text)
