"""What the attention kernels of this folder compute, in plain torch and float32. Shapes as in mla_tree_attention.py.

    o[r, h] = sum_j softmax_j(q[r, h] . key_j) key_j[:C]        j over the keys that row r sees

Rows row_start[b] .. row_start[b+1]-1 belong to sequence b; its row j has its key in slot prefix_lens[b] + j. Slot s
lies in page page_table[b, s // 64] at offset s % 64. A row sees every slot before its prefix length, and of the step's
own slots those that its bitmask (tree) or its place (chain) names. Rows from row_start[B] on are padding: zeros.
"""

from __future__ import annotations

import torch

PAGE = 64


def tree_attention_reference(
    q: torch.Tensor,
    cache: torch.Tensor,
    page_table: torch.Tensor,
    prefix_lens: torch.Tensor,
    row_start: torch.Tensor,
    ancestors: torch.Tensor,
    latent: int,
) -> torch.Tensor:
    """q [R, H, W], cache [pages, 64, W], latent C <= W -> [R, H, C] float32. A row that sees nothing gives zeros."""
    out = q.new_zeros(*q.shape[:2], latent, dtype=torch.float32)
    starts = row_start.tolist()
    for b, prefix in enumerate(prefix_lens.tolist()):
        rows = slice(starts[b], starts[b + 1])
        own = torch.arange(starts[b + 1] - starts[b], device=q.device)
        sees = ((ancestors[rows, None] >> own) & 1).bool()
        keys = cached(cache, page_table[b], prefix + len(own))
        out[rows] = _attend(q[rows], keys, prefix, sees, latent)
    return out


def cached(cache: torch.Tensor, pages: torch.Tensor, count: int) -> torch.Tensor:
    """Slots 0 .. count-1 of one sequence, [count, W]."""
    slots = torch.arange(count, device=cache.device)
    return cache[pages[slots // PAGE].long(), slots % PAGE]


def _attend(q: torch.Tensor, keys: torch.Tensor, prefix: int, sees: torch.Tensor, latent: int) -> torch.Tensor:
    keys = keys.float()
    visible = torch.cat([sees.new_ones(len(q), prefix), sees], 1)
    live = visible.any(0)  # a slot that no row sees may hold anything, NaN too
    keys = torch.where(live[:, None], keys, 0.0)
    scores = torch.einsum("rhw,kw->rhk", q.float(), keys).masked_fill(~visible[:, None], float("-inf"))
    return torch.einsum("rhk,kc->rhc", scores.softmax(-1).nan_to_num(0.0), keys[:, :latent])
