"""What a number on a command line may be. A bench that runs nothing must not look like one that found nothing."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

DAY = 86_400.0  # seconds


def whole_from(least: int) -> Callable[[str], int]:
    """For argparse: a whole number of at least `least`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be a whole number, not {text!r}") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, not {value}")
        return value

    return parse


def number(least: float, most: float = math.inf) -> Callable[[str], float]:
    """For argparse: a number between `least` and `most`; NaN is none."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be a number, not {text!r}") from None
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"must be in [{least:g}, {most:g}], not {text}")
        return value

    return parse
