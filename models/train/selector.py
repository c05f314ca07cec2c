"""The candidate selector of DFlash 2 as a training model, on top of a drafter that stays as it is.

    S_j(a, b) = U_j(b) + <A[a] * (W h_j), B[b]>        U: the drafter's logits, h: its hidden states, a before b
    log p_j(b | a) = log softmax_b S_j(a, b) + log sum_c q_j(c)        b, c among the top_k of U_j, q = softmax U_j

The second term keeps the mass that the marginal gives its candidates, so a selector whose B is zero changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class SelectorShape:
    rank: int = 32
    top_k: int = 16


class Selector(nn.Module):
    """Names are the checkpoint's."""

    def __init__(self, vocab: int, hidden: int, shape: SelectorShape) -> None:
        super().__init__()
        self.shape = shape
        self.predecessor_codebook = nn.Parameter(torch.randn(vocab, shape.rank))
        self.successor_codebook = nn.Parameter(torch.zeros(vocab, shape.rank))
        self.hidden_projection = nn.Parameter(torch.randn(shape.rank, hidden) * hidden**-0.5)

    def added(self, hidden: Tensor, before: Tensor, tokens: Tensor) -> Tensor:
        """hidden `[N, H]`, the tokens before `[N]`, candidates `[N, K]` -> what is added to U, `[N, K]`."""
        state = self.predecessor_codebook[before] * (hidden @ self.hidden_projection.T)
        return torch.bmm(self.successor_codebook[tokens], state[:, :, None])[..., 0]


@dataclass(frozen=True)
class Places:
    """Positions of blocks: what the drafter says there, the token before, and what the target says after that one."""

    hidden: Tensor  # [N, H]
    before: Tensor  # [N]
    tokens: Tensor  # [N, K] candidates, best first
    logits: Tensor  # [N, K] the drafter's
    teacher: Tensor  # [N, K] the target's probabilities of them
    weight: Tensor  # [N] how likely it is that a tree gets here

    def __len__(self) -> int:
        return len(self.before)

    def __getitem__(self, rows: Tensor | slice) -> Places:
        return Places(*(getattr(self, field.name)[rows] for field in fields(self)))

    @classmethod
    def joined(cls, parts: list[Places]) -> Places:
        return cls(*(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(cls)))


def divergence(selector: Selector | None, places: Places) -> tuple[Tensor, Tensor]:
    """Mean over places, weighted, of what `selector` (None: the marginals) lacks to the target's shares of the
    candidates, in nats; and how often its first is the target's first of them."""
    scores = places.logits.float()
    if selector is not None:
        scores = scores + selector.added(places.hidden.float(), places.before.long(), places.tokens.long())
    teacher = places.teacher.float()
    mass = teacher.sum(-1)
    shares = teacher / mass.clamp_min(1e-9)[:, None]
    lacks = (shares * (shares.clamp_min(1e-9).log() - scores.log_softmax(-1))).sum(-1)
    weight = places.weight.float() * mass
    right = (scores.argmax(-1) == teacher.argmax(-1)).float()
    return (weight * lacks).sum() / weight.sum(), (weight * right).sum() / weight.sum()
