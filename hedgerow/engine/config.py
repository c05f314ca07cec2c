"""The engine's limits, fixed at start."""

from __future__ import annotations

from dataclasses import dataclass

from hedgerow.errors import InvalidRequest
from hedgerow.model.cache import LatentCache

SHARING = ("tenant", "shared", "off")


@dataclass(frozen=True)
class EngineConfig:
    """Limits of one VerifierEngine. Raises InvalidRequest with the field, the value and the limit.

    `pages` None: enough for one full context and for `max_sequences` sequences of a quarter of it.
    `max_context` None: the model's own.
    """

    max_sequences: int = 32  # in the running batch
    max_waiting: int = 256  # behind it; one more is refused with Overloaded
    pages: int | None = None  # of the latent cache
    prefill_rows: int = 256  # prompt and replay rows in one step, all sequences together
    prefill_factor: float = 0.0  # times the step without them that a step with them may take, as measured; 0: any
    max_budget: int = 63
    default_budget: int = 8  # of a start that names none
    auto_budget: int = 0  # above 0: such a start's trees have up to so many nodes, chosen in each step (budgets.py)
    max_context: int | None = None  # tokens of prompt and output together
    run_ahead: int = 512  # most tokens emitted beyond the committed offset; a sequence is held there
    kept_ends: int = 256  # sequences that have ended and whose last tokens are not acknowledged
    kept_tokens: int = 1 << 20  # of prompt and output of those, all together
    kept_seconds: float = 60.0  # for which each of those is kept
    replay_rows: int = 64  # of one forced chain
    feature_ring: int = 2048  # positions a sequence whose features are kept for the drafter
    prefix_cache: str = "tenant"  # whose prompts share pages: one tenant's, all ("shared"), or nobody's ("off")
    prefix_feature_bytes: int = 1 << 28  # of features kept with shared pages
    feature_rows: int = 1024  # feature rows in one draft request, all sequences together

    def __post_init__(self) -> None:
        for field, least in _LEAST.items():
            value = getattr(self, field)
            if value is not None and value < least:
                raise InvalidRequest(field, value, f"at least {least}")
        if 0 < self.prefill_factor < 1:
            raise InvalidRequest("prefill_factor", self.prefill_factor, "at least 1, or 0 for no limit")
        if self.auto_budget > self.max_budget:
            raise InvalidRequest("auto_budget", self.auto_budget, f"at most max_budget, {self.max_budget}")
        if self.prefix_cache not in SHARING:
            raise InvalidRequest("prefix_cache", self.prefix_cache, f"one of {', '.join(SHARING)}")
        if self.default_budget > self.max_budget:
            raise InvalidRequest("default_budget", self.default_budget, f"at most max_budget, {self.max_budget}")

    def pages_for(self, max_context: int) -> int:
        """`pages`, or what the default of them is."""
        page, most = LatentCache.page_size, max_context + self.max_budget
        return self.pages or max(-(-most // page), self.max_sequences * -(-(most // 4) // page))


_LEAST = {
    "max_sequences": 1,
    "max_waiting": 0,
    "pages": 1,
    "prefill_rows": 1,
    "max_budget": 0,
    "default_budget": 0,
    "auto_budget": 0,
    "prefill_factor": 0,
    "max_context": 2,
    "run_ahead": 1,
    "kept_ends": 0,
    "kept_tokens": 0,
    "kept_seconds": 0,
    "replay_rows": 1,
    "feature_ring": 1,
    "feature_rows": 1,
    "prefix_feature_bytes": 0,
}
