"""DFlash 2's candidate selector: how likely a token is after another one, of the best of two neighbouring positions.

    S_j(a, b) = U_j(b) + <A[a] * (W h_j), B[b]>        U: logits, h: normed hidden states, b among the top_k of U_j
    log p_j(b | a) = log softmax_b S_j(a, b) + log sum_c q_j(c)        c among the same, q = softmax U_j

The published model walks S from the anchor. For a tree, whose paths end at different depths, the candidates share the
mass that the marginal gives them: without it a path would cost nothing where the marginal is flat.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch

from hedgerow.model.draft_config import DraftConfig, SelectorSize, selector_size
from hedgerow.model.draft_tensors import selector_tensors
from hedgerow.model.fields import Fields
from hedgerow.model.interface import Draft
from hedgerow.model.loader import Checkpoint
from hedgerow.model.proposer import OfModel, Proposed
from kernels.tree_build import PlainTree, top_logprobs
from kernels.tree_pairs import tree_pairs_heap

Trees = Literal["auto", "conditional", "marginal"]
BESIDE = "selector"  # a folder, of a drafter of the first kind
DEVICE_NODES = (16, 63)  # sizes of trees on a GPU: each is a kernel of its own


class Pairs(NamedTuple):
    """What `kernels.tree_pairs` takes."""

    logprobs: torch.Tensor  # [S, L, K, K]
    choice: torch.Tensor  # [S, L, K, K] int64
    tokens: torch.Tensor  # [S, L, K] int64


class Selector:
    """Immutable once loaded."""

    def __init__(self, size: SelectorSize, predecessor: torch.Tensor, successor: torch.Tensor, w: torch.Tensor) -> None:
        self.top_k = size.top_k
        self.predecessor, self.successor = predecessor, successor  # [vocabulary, rank]
        self.projection = w.T.contiguous()  # [hidden, rank]

    @classmethod
    def find(cls, folder: Path, config: DraftConfig) -> Selector | None:
        """Of a DFlash 2 checkpoint, or of the folder beside another one's weights. Raises ConfigError and
        CheckpointError.
        """
        if config.selector is not None:
            return cls.of(Checkpoint(folder), config, config.selector)
        beside = folder / BESIDE
        if not beside.is_dir():
            return None
        f = Fields.read(beside / "config.json")
        size = selector_size(Fields(f.file, {**f.values, "vocab_size": config.vocab_size}), f)
        return None if size is None else cls.of(Checkpoint(beside), config, size)

    @classmethod
    def of(cls, checkpoint: Checkpoint, config: DraftConfig, size: SelectorSize) -> Selector:
        wanted = selector_tensors(checkpoint.stored, config, size)
        return cls(size, *(checkpoint.weight(one.name, *one.shape) for one in wanted))

    def to(self, device: torch.device) -> Selector:
        """In place."""
        self.predecessor, self.successor = self.predecessor.to(device), self.successor.to(device)
        self.projection = self.projection.to(device)
        return self

    @torch.inference_mode()
    def pairs(self, logits: torch.Tensor, hidden: torch.Tensor, anchors: torch.Tensor, caps: torch.Tensor) -> Pairs:
        """logits [S, L, V], hidden [S, L, H], anchors and caps [S].

        A cap leaves at each depth its number of candidates, the best of those that follow the likeliest path; 0: all.
        """
        best = top_logprobs(logits, self.top_k)
        tokens, k = best.tokens, best.tokens.shape[-1]
        before = torch.cat([anchors[:, None, None].expand(-1, 1, k), tokens[:, :-1]], 1)  # [S, L, K]
        state = self.predecessor[before] * (hidden.float() @ self.projection)[:, :, None]
        scores = best.logprobs[:, :, None] + state @ self.successor[tokens].mT
        mass = best.logprobs.logsumexp(-1)[:, :, None, None]
        logprobs = (scores.log_softmax(-1) + mass).clamp(max=0).nan_to_num(nan=-torch.inf, neginf=-torch.inf)
        order = logprobs.sort(dim=-1, descending=True, stable=True)
        if bool((caps > 0).any()):
            logprobs = capped(logprobs, order.indices, caps)
            order = logprobs.sort(dim=-1, descending=True, stable=True)
        return Pairs(order.values, order.indices, tokens)


def capped(logprobs: torch.Tensor, choice: torch.Tensor, caps: torch.Tensor) -> torch.Tensor:
    """`logprobs` with -inf for what the caps leave out: at each depth all but the best after the likeliest path."""
    out, depth, k = logprobs.clone(), choice.shape[1], choice.shape[-1]
    at = torch.zeros(len(caps), dtype=torch.int64, device=caps.device)
    every, caps = torch.arange(len(caps), device=caps.device), torch.where(caps > 0, caps, k)
    for d in range(depth):
        ranked = choice[every, d, at]  # [S, K]
        place = torch.empty_like(ranked).scatter_(1, ranked, torch.arange(k, device=caps.device).expand_as(ranked))
        out[:, d].masked_fill_((place >= caps[:, None])[:, None], -torch.inf)
        at = ranked[:, 0]
    return out


@runtime_checkable
class BuildsPairs(Protocol):
    """A drafter with a form of its own of `Selector.pairs` and of the trees: the compiled one."""

    def pair_trees(
        self,
        selector: Selector,
        logits: torch.Tensor,
        hidden: torch.Tensor,
        anchors: Sequence[int],
        budgets: Sequence[int],
        caps: Sequence[int],
    ) -> list[PlainTree]: ...


@runtime_checkable
class ProposesPairs(Protocol):
    """A drafter whose pass goes on to conditional trees: the one on a GPU."""

    def select(self, selector: Selector) -> None: ...

    def propose(
        self,
        states: Sequence[Any],
        anchors: Sequence[int],
        positions: Sequence[int],
        budgets: Sequence[int],
        caps: Sequence[int],
        pairs: bool = False,
    ) -> Proposed: ...


class FromPairs(OfModel):
    """A Proposer of conditional trees: each token's probability depends on the token before it."""

    def __init__(self, model: Draft, selector: Selector) -> None:
        super().__init__(model)
        self.selector = selector
        self.builds = model if isinstance(model, BuildsPairs) else None
        self.whole = model if isinstance(model, ProposesPairs) else None
        if self.whole is not None:
            self.whole.select(selector)

    def propose(
        self,
        states: Sequence[Any],
        anchors: Sequence[int],
        positions: Sequence[int],
        budgets: Sequence[int],
        caps: Sequence[int],
    ) -> Proposed:
        if self.whole is not None and max(budgets) <= DEVICE_NODES[-1]:
            return self.whole.propose(states, anchors, positions, budgets, caps, pairs=True)
        logits, hidden = self.model.draft_states(states, anchors, positions)
        forwarded = time.perf_counter_ns()
        if self.builds is not None:
            trees = self.builds.pair_trees(self.selector, logits, hidden, anchors, budgets, caps)
            return Proposed(trees, forwarded)
        device = logits.device
        self.selector.to(device)
        pairs = self.selector.pairs(
            logits, hidden, torch.tensor(anchors, device=device), torch.tensor(caps, device=device)
        )
        return Proposed(build(pairs, budgets), forwarded)

    def warm(self, sizes: Sequence[int]) -> None:
        """There is nothing to make."""


def drafts(model: Draft, folder: Path, trees: Trees = "auto") -> Draft | FromPairs:
    """What a drafter's engine drives: `model`, whose trees are of its marginals, or conditional ones by its selector.

    "auto": conditional where `folder` has a selector and the engine has a form of its own of them. That pays: more
    tokens of a second of processor in every setting that was measured. PyTorch's search is interpreted, which does not
    pay with many sequences, and no card has measured its own form (`ProposesPairs`). Raises ConfigError and
    CheckpointError.
    """
    if trees == "marginal" or (trees == "auto" and not isinstance(model, BuildsPairs)):
        return model
    selector = Selector.find(folder, model.config)
    return model if selector is None else FromPairs(model, selector)


def build(pairs: Pairs, budgets: Sequence[int]) -> list[PlainTree]:
    """One tree a sequence: on a GPU there, else by best-first search, which finds a few nodes soonest."""
    if pairs.logprobs.is_cuda and max(budgets) <= DEVICE_NODES[-1]:
        return build_on_device(pairs, budgets)
    logprobs, choice, tokens = (part.tolist() for part in pairs)
    return [tree_pairs_heap(logprobs[s], choice[s], tokens[s], budget) for s, budget in enumerate(budgets)]


def build_on_device(pairs: Pairs, budgets: Sequence[int]) -> list[PlainTree]:
    """By the kernel; one copy back."""
    from kernels.gpu.tree_pairs import tree_pairs  # needs triton

    nodes = next(size for size in DEVICE_NODES if size >= max(budgets))
    wanted = torch.tensor(budgets, dtype=torch.int32, device=pairs.logprobs.device)
    built = tree_pairs(pairs.logprobs.contiguous(), pairs.choice.int(), pairs.tokens.int(), wanted, nodes)
    columns = (built.tokens.tolist(), built.parents.tolist(), built.logprobs.tolist(), built.counts.tolist())
    return [PlainTree(t[:n], p[:n], q[:n]) for t, p, q, n in zip(*columns, strict=True)]
