"""The candidate selector of DFlash 2 as a training model, on top of a drafter that stays as it is.

    S_j(a, b) = U_j(b) + <A[a] * (W h_j), B[b]>        U: the drafter's logits, h: its hidden states, a before b
    log p_j(b | a) = log softmax_b S_j(a, b) + log sum_c q_j(c)        b, c among the top_k of U_j, q = softmax U_j

The second term keeps the mass that the marginal gives its candidates, so a selector whose B is zero changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SMOOTH = 20.0  # tokens that are thought to have come before, with the corpus's own shares
LEAST = -3.0  # what follows nowhere need not be told from what nearly never does
START = 0.6  # of the lifts: the marginals know a part of them


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

    @torch.no_grad()
    def start_from(self, stream: Tensor, mean_hidden: Tensor) -> None:
        """Begins with which token follows which in a corpus: A B^T is log p(b | a) / p(b), in the rank that there is.

        W h must then be about 1: every row of W is the direction in which hidden states are alike.
        """
        vocab, rank = self.predecessor_codebook.shape
        left, right = lifts(stream, vocab, rank)
        self.predecessor_codebook.copy_(left)
        self.successor_codebook.copy_(START * right)
        self.hidden_projection.copy_((mean_hidden / mean_hidden.square().sum()).expand(rank, -1))

    def added(self, hidden: Tensor, before: Tensor, tokens: Tensor) -> Tensor:
        """hidden `[N, H]`, the tokens before `[N]`, candidates `[N, K]` -> what is added to U, `[N, K]`."""
        state = F.embedding(before, self.predecessor_codebook) * (hidden @ self.hidden_projection.T)
        return torch.bmm(F.embedding(tokens, self.successor_codebook), state[:, :, None])[..., 0]


def lifts(stream: Tensor, vocab: int, rank: int) -> tuple[Tensor, Tensor]:
    """Factors [vocab, rank] of log p(b | a) / p(b), smoothed; frequent tokens count more in what is left out."""
    ids = stream.long()
    counts = torch.bincount(ids[:-1] * vocab + ids[1:], minlength=vocab * vocab).view(vocab, vocab).float()
    before, share = counts.sum(1, keepdim=True), (counts.sum(0) + 1) / (counts.sum() + vocab)
    lift = ((counts + SMOOTH * share) / (before + SMOOTH) / share).log().clamp_min(LEAST)
    weights = (before[:, 0] + 1).sqrt(), share.sqrt()
    torch.manual_seed(0)
    u, s, v = torch.svd_lowrank(weights[0][:, None] * lift * weights[1], q=rank, niter=4)
    return u * s.sqrt() / weights[0][:, None], v * s.sqrt() / weights[1][:, None]


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
