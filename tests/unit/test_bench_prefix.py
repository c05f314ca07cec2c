"""What the bench of the prefix cache makes of what its client saw."""

from __future__ import annotations

from bench.prefix import Asked, summary


def test_requests_are_compared_with_the_first_of_the_same_prompt() -> None:
    first = [Asked(100.0, [1] * 6, 0, 3), Asked(400.0, [1] * 6, 0, 2), Asked(200.0, [1] * 6, 0, 1)]
    later = [Asked(20.0, [1] * 6, 64, 3), Asked(40.0, [1] * 6, 128, 2), Asked(100.0, [1] * 6, 0, 1)]
    assert summary(first, later, 128) == {"first_token_ms": 40.0, "ratio": 0.2, "hits": 0.5, "tokens_per_step": 3.0}
