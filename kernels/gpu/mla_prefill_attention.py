"""Path P's attention: chunks of a prompt, causal, over the paged MLA cache. Words and shapes as in mla_tree_attention.py.

A row's bits are a function of its query and of the keys 0 .. p alone: blocks of 64 from position 0 on, one pass. They
do not depend on where its chunk begins or ends, on the batch or on the page layout.
"""

from __future__ import annotations

import torch

from kernels.gpu.mla_reference import prefill_attention_reference


def mla_prefill_attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    page_table: torch.Tensor,
    prefix_lens: torch.Tensor,
    row_start: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Writes out. As `mla_tree_attention`, but every sequence's rows are a chain, and there is no limit to their number:
    row row_start[b] + j stands at position prefix_lens[b] + j and sees the slots 0 .. prefix_lens[b] + j.

    q [R, H, C+P] bf16, cache [pages, 64, C+P] bf16, page_table [B, n] int32, prefix_lens [B] int32, row_start [B+1]
    int32, out [R, H, C] bf16. No host sync, no allocation. Padding rows come out as zeros. On a CPU the reference runs.
    """
    if not q.is_cuda:
        out.copy_(prefill_attention_reference(q, cache, page_table, prefix_lens, row_start, out.shape[-1]))
        return
    raise NotImplementedError("the kernel follows")
