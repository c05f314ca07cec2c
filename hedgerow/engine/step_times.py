"""What this verifier's own steps take, learned while they run, from what a cost model says before there are any.

A step's time is that from its plan to the next one's, with everything in it that its tokens wait for: the round trip to
the drafter, the forward pass, the messages, and whoever else wants the cores. Two tables hold such times, one of steps
without their drafts and one of drafts, each by kind of load. A few terms are fitted to each table, and what a kind took
is told as its ratio to the fit: a load that was never seen is predicted by the fit, one that was by its own time.

Kinds keep their times until they are seen again. So the fit does not forget what plain steps cost because trees have
been in use for an hour, as one with exponential forgetting does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log, log2
from typing import NamedTuple

import numpy as np

from hedgerow.engine.costs import CostModel, distinct
from hedgerow.engine.nonnegative import nonnegative

EXACT = 17  # a count up to which every number is a kind of its own; above, eight kinds an octave
FAR = 1 << 13  # all counts above are of one kind
KINDS = 512  # most kinds in a table; the one that was seen longest ago goes
FEW, NEWEST = 6, 0.08  # times of a kind that are averaged; the weight of a later one
FARTHEST = 0.4  # the largest deviation that counts, as a logarithm: in such a step somebody else had the cores
YOUNG, PULL = 16, 0.05  # times of a kind before it tells of the machine; share of a deviation that its slowness follows
OWN = 10.0  # the fit counts as so many times of a kind
PRIOR = 0.1  # what an expected load counts beside one that was seen, which counts up to 1
REFIT, SOONER = 32, 2  # steps between two fits; steps of new kinds count as several, so that so many are enough
SCALE = (1.0, 1.0, 1.0, 1e-3, 1.0, 1e-5)  # of the terms, so that none outweighs the others
EXPECTED = [  # loads that a cost model speaks for
    (sequences, sequences * rows, sequences * keys)
    for sequences in (1, 4, 16)
    for rows in (1, 5, 17)
    for keys in (200, 2000)
]
Key = tuple[int, ...]
_KIND = [n if n <= EXACT else EXACT + int(8 * log2(n / EXACT)) for n in range(FAR + 1)]


def kind(count: int) -> int:
    """Counts that are told apart have different kinds."""
    return _KIND[count] if count < FAR else _KIND[FAR]


class Load(NamedTuple):
    """What a step is asked for."""

    sequences: int  # that decode
    rows: int  # of theirs, anchors and trees
    keys: int  # positions before these, all sequences together
    drafts: int = 0  # trees that the drafter is asked for
    nodes: int = 0  # of those, at most
    fed: int = 0  # feature rows that it is sent
    chunk: int = 0  # rows of prompts and replays
    scores: int = 0  # sum of those rows * positions before them


@dataclass
class Seen:
    """Steps of one kind: their terms and milliseconds, smoothed."""

    terms: list[float]
    ms: float
    times: int = 1
    ratio: float = 1.0  # to the fit, drawn to 1 while `times` are few


class Table:
    """Times by kind, and the fit to all of them. Terms and coefficients are never negative."""

    def __init__(self, terms: int) -> None:
        self._seen: dict[Key, Seen] = {}
        self._fit = [0.0] * terms
        self._since = 0
        self._prior: tuple[np.ndarray, np.ndarray] | None = None

    def expect(self, fit: Sequence[float], terms: Sequence[tuple[float, ...]]) -> None:
        """Until steps show otherwise, predictions are `fit`'s; later it counts for a little at each of these `terms`,
        and as what was seen compares with it."""
        takes = np.array(terms) @ np.array(fit)
        self._fit, self._prior = list(fit), (np.array(fit), np.array(terms)[takes > 0])

    def _with_prior(self, table: np.ndarray, trust: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        assert self._prior is not None
        fit, terms = self._prior
        expected = table @ fit / trust  # over measured, of each kind
        scale = float(np.exp(-(trust * np.log(np.maximum(expected, 1e-3))).sum() / trust.sum()))
        rows = terms / (terms @ fit * scale)[:, None] * PRIOR
        return np.concatenate([table, rows]), np.concatenate([trust, np.full(len(rows), PRIOR)])

    def __len__(self) -> int:
        return len(self._seen)

    def took(self, key: Key, terms: tuple[float, ...], ms: float) -> None:
        """Takes in one step."""
        seen = self._seen.pop(key, None)
        if seen is None:
            seen = Seen(list(terms), ms)
            self._since += REFIT // SOONER
            if len(self._seen) >= KINDS:
                del self._seen[next(iter(self._seen))]
        else:
            seen.times += 1
            weight = max(1 / seen.times, NEWEST)
            seen.ms *= exp(weight * (_off(seen, ms) if seen.times > FEW else log(ms / seen.ms)))
            seen.terms = [old + weight * (new - old) for old, new in zip(seen.terms, terms, strict=True)]
            seen.ratio = self._ratio(seen)
        self._seen[key] = seen  # the newest stands last
        self._since += 1
        if self._since >= REFIT:
            self._refit()

    def off(self, key: Key, ms: float) -> float:
        """How far such a step is from what is known of its kind, as a logarithm; 0 of a kind hardly seen."""
        seen = self._seen.get(key)
        return 0.0 if seen is None or seen.times < YOUNG else _off(seen, ms)

    def milliseconds(self, key: Key, terms: tuple[float, ...]) -> float:
        """What such a step is likely to take; 0 while nothing is known."""
        fitted = 0.0
        for one, size in zip(self._fit, terms, strict=True):
            fitted += one * size
        seen = self._seen.get(key)
        return fitted if seen is None else fitted * seen.ratio

    def slope(self, term: int) -> float:
        """What one more of this term adds to the fit."""
        return self._fit[term]

    def _ratio(self, seen: Seen) -> float:
        fitted = sum(one * size for one, size in zip(self._fit, seen.terms, strict=True))
        if fitted <= 0:
            return 1.0
        return 1 + (seen.ms / fitted - 1) * seen.times / (seen.times + OWN)

    def _refit(self) -> None:
        """The smallest sum of squared relative errors; a term that would be negative is left out."""
        self._since = 0
        seen = list(self._seen.values())
        times = np.array([max(one.ms, 1e-3) for one in seen])
        trust = np.array([one.times / (one.times + OWN) for one in seen])
        table = np.array([one.terms for one in seen]) / times[:, None] * trust[:, None]
        if self._prior is not None:
            table, trust = self._with_prior(table, trust)
        self._fit = nonnegative(table, trust).tolist()
        for one in seen:
            one.ratio = self._ratio(one)


def _off(seen: Seen, ms: float) -> float:
    return min(max(log(ms / seen.ms), -FARTHEST), FARTHEST)


class StepTimes:
    """Predicts steps from those that ran. Not safe for use by several threads at once.

    `slowness` follows how all steps do against what is known of their kinds, within some twenty steps. The tables keep
    times of slowness 1, so that kinds seen while others had the cores compare with kinds seen before.

    A cost model (`expect`) is of steps that had the machine for themselves, without drafts and messages: measured steps
    soon count for more. With it, experts that the rows choose are a term too: rows decide how many are expected.
    """

    def __init__(self) -> None:
        self._steps, self._drafts = Table(8), Table(4)
        self._experts = self._top_k = 0
        self.slowness = 1.0
        self.expected = False  # whether there was a cost model

    def expect(self, costs: CostModel) -> None:
        """Before the first step: what steps are likely to take."""
        self._experts, self._top_k, self.expected = costs.experts, costs.top_k, True
        key, score = costs.key / SCALE[3], costs.score / SCALE[5]
        fit = costs.fixed, 0.0, costs.row, key, costs.row, score, costs.expert, score
        self._steps.expect(fit, [self._step_terms(Load(*sizes)) for sizes in EXPECTED])

    def took(self, load: Load, draft_ms: float, rest_ms: float) -> None:
        """A step with this load waited `draft_ms` for its trees and took `rest_ms` besides."""
        if not (load.drafts or load.fed):
            draft_ms = 0.0
        parts = [
            (self._steps, _step_key(load), self._step_terms(load), rest_ms),
            (self._drafts, _draft_key(load), _draft_terms(load), draft_ms),
        ]
        parts = [part for part in parts if part[3] > 0]
        # each against its own kind, as the kind is told: else slowness and kinds would drift apart
        off = sum(ms * table.off(key, ms / self.slowness) for table, key, _, ms in parts)
        self.slowness *= exp(PULL * off / max(draft_ms + rest_ms, 1e-9))
        for table, key, terms, ms in parts:
            table.took(key, terms, ms / self.slowness)

    def milliseconds(self, load: Load) -> float:
        """Of a whole step, its draft included; 0 while nothing is known."""
        ms = self._steps.milliseconds(_step_key(load), self._step_terms(load))
        if load.drafts or load.fed:
            ms += self._drafts.milliseconds(_draft_key(load), _draft_terms(load))
        return ms * self.slowness

    def feeding(self, rows: int) -> float:
        """Milliseconds that a drafter takes for so many feature rows more."""
        return self._drafts.slope(3) * rows * self.slowness

    def _step_terms(self, load: Load) -> tuple[float, ...]:
        found = 0.0
        if self._experts:
            found = distinct(self._experts, self._top_k, 1, load.rows + load.chunk)
        drawn = load.rows * load.keys / max(load.sequences, 1)  # scores of rows that decode
        return (
            1.0, load.sequences, load.rows, load.keys * SCALE[3], load.chunk, load.scores * SCALE[5], found,
            drawn * SCALE[5],
        )  # fmt: skip


def _step_key(load: Load) -> Key:
    return kind(load.sequences), kind(load.rows), kind(load.chunk)


def _draft_key(load: Load) -> Key:
    return kind(load.drafts), kind(load.nodes), kind(load.fed) if load.fed > EXACT + load.drafts else -1


def _draft_terms(load: Load) -> tuple[float, ...]:
    return 1.0, load.drafts, load.nodes, load.fed
