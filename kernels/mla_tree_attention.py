"""Attention of tree rows over a paged latent cache, in MLA's absorbed form (arXiv 2405.04434 §2.1.2).

    s[r, h, j] = q[r, h] . key_j,   p = softmax over the keys that row r sees,   o[r, h] = sum_j p[r, h, j] latent_j

q [R, H, W] (scale and W_UK folded in), cache [S, W] (latent | rotated key) -> o [R, H, C], C <= W.

The keys of a row at position p are split at B = 64 * (p // 64): those before B, in order of position, as one product
that
every row of a group shares; and the 64 positions from B on, gathered along the row's own path and masked past p.
Position for
position this is what plain decoding computes, so a node's bits do not depend on where in a tree it stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from kernels.dispatch import op
from kernels.linear import RowLaw, linear, pad_rows

TEST_SHAPES = [(1, 4, 48, 32), (9, 8, 160, 128)]  # (R, H, W, C)
PAGE = 64


class AttentionGroup(NamedTuple):
    """Rows that share everything before B."""

    rows: slice | torch.Tensor  # of q
    before: slice | torch.Tensor | None  # slots of positions 0 .. B-1; None: B is 0
    tail: torch.Tensor  # [rows * 64] slots of positions B .. B+63 of each row; any slot past the row's position
    mask: torch.Tensor  # [rows, 1, 64] 0, and -inf past the row's position


@op
def mla_tree_attention(
    q: torch.Tensor, cache: torch.Tensor, groups: Sequence[AttentionGroup], latent: int, law: RowLaw
) -> torch.Tensor:
    if len(groups) == 1:
        return _attend(q, cache, groups[0], latent, law)
    out = q.new_empty(q.shape[0], q.shape[1], latent)
    for group in groups:
        out[group.rows] = _attend(q[group.rows], cache, group, latent, law)
    return out


def _attend(q: torch.Tensor, cache: torch.Tensor, group: AttentionGroup, latent: int, law: RowLaw) -> torch.Tensor:
    rows, heads, width = q.shape
    near = cache.index_select(0, group.tail).view(rows, PAGE, width)
    q = pad_rows(q, law.padded(heads), 1)
    scores = torch.baddbmm(group.mask, q, near.mT)
    if group.before is None:
        return torch.bmm(scores.softmax(-1), near[..., :latent])[:, :heads]
    far = cache[group.before]
    before = far.shape[0]
    flat = pad_rows(q.reshape(-1, width), law.padded(q.shape[0] * q.shape[1]))
    far_scores = linear(flat, far.T, law)[: rows * q.shape[1]].view(rows, -1, before)
    p = torch.cat([far_scores, scores], -1).softmax(-1)
    p_far = pad_rows(p.view(-1, before + PAGE)[:, :before], flat.shape[0])
    context = linear(p_far, far[:, :latent], law)[: rows * q.shape[1]].view(rows, -1, latent)
    return torch.baddbmm(context, p[..., before:], near[..., :latent])[:, :heads]
