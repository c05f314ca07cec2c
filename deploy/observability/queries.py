"""How the dashboard asks Prometheus: short words for the forms that come again and again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

G, V, D, K = "hedgerow_gateway", "hedgerow_verifier", "hedgerow_drafter", "hedgerow_kvstore"
WHERE = 'namespace=~"$namespace"'


class Query(NamedTuple):
    """What is drawn, and what it is called."""

    text: str
    legend: str


class Panel(NamedTuple):
    """`about` is shown behind the (i)."""

    title: str
    unit: str
    about: str
    queries: Sequence[Query]
    kind: str = "timeseries"
    stacked: bool = False


def rate(metric: str, by: str = "", where: str = "") -> str:
    """Per second, of all processes."""
    grouped = f"sum by ({by}) " if by else "sum"
    return f"{grouped}(rate({selected(metric, where)}[$__rate_interval]))"


def selected(metric: str, where: str = "") -> str:
    """Of the chosen namespace."""
    return f"{metric}{{{WHERE}{', ' + where if where else ''}}}"


def per_minute(metric: str) -> str:
    """For what is rare."""
    return f"60 * {rate(metric)}"


def total(metric: str, where: str = "") -> str:
    """Of a gauge, over all processes."""
    return f"sum({selected(metric, where)})"


def mean(histogram: str, where: str = "") -> str:
    """Of a histogram's observations."""
    return f"{rate(f'{histogram}_sum', '', where)} / {rate(f'{histogram}_count', '', where)}"


def quantiles(histogram: str, where: str = "", of: Sequence[float] = (0.5, 0.95, 0.99)) -> list[Query]:
    """Of a histogram."""
    buckets = rate(f"{histogram}_bucket", "le", where)
    return [Query(f"histogram_quantile({q}, {buckets})", f"p{q * 100:g}") for q in of]


def share(part: str, whole: str) -> str:
    """0 where there is nothing to share."""
    return f"{part} / clamp_min({whole}, 1e-9)"
