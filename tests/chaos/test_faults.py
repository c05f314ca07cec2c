"""Every fault of `cases.py`, once: the client's stream is the undisturbed one. `python -m bench.chaos` repeats them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.chaos.cases import CASES
from tests.chaos.cluster import Cluster, Shape
from tests.chaos.readers import READERS
from tests.chaos.run import Case, References, repeat

LONG = {"kill-gateway", "stop-verifier", "cut-verifier"}  # tests of a stack meet these faults in `make test` too
STANDBY_SECONDS = 3.0  # until a stream whose verifier was killed goes on elsewhere, beside the prefill


class Clusters:
    """The cluster of the last shape that was asked for. Two at once would not fit on two cores."""

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self._folders = folders
        self._cluster: Cluster | None = None
        self.known = References()

    def of(self, shape: Shape) -> Cluster:
        """A running one, at rest. One that does not come to rest is given up."""
        if self._cluster is None or self._cluster.shape != shape:
            self.stop()
            self._cluster = Cluster(shape, self._folders.mktemp("cluster"))
            self._cluster.__enter__()
        try:
            self._cluster.settle()
        except BaseException:
            self.stop()
            raise
        return self._cluster

    def stop(self) -> None:
        """Where one runs."""
        if self._cluster is not None:
            self._cluster.stop()
            self._cluster = None


@pytest.fixture(scope="module")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clusters]:
    made = Clusters(tmp_path_factory)
    yield made
    made.stop()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("repetition", "case"),
    [
        pytest.param(
            number,
            case,
            id=case.name,
            marks=[pytest.mark.slow] if case.slow else [pytest.mark.long] if case.name in LONG else [],
        )
        for number, case in enumerate(CASES)
    ],
)
async def test_a_fault_changes_no_token(clusters: Clusters, case: Case, repetition: int) -> None:
    cluster = await asyncio.to_thread(clusters.of, case.shape)
    try:
        for _ in range(3):
            outcome = await repeat(cluster, case, repetition, clusters.known, tuple(READERS))
            assert outcome.verdict.clean, outcome
            if case.name != "kill-verifier" or outcome.recovery <= STANDBY_SECONDS + outcome.first:
                break
            await asyncio.to_thread(clusters.of, case.shape)
        else:
            raise AssertionError(f"no standby took over soon: {outcome}")
    except BaseException:
        print(cluster.last_words(30))
        raise
    await asyncio.to_thread(clusters.of, case.shape)
