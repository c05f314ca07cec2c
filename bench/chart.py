"""A line chart as a small SVG: axes with round numbers, one line a series, its name at its end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 360, 56, 120, 34, 44
COLOURS = ("#1b7837", "#762a83", "#e08214", "#2166ac", "#b2182b", "#4d4d4d")


class Line(NamedTuple):
    name: str
    points: Sequence[tuple[float, float]]
    marked: int | None = None  # index of a point that has a dot


def ticks(most: float, about: int = 5) -> list[float]:
    """Round numbers from 0 to past `most`."""
    raw = most / about
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= raw)
    return [step * n for n in range(math.ceil(most / step) + 1)]


def chart(title: str, x_name: str, y_name: str, lines: Sequence[Line]) -> str:
    """Both axes begin at 0."""
    xs = ticks(max(x for line in lines for x, _ in line.points))
    ys = ticks(max(y for line in lines for _, y in line.points))
    wide, high = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def at(x: float, y: float) -> tuple[float, float]:
        return round(LEFT + wide * x / xs[-1], 1), round(TOP + high * (1 - y / ys[-1]), 1)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="11" fill="#333">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text x="{LEFT}" y="18" font-size="13">{escape(title)}</text>',
        f'<text x="{LEFT + wide / 2}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_name)}</text>',
        f'<text x="14" y="{TOP + high / 2}" text-anchor="middle" transform="rotate(-90 14 {TOP + high / 2})">'
        f"{escape(y_name)}</text>",
    ]
    for y in ys:
        left, level = at(0, y)
        out.append(f'<path d="M{left} {level}H{LEFT + wide}" stroke="#ddd"/>')
        out.append(f'<text x="{left - 6}" y="{level + 4}" text-anchor="end">{y:g}</text>')
    for x in xs:
        place, bottom = at(x, 0)
        out.append(f'<text x="{place}" y="{bottom + 16}" text-anchor="middle">{x:g}</text>')
    for n, line in enumerate(lines):
        colour, points = COLOURS[n % len(COLOURS)], [at(*point) for point in line.points]
        path = "L".join(f"{x} {y}" for x, y in points)
        out.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        if line.marked is not None:
            x, y = points[line.marked]
            out.append(f'<circle cx="{x}" cy="{y}" r="4" fill="{colour}"/>')
        x, y = points[-1]
        out.append(f'<text x="{x + 6}" y="{y + 4}" fill="{colour}">{escape(line.name)}</text>')
    return "\n".join([*out, "</svg>\n"])
