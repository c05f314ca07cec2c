"""What a tree of each budget brings, learned from the trees that were verified.

Trees are built best first, so the first b nodes of a larger tree are the tree of budget b: a verified tree shows, for
every budget up to its own, which of its nodes would have been accepted. A curve keeps, by node, how often the node was
there to be accepted and how often it was. A sequence's own curve is drawn to the verifier's, which all of them teach.
"""

from __future__ import annotations

from collections.abc import Sequence

SIZES = (0, 2, 4, 6, 8, 12, 16, 24, 32, 48, 63)
"""Budgets that are chosen from, up to the most that a sequence may have."""
HOPE, FADE = 0.6, 0.85  # of a drafter that was never tried: its first node's share; each next one's, of the one before
TRIALS = 4.0  # as often as if it had been tried
OWN_MEMORY, SHARED_MEMORY = 48.0, 200.0  # trees after which a curve has forgotten most
NEWS = 24.0  # the memory while no trees are grown but those of trials
PULL = 40.0  # the verifier's curve counts as so many trees of a sequence's own


def sizes(most: int) -> tuple[int, ...]:
    """Budgets up to `most`, which is one of them."""
    return (*(size for size in SIZES if size < most), most)


class Curve:
    """Acceptance by node: node i is in every tree of a budget above i."""

    __slots__ = ("_keep", "hits", "tries")

    def __init__(self, most: int, memory: float = OWN_MEMORY) -> None:
        self._keep = 1 - 1 / memory
        self.hits, self.tries = [0.0] * most, [0.0] * most

    def saw(self, budget: int, accepted: Sequence[int], memory: float = 0.0) -> None:
        """A tree of this budget was verified, and these of its nodes, counted from 0, were accepted. `memory`: of fewer
        trees than usual, so that this one counts more."""
        keep, hits, tries = 1 - 1 / memory if memory else self._keep, self.hits, self.tries
        for node in range(min(budget, len(hits))):
            hits[node] *= keep
            tries[node] = tries[node] * keep + 1
        for node in accepted:
            if node < len(hits):
                hits[node] += 1


class SharedCurve(Curve):
    """The verifier's: what a sequence is expected to accept before it has shown anything."""

    def __init__(self, most: int) -> None:
        super().__init__(most, SHARED_MEMORY)
        self.hits = [TRIALS * HOPE * FADE**node for node in range(most)]
        self.tries = [TRIALS] * most

    def expected(self, own: Curve | None, sizes: Sequence[int]) -> list[float]:
        """Tokens a step, bonus included, for each of the ascending `sizes`."""
        tokens, node, found = 1.0, 0, []
        hits, tries = self.hits, self.tries
        for size in sizes:
            while node < size:
                share = hits[node] / tries[node]
                if own is not None:
                    share = (own.hits[node] + PULL * share) / (own.tries[node] + PULL)
                tokens, node = tokens + share, node + 1
            found.append(tokens)
        return found


def hull(sizes: Sequence[int], tokens: Sequence[float]) -> list[tuple[float, int, float]]:
    """The budgets that are best at some price of a node, as (tokens a node that the budget's last nodes bring, budget,
    tokens), the shares falling."""
    corners: list[tuple[float, int, float]] = [(float("inf"), sizes[0], tokens[0])]
    for size, brings in zip(sizes[1:], tokens[1:], strict=True):
        while True:
            slope = (brings - corners[-1][2]) / (size - corners[-1][1])
            if slope < corners[-1][0]:
                break
            corners.pop()
        if slope > 0:
            corners.append((slope, size, brings))
    return corners
