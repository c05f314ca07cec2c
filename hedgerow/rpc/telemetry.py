"""Metrics: the one place that knows Prometheus. Spans are in `tracing`.

    APPENDS = telemetry.counter("hedgerow_kvstore_entries", "Entries by their answer.", {"status": STATUSES})
    APPENDS.add(1, "ok")
    telemetry.watch("hedgerow_verifier_steps", "Steps.", lambda: engine.load().steps)

Names are `hedgerow_<service>_<what>_<unit>`; a counter's series ends in `_total`. A label's values are listed where the
metric is made, and what is not listed counts as `other`: no client can make series. Whoever may not know this module
(the engine, protocol modules) counts in plain numbers, which `watch` reads when somebody looks.

They are served by `hedgerow.rpc.exposition`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar

import prometheus_client as prometheus
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from hedgerow.rpc.logs import get_log

log = get_log(__name__)

prometheus.disable_created_metrics()  # type: ignore[no-untyped-call]  # a series for each series: nobody asks for it
REGISTRY = CollectorRegistry()
prometheus.ProcessCollector(registry=REGISTRY)  # CPU, memory, file descriptors

OTHER = "other"
MOST_SERIES = 256  # of one metric; more is a mistake in the program
SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""Buckets of a duration."""
_NAME = re.compile(r"hedgerow_[a-z]+(_[a-z]+)+")

Labels = Mapping[str, Sequence[str]]  # per label: all the values that it can have
Reading = float | Mapping[str, float]  # of a metric with one label: by its value
Made = TypeVar("Made", prometheus.Counter, prometheus.Gauge, prometheus.Histogram)


class _Series(Generic[Made]):
    """The series of one metric by the values of its labels; all of them are there from the start, at zero."""

    def __init__(self, metric: Made, labels: Labels) -> None:
        self._metric: Made = metric
        self._values = list(labels.values())
        keys = itertools.product(*self._values)
        self._series: dict[tuple[str, ...], Made] = {key: metric.labels(*key) if key else metric for key in keys}
        assert len(self._series) <= MOST_SERIES, f"{metric} has {len(self._series)} series"

    def of(self, key: tuple[str, ...]) -> Made:
        found = self._series.get(key)
        if found is None:
            assert len(key) == len(self._values), f"{len(self._values)} labels, not {key}"
            key = tuple(value if value in known else OTHER for value, known in zip(key, self._values, strict=True))
            found = self._series[key] = self._metric.labels(*key)
        return found


class Counter(_Series[prometheus.Counter]):
    """Only goes up."""

    def add(self, amount: float = 1, *labels: str) -> None:
        """A quarter of a microsecond. Safe for use by several threads."""
        self.of(labels).inc(amount)


class Gauge(_Series[prometheus.Gauge]):
    """Goes up and down."""

    def set(self, value: float, *labels: str) -> None:
        """As `Counter.add`."""
        self.of(labels).set(value)


class Histogram(_Series[prometheus.Histogram]):
    """Counts observations by bucket."""

    def observe(self, value: float, *labels: str) -> None:
        """Half a microsecond. Safe for use by several threads."""
        self.of(labels).observe(value)


class Tally(Collector):
    """A histogram of whole numbers with a bucket for each up to `most`, for what is counted many times a step.

    One thread counts: no lock, a tenth of a microsecond.
    """

    def __init__(self, name: str, text: str, most: int) -> None:
        self._name, self._text, self._counts, self._sum = name, text, [0] * (most + 1), 0

    def count(self, *values: int) -> None:
        """What is larger than `most` falls into the last bucket, +Inf, but counts as it is in the sum."""
        counts, most = self._counts, len(self._counts) - 1
        for value in values:
            counts[value if value < most else most] += 1
        self._sum += sum(values)

    def collect(self) -> Iterator[Metric]:
        """For the registry."""
        most = len(self._counts) - 1
        totals = list(itertools.accumulate(self._counts))
        buckets = [("+Inf" if n == most else str(float(n)), total) for n, total in enumerate(totals)]
        yield HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum)


class _Watched(Collector):
    """Numbers that their owners keep; read when somebody looks."""

    def __init__(self) -> None:
        self.reads: dict[str, tuple[type[CounterMetricFamily] | type[GaugeMetricFamily], str, str, _Read]] = {}

    def collect(self) -> Iterator[Metric]:
        for name, (family, text, label, read) in list(self.reads.items()):
            try:
                reading = read()
            except Exception as error:  # noqa: BLE001  one number that cannot be read must not hide the others
                log.error("a metric cannot be read", exception=error, name=name)
                continue
            metric = family(name, text, labels=[label] if label else [])
            by_value = reading if isinstance(reading, Mapping) else {"": reading}
            for value, number in itertools.islice(list(by_value.items()), MOST_SERIES):
                metric.add_metric([value] if label else [], number)
            yield metric


_Read = Callable[[], Reading]
_watched = _Watched()
REGISTRY.register(_watched)
_made: dict[str, Counter | Gauge | Histogram | Tally] = {}


def counter(name: str, text: str, labels: Labels | None = None) -> Counter:
    """The counter of this name: made once a process, whoever asks."""
    labels = labels or {}
    return _once(
        name, Counter, lambda: Counter(prometheus.Counter(name, text, list(labels), registry=REGISTRY), labels)
    )


def gauge(name: str, text: str, labels: Labels | None = None) -> Gauge:
    """As `counter`."""
    labels = labels or {}
    return _once(name, Gauge, lambda: Gauge(prometheus.Gauge(name, text, list(labels), registry=REGISTRY), labels))


def histogram(name: str, text: str, labels: Labels | None = None, buckets: Sequence[float] = SECONDS) -> Histogram:
    """As `counter`."""
    labels = labels or {}

    def make() -> Histogram:
        return Histogram(
            prometheus.Histogram(name, text, list(labels), registry=REGISTRY, buckets=list(buckets)), labels
        )

    return _once(name, Histogram, make)


def tally(name: str, text: str, most: int) -> Tally:
    """As `counter`."""

    def make() -> Tally:
        made = Tally(name, text, most)
        REGISTRY.register(made)
        return made

    return _once(name, Tally, make)


def watch(name: str, text: str, read: _Read, label: str = "", *, goes_down: bool = False) -> None:
    """Exports a number that its owner keeps: a counter, or a gauge where it `goes_down`.

    `read` is called at each look, in the event loop; with a `label` it gives a mapping from that label's values, which
    the program decides, never a client. A second watch of a name takes the place of the first.
    """
    _check(name)
    assert name not in _made, f"{name} is there"
    _watched.reads[name] = (GaugeMetricFamily if goes_down else CounterMetricFamily, text, label, read)


def numbers() -> dict[str, float]:
    """Every series of ours as it is now, by `name` or `name{label="value"}`; of histograms, count and sum."""
    found: dict[str, float] = {}
    for family in REGISTRY.collect():
        for sample in family.samples:
            if sample.name.startswith("hedgerow_") and not sample.name.endswith("_bucket"):
                labels = ",".join(f'{label}="{value}"' for label, value in sample.labels.items())
                found[f"{sample.name}{{{labels}}}" if labels else sample.name] = float(sample.value)
    return found


def value(name: str, **labels: str) -> float:
    """What a look would show of one series; 0 where it is not there. For tests and logs."""
    return REGISTRY.get_sample_value(name, labels) or 0.0


Kind = TypeVar("Kind", Counter, Gauge, Histogram, Tally)


def _once(name: str, kind: type[Kind], make: Callable[[], Kind]) -> Kind:
    _check(name)
    made = _made.get(name)
    if made is None:
        made = _made[name] = make()
    assert isinstance(made, kind), f"{name} is a {type(made).__name__}"
    return made


def _check(name: str) -> None:
    assert _NAME.fullmatch(name), f"{name} is not hedgerow_<service>_<what>_<unit>"
