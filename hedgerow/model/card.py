"""What a drafter's maker measured with it: a greedy generation and its acceptance, in the checkpoint's folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hedgerow.model.fields import Fields

CARD = "acceptance.json"
MOST_PROMPT, MOST_TOKENS = 4096, 1024


@dataclass(frozen=True)
class AcceptanceCard:
    """Greedy: `tokens` after `prompt` with trees of `budget` nodes came `tokens_per_step` a decode step, bonus
    included, the prompt's own step left out.
    """

    prompt: tuple[int, ...]
    tokens: int
    budget: int
    tokens_per_step: float
    topk_cap: int = 0  # candidates at one depth, at most; 1: chains

    @classmethod
    def from_folder(cls, folder: Path, vocab_size: int) -> AcceptanceCard | None:
        """None where there is none. Raises ConfigError with file and field."""
        if not (folder / CARD).exists():
            return None
        f = Fields.read(folder / CARD)
        card = cls(
            f.integers("prompt"),
            f.size("tokens"),
            f.size("budget"),
            f.get("tokens_per_step", float),
            f.get("topk_cap", int, 0),
        )
        if not 0 < len(card.prompt) <= MOST_PROMPT or any(not 0 <= token < vocab_size for token in card.prompt):
            raise f.fail("prompt", f"1 to {MOST_PROMPT} tokens below {vocab_size}")
        if not 2 <= card.tokens <= MOST_TOKENS:
            raise f.fail("tokens", f"2 to {MOST_TOKENS}")
        if not 0 <= card.tokens_per_step - 1 <= card.budget:  # the bonus, and accepted nodes
            raise f.fail("tokens_per_step", f"at least 1, and at most one more than the {card.budget} nodes")
        return card
