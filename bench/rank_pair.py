"""Runs bench.rank_step once a rank, on a GPU each, and keeps the slower one's times."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WITHIN = 500.0  # seconds


def pair(count: int, arguments: Sequence[str], out: Path) -> int:
    """The exit status. Every rank prints; the first one's lines are shown, of the others what went wrong."""
    with tempfile.TemporaryDirectory() as aside:
        outs = [Path(aside, f"{rank}.json") for rank in range(count)]
        ranks = [
            subprocess.Popen(
                [
                    sys.executable, "-m", "bench.rank_step", *arguments, "--rank", str(rank), "--meeting",
                    str(Path(aside, "meeting")), "--out", str(outs[rank]),
                ],
                stdout=None if rank == 0 else subprocess.DEVNULL,
            )
            for rank in range(count)
        ]  # fmt: skip
        try:
            failed = sum(rank.wait(WITHIN) != 0 for rank in ranks) > 0
        finally:
            for rank in ranks:
                rank.kill()
        if failed:
            return 1
        out.write_text(json.dumps(slower([json.loads(file.read_text()) for file in outs]), indent=1) + "\n")
    return 0


def slower(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The first report, with the cells of whichever took longer, and whether all were as fast as their bars."""
    cells = [max(each, key=lambda cell: float(cell["ms"])) for each in zip(*(r["cells"] for r in reports), strict=True)]
    return reports[0] | {"cells": cells}
