"""What the bench of the whole stack makes of streams and counters."""

from __future__ import annotations

import pytest

from bench.stack import Stream, split, together


def test_rates_count_while_all_streams_decode() -> None:
    """From the last one's first chunk to the first end: here from 2 to 5 s. A step of both streams is one step."""
    long = Stream(moments=[0.0, 3.0, 4.0, 7.0], counts=[1, 4, 2, 9], steps=[(1, 0.0), (3, 3.0), (4, 4.0), (9, 7.0)])
    late = Stream(moments=[2.0, 4.0, 5.0], counts=[1, 3, 1], steps=[(2, 2.0), (4, 4.0), (5, 5.0)])
    assert together([long, late]) == {"steps_s": 1.0, "tok_s": pytest.approx(3.3)}


def test_a_steps_time_is_split_without_a_rest() -> None:
    """Ten steps of 1 ms in 15 ms of wall clock; counters that were not there before count from zero."""
    before = {"hedgerow_verifier_steps_total": 5.0, "hedgerow_verifier_step_seconds_sum": 1.0}
    after = {
        "hedgerow_verifier_steps_total": 15.0,
        "hedgerow_verifier_step_seconds_sum": 1.010,
        "hedgerow_verifier_draft_seconds_sum": 0.004,
        "hedgerow_verifier_device_wait_seconds_total": 0.003,
        "hedgerow_drafter_forward_seconds_sum": 0.002,
        "hedgerow_drafter_build_seconds_sum": 0.001,
        "hedgerow_drafter_device_wait_seconds_total": 0.001,
    }
    expected = {"step": 1.0, "draft": 0.4, "device": 0.4, "verifier_host": 0.3, "drafter_host": 0.2, "around": 0.5}
    parts = {f"{name}_ms": pytest.approx(value) for name, value in expected.items()}
    assert split(before, after, 0.015) == parts | {"fed": 0}
    assert split(before, after | {"hedgerow_verifier_fed_steps_total": 9}, 0.015)["fed"] == 0.9
