"""What a step takes on one machine: a model of few terms, fitted to measured steps, kept in a file.

    ms = fixed + expert * D + row * R + key * K + score * S

D experts that a sparse layer's rows choose, on average; R rows; K keys that attention reads, once a sequence; S scores,
the sum over sequences of rows * keys. Every term has a cause: weights that every step reads, and launches; an expert's
weights; a row's share of dense products; a key's latent; attention's products. None is negative, so more is never
predicted to take less.

A verifier measures some steps when it starts, and its predictions begin with what it found (calibration.py).

`distinct` gives D before it is seen: how many experts so many trees choose where a row takes each of its tree's common
experts with probability `overlap`, and all others at random. What a step did choose is counted (`Target.experts`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hedgerow.engine.nonnegative import nonnegative
from hedgerow.engine.tree import TreeConfig
from hedgerow.errors import InvalidRequest
from hedgerow.model.fields import Fields

TERMS = ("fixed", "expert", "row", "key", "score")
FORM = 1  # of the file


class Load(NamedTuple):
    """What a step is asked for: each sequence's rows and keys, and the experts that its rows choose."""

    rows: Sequence[int]
    keys: Sequence[int]
    distinct: float

    @property
    def terms(self) -> tuple[float, ...]:
        scores = sum(rows * keys for rows, keys in zip(self.rows, self.keys, strict=True))
        return 1.0, self.distinct, float(sum(self.rows)), float(sum(self.keys)), float(scores)


@dataclass(frozen=True)
class CostModel:
    """Milliseconds a unit of each term. `worst`: the largest relative error over the steps that it was fitted to."""

    fixed: float
    expert: float
    row: float
    key: float
    score: float
    machine: str = ""
    law: str = ""  # of the kernels that were measured
    ranks: int = 1
    worst: float = 0.0
    experts: int = 0  # of a sparse layer, and how many a row chooses; 0: not known
    top_k: int = 0
    subject: str = ""  # whose steps these are, where only they may be predicted from it

    def milliseconds(self, load: Load) -> float:
        return float(sum(getattr(self, name) * size for name, size in zip(TERMS, load.terms, strict=True)))

    @classmethod
    def fit(cls, steps: Sequence[tuple[Load, float]], **of: Any) -> CostModel:
        """The smallest sum of squared relative errors without a negative term; `of`: the other fields. InvalidRequest
        for too few steps."""
        if len(steps) < len(TERMS):
            raise InvalidRequest("steps", len(steps), f"at least {len(TERMS)}")
        times = np.array([ms for _, ms in steps])
        table = np.array([load.terms for load, _ in steps]) / times[:, None]
        best = nonnegative(table, np.ones(len(times)))
        some = np.flatnonzero(best)
        exact = np.linalg.lstsq(table[:, some], np.ones(len(times)), rcond=None)[0]  # without the pull to zero
        if exact.min(initial=0.0) >= 0:
            best[some] = exact
        worst = float(np.abs(table @ best - 1).max())
        fixed, expert, row, key, score = map(float, best)
        return cls(fixed, expert, row, key, score, **{"worst": worst} | of)

    @classmethod
    def read(cls, file: Path) -> CostModel:
        """Raises ConfigError with file and field."""
        f = Fields.read(file)
        f.must_be("form", FORM, None)
        terms = {name: f.get(name, float) for name in TERMS}
        for name, value in terms.items():
            if value < 0:
                raise f.fail(name, "must be at least 0")
        if not any(terms.values()):
            raise f.fail(TERMS[0], "must be above 0, as no other term is")
        return cls(
            **terms, machine=f.get("machine", str, ""), law=f.get("law", str, ""), ranks=f.size("ranks", 1),
            worst=f.get("worst", float, 0.0), experts=f.get("experts", int, 0), top_k=f.get("top_k", int, 0),
            subject=f.get("subject", str, ""),
        )  # fmt: skip

    def write(self, file: Path) -> None:
        file.write_text(self.text())

    def text(self) -> str:
        """Of the file."""
        return json.dumps({"form": FORM} | asdict(self), indent=1) + "\n"


def distinct(experts: int, top_k: int, trees: int, rows: int, overlap: float = 0.0) -> float:
    """Expected number of `experts` that `trees` trees of `rows` rows choose, `top_k` a row. InvalidRequest for an
    overlap that is no share."""
    if not 0 <= overlap <= 1:
        raise InvalidRequest("overlap", overlap, "from 0 to 1")
    common = top_k / experts
    missed_by_a_tree = (1 - common + common * (1 - overlap) ** rows) * (1 - common * (1 - overlap)) ** rows
    return float(experts * (1 - missed_by_a_tree**trees))


class Choice(NamedTuple):
    """A budget, and what it brings."""

    budget: int
    rate: float  # tokens a second of all sequences together


def best_budget(
    costs: CostModel, accepted: Mapping[int, float], keys: int, trees: int, experts: int, top_k: int, overlap: float
) -> Choice:
    """The budget whose steps bring most tokens a second: `accepted[budget]` tokens a step and sequence, bonus included,
    of `trees` sequences after `keys` tokens. Of equals the smallest. InvalidRequest where nothing is to choose from."""
    if not accepted:
        raise InvalidRequest("accepted", "no budget", "at least one")

    def rate(budget: int) -> float:
        rows = TreeConfig(budget).q_len
        found = distinct(experts, top_k, trees, rows, overlap)
        return 1000 * trees * accepted[budget] / costs.milliseconds(Load([rows] * trees, [keys] * trees, found))

    return max((Choice(budget, rate(budget)) for budget in sorted(accepted)), key=lambda choice: choice.rate)
