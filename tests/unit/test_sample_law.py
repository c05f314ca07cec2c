"""Drawn tokens follow the distribution that the parameters ask for. Seeds are fixed: a failure is a change, not chance.

Each test would refuse a right sampler with probability 1e-5 (the chi-square's tail), were its seeds drawn anew.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from kernels.sample import Law, sample

FALSE_ALARM = 1e-5
DRAWS = 6_000


def tail(statistic: float, freedom: int) -> float:
    """Probability that a chi-square of `freedom` degrees exceeds `statistic`."""
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def draws(logits: torch.Tensor, laws: list[Law]) -> npt.NDArray[np.int64]:
    """One token a law, all from the same row of logits."""
    parts = [
        sample(logits.expand(len(laws[i : i + 1000]), -1).contiguous(), laws[i : i + 1000])
        for i in range(0, len(laws), 1000)
    ]
    return torch.cat(parts).numpy()


def expected(logits: torch.Tensor, law: Law) -> npt.NDArray[np.float64]:
    """The distribution that the filters leave, in float64."""
    p = (logits.double() / law.temperature).softmax(-1)
    p, order = p.sort(descending=True, stable=True)
    if law.top_k:
        p[law.top_k :] = 0
        p /= p.sum()
    p[p.cumsum(0) - p >= law.top_p] = 0
    p[p < law.min_p * p[0]] = 0
    return torch.zeros_like(p).scatter(0, order, p / p.sum()).numpy()


LAWS = {
    "T=1": Law(1.0, 0, 1.0, 0.0, 11, 0, 0),
    "T=1.7": Law(1.7, 0, 1.0, 0.0, 12, 0, 0),
    "T=0.8 top-p 0.95": Law(0.8, 0, 0.95, 0.0, 13, 0, 0),
    "T=0.7 top-k 20": Law(0.7, 20, 1.0, 0.0, 14, 0, 0),
    "T=1 min-p 0.05": Law(1.0, 0, 1.0, 0.05, 15, 0, 0),
    "all": Law(1.2, 25, 0.9, 0.03, 16, 3, 0),
}


@pytest.mark.parametrize("name", LAWS)
def test_drawn_tokens_follow_the_filtered_softmax(name: str) -> None:
    law, logits = LAWS[name], torch.randn(60, generator=torch.Generator().manual_seed(4)) * 1.5
    counts = np.bincount(draws(logits, [law._replace(position=p) for p in range(DRAWS)]), minlength=60)
    p = expected(logits, law)
    assert (counts[p == 0] == 0).all()
    common = p * DRAWS >= 5
    seen = np.append(counts[common], counts[~common].sum())
    wanted = np.append(p[common], p[~common].sum()) * DRAWS
    seen, wanted = seen[wanted > 0], wanted[wanted > 0]
    assert tail(float(((seen - wanted) ** 2 / wanted).sum()), len(seen) - 1) > FALSE_ALARM


@pytest.mark.parametrize("neighbour", ["position", "seed", "sample_index"])
@pytest.mark.parametrize("top_p", [1.0, 0.99999])
def test_neighbouring_keys_draw_independently(neighbour: str, top_p: float) -> None:
    """Pairs of draws whose keys differ by one, in a table of 8 by 8."""
    laws = [Law(1.0, 0, top_p, 0.0, 100, 5, 1000)._replace(**{neighbour: 2 * i}) for i in range(DRAWS)]
    after = [law._replace(**{neighbour: getattr(law, neighbour) + 1}) for law in laws]
    flat = torch.zeros(8)
    table = np.zeros((8, 8))
    np.add.at(table, (draws(flat, laws), draws(flat, after)), 1)
    wanted = len(laws) / 64
    assert tail(float(((table - wanted) ** 2 / wanted).sum()), 63) > FALSE_ALARM


def test_an_unlikely_token_is_drawn_as_often_as_it_should_be() -> None:
    """p = 1/2000 among 2,000 rare tokens that share half of the mass: the far tail of the noise decides."""
    logits = torch.full((2001,), -float(np.log(2000)))
    logits[1234] = 0.0
    rare = draws(logits, [Law(1.0, 0, 1.0, 0.0, 3, 0, p) for p in range(4000)]) != 1234
    deviation = abs(rare.mean() - 0.5) / (0.25 / 4000) ** 0.5
    assert deviation < 4.42  # two-sided, 1e-5
