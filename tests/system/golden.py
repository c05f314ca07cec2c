"""Writes the renders that test_chart.py compares with: `python -m tests.system.golden`, then read the difference."""

from tests.system.test_chart import GOLDEN, rendered
from tests.system.tools import VALUES

if __name__ == "__main__":
    for values in VALUES[1:]:
        (GOLDEN / f"{values}.yaml").write_text(rendered(values))
