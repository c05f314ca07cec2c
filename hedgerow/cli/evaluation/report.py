"""What an evaluation found, as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hedgerow.cli.evaluation.run import Outcome, Row

ONE_LINE = 90  # characters of a failure's detail


def as_json(rows: Sequence[Row], about: dict[str, Any]) -> dict[str, Any]:
    """One object; `about` says what was asked and how."""
    ways = list(rows[0].outcomes) if rows else []
    return {
        **about,
        "pass_at_1": {way: passed(rows, way) / len(rows) for way in ways},
        "passed": {way: passed(rows, way) for way in ways},
        "tasks_asked": len(rows),
        "same_text": same(rows),
        "tasks": [
            {"task": row.task, "same": row.same, **{way: _outcome(outcome) for way, outcome in row.outcomes.items()}}
            for row in rows
        ],
    }


def as_text(rows: Sequence[Row], about: dict[str, Any]) -> str:
    """A line a task, then the sums. What an answer says of itself steers no terminal."""
    lines = [f"{name}: {value}" for name, value in about.items()] + [""]
    for row in rows:
        cells = [f"{way} {_cell(outcome)}" for way, outcome in row.outcomes.items()]
        mark = {True: "same text", False: "DIFFERENT TEXT", None: ""}[row.same]
        lines.append(f"{row.task:18} {'   '.join(cells)}   {mark}".rstrip())
        lines += [f"{'':18} {way}: {_reason(o)}" for way, o in row.outcomes.items() if not o.passed]
    lines.append("")
    for way in rows[0].outcomes if rows else ():
        lines.append(f"pass@1 {way}: {passed(rows, way)} of {len(rows)} ({passed(rows, way) / len(rows):.3f})")
    counted = same(rows)
    if counted is not None:
        lines.append(f"same text with trees and plain: {counted['same']} of {counted['compared']}")
    return "\n".join("".join(c if c.isprintable() else "\ufffd" for c in line) for line in lines)


def passed(rows: Sequence[Row], way: str) -> int:
    """How many tasks were solved."""
    return sum(row.outcomes[way].passed for row in rows)


def same(rows: Sequence[Row]) -> dict[str, int] | None:
    """Of how many tasks both answers were compared and equal; None where there was one way only."""
    if not rows or len(rows[0].outcomes) < 2:
        return None
    compared = [row.same for row in rows if row.same is not None]
    return {"compared": len(compared), "same": sum(compared)}


def unanswered(rows: Sequence[Row]) -> int:
    """How many questions got no answer at all."""
    return sum(outcome.answer is None for row in rows for outcome in row.outcomes.values())


def _outcome(outcome: Outcome) -> dict[str, Any]:
    answer = outcome.answer
    return {
        "passed": outcome.passed,
        "failure": outcome.failure,
        "detail": outcome.detail,
        "seconds": round(outcome.seconds, 3),
        "finish_reason": answer.finish_reason if answer else None,
        "tokens": answer.tokens if answer else None,
        "text": answer.text if answer else None,
    }


def _cell(outcome: Outcome) -> str:
    return "passed" if outcome.passed else f"failed ({outcome.failure})"


def _reason(outcome: Outcome) -> str:
    said = " ".join(outcome.detail.split())
    return said if len(said) <= ONE_LINE else said[:ONE_LINE] + "..."
