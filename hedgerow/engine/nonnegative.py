"""Terms that times are made of: a least squares fit in which none is negative, so that more never takes less."""

from __future__ import annotations

import numpy as np

PULL = 1e-6  # to zero, of a column's length: columns that never differed share what they explain together


def nonnegative(table: np.ndarray, goal: np.ndarray) -> np.ndarray:
    """x [terms] >= 0 with the least |table x - goal|^2; table [steps, terms].

    By active sets of the normal equations (Lawson and Hanson, Solving Least Squares Problems, 1974, chapter 23).
    """
    length = np.sqrt((table**2).sum(0)) + 1e-12
    scaled = table / length
    gram, wanted = scaled.T @ scaled + PULL * np.eye(len(length)), scaled.T @ goal
    found, kept = np.zeros(len(length)), np.zeros(len(length), dtype=bool)
    for _ in range(3 * len(length)):
        slope = np.where(kept, 0.0, wanted - gram @ found)
        if slope.max() <= 1e-9 * (abs(wanted).max() + 1e-12):
            break
        kept[slope.argmax()] = True
        found = _within(gram, wanted, found, kept)
    return np.asarray(found / length)


def _within(gram: np.ndarray, wanted: np.ndarray, found: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """The best of the terms that are kept, of which those leave that would be negative."""
    while kept.any():
        some = np.flatnonzero(kept)
        best = np.zeros_like(found)
        best[some] = np.linalg.solve(gram[np.ix_(some, some)], wanted[some])
        if best[some].min() > 0:
            return best
        below = some[best[some] <= 0]
        share = (found[below] / (found[below] - best[below] + 1e-300)).min()  # as far as all stay above
        found = np.maximum(found + share * (best - found), 0.0)
        kept[below[found[below] <= 1e-15]] = False
        found[~kept] = 0.0
    return np.zeros_like(found)
