"""Conditional trees in a draft's own pass on a GPU: the selector's scores and the search over them, with no host sync.

Of the same logits and states the trees are those of `selector.build`, but where two scores differ by their last bits.
"""

from __future__ import annotations

import torch

from hedgerow.model.cuda_trees import pack
from hedgerow.model.selector import Selector
from kernels.gpu.linear import linear
from kernels.gpu.pair_scores import pair_scores
from kernels.gpu.topk_logprobs import topk_logprobs
from kernels.gpu.tree_pairs import tree_pairs


class CudaSelector:
    """A selector's weights on the device; the codebooks in float32, as they are read."""

    def __init__(self, selector: Selector, device: torch.device, dtype: torch.dtype) -> None:
        self.top_k = selector.top_k
        self.predecessor, self.successor = selector.predecessor.to(device), selector.successor.to(device)
        self.projection = selector.projection.T.to(device, dtype).contiguous()  # [rank, hidden]

    def build(
        self,
        normed: torch.Tensor,
        drafted: torch.Tensor,
        logits: torch.Tensor,
        anchors: torch.Tensor,
        budgets: torch.Tensor,
        caps: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Trees into out [S, 3 nodes + 1], as `read_trees` reads them, of logits [S, L, V] and of the rows `drafted`
        [S * L] of normed [rows, hidden]; anchors, budgets and caps [S]. A row of no sequence has a budget of 0."""
        (sequences, depth), rank = logits.shape[:2], len(self.projection)
        best = topk_logprobs(logits, self.top_k)
        state = torch.empty(len(drafted), rank, device=logits.device)
        linear(normed, self.projection, state, drafted)
        given = best.logprobs, best.tokens, state.view(sequences, depth, rank), anchors, caps
        scores, choice = pair_scores(*given, self.predecessor, self.successor)
        pack(tree_pairs(scores, choice, best.tokens, budgets, out.shape[1] // 3), out)
