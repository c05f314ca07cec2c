"""The feature ring gives back, by position, exactly what was put in, or says that it is gone."""

from __future__ import annotations

import random

import pytest
import torch

from hedgerow.engine.features import FeatureRing


def rows(first: int, count: int) -> torch.Tensor:
    return torch.arange(first, first + count, dtype=torch.float32).unsqueeze(1).expand(-1, 3).contiguous()


def test_every_held_position_reads_back_after_any_sequence_of_puts() -> None:
    choose, ring, end = random.Random(3), FeatureRing(16), 0
    for _ in range(300):
        count = choose.randint(0, 40)
        ring.put(rows(end, count))
        end += count
        assert (ring.start, ring.end) == (max(0, end - 16), end)
        first = choose.randint(ring.start, ring.end)
        wanted = choose.randint(0, ring.end - first)
        assert torch.equal(ring.read(first, wanted), rows(first, wanted))


def test_an_unwrapped_read_is_a_view() -> None:
    ring = FeatureRing(8)
    ring.put(rows(0, 6))
    assert ring.read(1, 3).untyped_storage().data_ptr() == ring.read(2, 4).untyped_storage().data_ptr()


@pytest.mark.parametrize(("position", "count"), [(1, 1), (9, 2), (4, 7)])
def test_reading_what_is_gone_or_not_there_yet_is_our_own_mistake(position: int, count: int) -> None:
    ring = FeatureRing(8)
    ring.put(rows(0, 10))
    with pytest.raises(AssertionError):
        ring.read(position, count)
