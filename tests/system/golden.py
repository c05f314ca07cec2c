"""Writes the renders that test_chart.py compares with: `python -m tests.system.golden`, then read the difference."""

from tests.system.test_chart import GOLDEN
from tests.system.tools import VALUES, chosen, template

if __name__ == "__main__":
    for values in VALUES[1:]:
        done = template(*chosen(values))
        assert done.returncode == 0, done.stderr
        (GOLDEN / f"{values}.yaml").write_text(done.stdout)
